"""The obvious twin of the engine: one sequence, no pages, no reuse, the whole context every step."""

import numpy as np
import torch

from finback.kernels import dispatch
from finback.kernels.sample_tokens import SamplingTensors
from finback.shared.engine.sequence import SequenceSpec
from finback.shared.engine.stopping import find_stop, stop_ids
from finback.shared.models.batch import ForwardBatch
from finback.shared.models.causal_lm import CausalLM


def slow_completion(
    model: CausalLM, spec: SequenceSpec, *, max_model_len: int, eos_token_ids: tuple[int, ...]
) -> tuple[list[int], str]:
    """(completion, finish reason) by definition."""
    sample = dispatch.select("sample_tokens", "cpu", model.mode).chosen.load()
    prompt = spec.token_ids.tolist()
    completion: list[int] = []
    stops = stop_ids(spec.sampling, eos_token_ids)
    while True:
        logits = _last_logits(model, [*prompt, *completion])
        params = _parameters(spec, prompt, completion, stops, logits.shape[1])
        token = int(sample(logits, params).token_ids[0])
        stop = find_stop(
            [token],
            num_completion=len(completion),
            max_completion=min(spec.sampling.max_tokens, max_model_len - len(prompt)),
            min_tokens=spec.sampling.min_tokens,
            stops=stops,
        )
        completion.append(token)
        if stop.reason is not None:
            return completion, stop.reason


def _last_logits(model: CausalLM, tokens: list[int]) -> torch.Tensor:
    count = len(tokens)
    positions = torch.arange(count, dtype=torch.int32)
    batch = ForwardBatch(
        token_ids=torch.tensor(tokens, dtype=torch.int32),
        positions=positions,
        slot_mapping=positions,
        block_tables=torch.zeros((1, 1), dtype=torch.int32),
        cu_seqlens=torch.tensor([0, count], dtype=torch.int32),
        context_lens=torch.tensor([count], dtype=torch.int32),
        max_q=count,
        max_context=count,
        logit_rows=torch.tensor([count - 1]),
    )
    size = -(-count // 64) * 64
    return model.logits(model.forward(batch, model.new_pool(1, size)))


def _parameters(
    spec: SequenceSpec,
    prompt: list[int],
    completion: list[int],
    stops: frozenset[int],
    vocab_size: int,
) -> SamplingTensors:
    sampling = spec.sampling
    prompt_mask = torch.zeros(1, vocab_size, dtype=torch.bool)
    prompt_mask[0, prompt] = True
    counts = np.bincount(np.array(completion, dtype=np.int64), minlength=vocab_size)
    biases = dict(sampling.logit_bias or {})
    if len(completion) < sampling.min_tokens:
        biases |= dict.fromkeys(stops, float("-inf"))
    return SamplingTensors(
        temperature=torch.tensor([sampling.temperature]),
        top_k=torch.tensor([sampling.top_k], dtype=torch.int32),
        top_p=torch.tensor([sampling.top_p]),
        min_p=torch.tensor([sampling.min_p]),
        seed=torch.tensor([spec.seed]),
        position=torch.tensor([len(prompt) + len(completion)]),
        repetition_penalty=torch.tensor([sampling.repetition_penalty]),
        presence_penalty=torch.tensor([sampling.presence_penalty]),
        frequency_penalty=torch.tensor([sampling.frequency_penalty]),
        output_counts=torch.tensor(counts, dtype=torch.int32)[None],
        prompt_mask=prompt_mask,
        bias_rows=torch.zeros(len(biases), dtype=torch.int64),
        bias_ids=torch.tensor(list(biases), dtype=torch.int64),
        bias_values=torch.tensor(list(biases.values()), dtype=torch.float32),
        is_all_greedy=sampling.temperature == 0.0,
    )
