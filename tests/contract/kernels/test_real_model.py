"""The embedded model: reference against transformers, the compiled stack against the reference.

Measured on the weights of SmolLM2-135M-Instruct Q4_1 (see docs/LOG.md): the compiled stack with its
default float16 KV differs from the reference by at most 0.05 in a logit; 0.1 is what we promise.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from finback.shared.codec.load import load_tokenizer
from finback.shared.models.causal_lm import CausalLM
from finback.shared.models.gguf_weights import GgufWeights
from finback.shared.models.loader import load_model, open_weights
from finback.shared.models.source import open_source
from finback.shared.models.weight_names import hf_name, shapes
from support.forward_batches import Chunk, flat_batch, logits_of

pytestmark = pytest.mark.slow

MAX_LOGIT_ERROR: Final = 0.1
BLOCK: Final = 64
NUM_TOKENS: Final = 64
PROMPTS: Final = (
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):",
    "Water boils at",
    "The quick brown fox",
    "In 1969, humans",
    "To make bread, you need",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "1, 2, 3, 4,",
    "Photosynthesis is",
    "Dear Sir or Madam,",
    "The sum of 12 and 30 is",
    "SELECT name FROM",
    "My favourite colour is",
    "A triangle has",
    "The largest planet",
    "import numpy as np\n",
    "Shakespeare wrote",
    "If it rains tomorrow,",
    "Le chat est sur",
)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = load_tokenizer(open_source().text)
    return [tokenizer.encode(text) for text in PROMPTS]


@pytest.fixture(scope="module")
def reference() -> CausalLM:
    return load_model(open_source(), mode="reference", num_threads=2)


@pytest.fixture(scope="module")
def compiled() -> Iterator[CausalLM]:
    model = load_model(open_source(), mode="deterministic", num_threads=2)
    yield model
    model.close()


@pytest.fixture(scope="module")
def answers(reference: CausalLM, prompts: list[list[int]]) -> list[tuple[list[int], torch.Tensor]]:
    """Greedy continuations by the reference: token ids with the prompt, and their logits."""
    return _generate(reference, prompts)


def _generate(model: CausalLM, prompts: list[list[int]]) -> list[tuple[list[int], torch.Tensor]]:
    """All prompts together. Logits [tokens - 1, vocab] are those after every token but the last."""
    blocks = [[2 * i, 2 * i + 1] for i in range(len(prompts))]
    pool = model.new_pool(2 * len(prompts), BLOCK)
    texts = [list(prompt) for prompt in prompts]
    first = [0] * len(prompts)
    rows: list[list[torch.Tensor]] = [[] for _ in prompts]
    for _ in range(NUM_TOKENS):
        chunks = [
            Chunk(token_ids=text[start:], first=start, blocks=table)
            for text, start, table in zip(texts, first, blocks, strict=True)
        ]
        sizes = [len(chunk.token_ids) for chunk in chunks]
        found = torch.split(logits_of(model, pool, chunks), sizes)
        for i, logits in enumerate(found):
            rows[i].append(logits)
            first[i] = len(texts[i])
            texts[i].append(int(logits[-1].argmax()))
    return [(text, torch.cat(row)) for text, row in zip(texts, rows, strict=True)]


def test_reference_is_greedy_equal_to_transformers(
    answers: list[tuple[list[int], torch.Tensor]], prompts: list[list[int]]
) -> None:
    source = open_source()
    config = source.dense
    oracle: Any = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            rms_norm_eps=config.rms_norm_eps,
            max_position_embeddings=config.max_model_len,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=True,
        )
    )
    oracle.eval()
    reader = open_weights(source)
    assert isinstance(reader, GgufWeights)
    state = {hf_name(name): reader.tensor(name, torch.float32) for name in shapes(config)}
    oracle.load_state_dict(state, strict=False)
    with torch.inference_mode():
        for (text, logits), prompt in zip(answers, prompts, strict=True):
            # One pass over our text: each token must be the oracle's choice after those before it.
            wanted = oracle(torch.tensor([text[:-1]])).logits[0]
            assert wanted[len(prompt) - 1 :].argmax(-1).tolist() == text[len(prompt) :]
            torch.testing.assert_close(logits, wanted, atol=2e-3, rtol=0)


def test_compiled_stack_stays_close(
    compiled: CausalLM, answers: list[tuple[list[int], torch.Tensor]]
) -> None:
    """Logit error, KL divergence and perplexity over the reference's own texts."""
    pool = compiled.new_pool(8, BLOCK)
    worst, divergences, losses = 0.0, [], []
    for text, wanted in answers:
        found = logits_of(compiled, pool, [Chunk(token_ids=text[:-1])])
        worst = max(worst, float((found - wanted).abs().max()))
        p, q = wanted.log_softmax(-1), found.log_softmax(-1)
        divergences.append((p.exp() * (p - q)).sum(-1))
        targets = torch.tensor(text[1:])[:, None]
        losses.append([float(-x.gather(1, targets).mean()) for x in (p, q)])
    assert worst < MAX_LOGIT_ERROR
    assert float(torch.cat(divergences).mean()) < 1e-4
    reference_loss, loss = np.mean(losses, axis=0)
    assert abs(np.exp(loss) / np.exp(reference_loss) - 1) < 2e-3


def test_compiled_tokens_differ_only_at_near_ties(
    compiled: CausalLM, answers: list[tuple[list[int], torch.Tensor]], prompts: list[list[int]]
) -> None:
    found = _generate(compiled, prompts)
    num_equal = 0
    for (text, _), (wanted, logits) in zip(found, answers, strict=True):
        if text == wanted:
            num_equal += 1
            continue
        split = next(
            i for i, pair in enumerate(zip(text, wanted, strict=True)) if pair[0] != pair[1]
        )
        best = logits[split - 1].topk(2).values
        assert float(best[0] - best[1]) < MAX_LOGIT_ERROR
    assert num_equal >= 15


@pytest.mark.parametrize("seed", range(4))
def test_bits_do_not_depend_on_chunks_or_company(
    seed: int, compiled: CausalLM, prompts: list[list[int]]
) -> None:
    """150 tokens over three blocks, in chunks of odd sizes and at block borders, beside others."""
    rng = np.random.default_rng(seed)
    text = [token for prompt in prompts for token in prompt]
    text = (text * 3)[:150]
    whole = logits_of(compiled, compiled.new_pool(16, BLOCK), [Chunk(token_ids=text)])
    pool = compiled.new_pool(16, BLOCK)
    borders = sorted({*rng.integers(1, 149, 6 + 8 * seed).tolist(), 63, 64, 65, 128})
    rows, start = [], 0
    for end in [*borders, len(text)]:
        chunk = Chunk(token_ids=text[start:end], first=start, blocks=[9, 4, 13])
        company = [
            Chunk(token_ids=prompts[int(i)], blocks=[int(n)])
            for n, i in enumerate(rng.integers(0, len(prompts), int(rng.integers(0, 4))))
        ]
        rows.append(logits_of(compiled, pool, [*company, chunk])[-len(chunk.token_ids) :])
        start = end
    assert torch.equal(torch.cat(rows), whole)


def test_one_thread_gives_the_bits_of_two(compiled: CausalLM, prompts: list[list[int]]) -> None:
    single = load_model(open_source(), mode="deterministic", num_threads=1)
    found = [
        logits_of(model, model.new_pool(4, BLOCK), [Chunk(token_ids=prompts[7] * 4)])
        for model in (single, compiled)
    ]
    assert torch.equal(*found)


def test_decode_in_reference_precision(compiled: CausalLM, reference: CausalLM) -> None:
    """With float32 KV only the order of additions is left to differ."""
    text = list(range(100, 180))
    found, wanted = (
        logits_of(model, model.new_pool(4, BLOCK, "f32"), [Chunk(token_ids=text)])
        for model in (compiled, reference)
    )
    torch.testing.assert_close(found, wanted, atol=2e-3, rtol=0)


# -- fast mode, where the processor has matrix tiles: chunks of 16 rows and more in bfloat16

MAX_FAST_LOGIT_ERROR: Final = 1.5
"""Measured 0.84 at the second token of "Dear Sir", up to 0.75 elsewhere, 0.16 in the median row.

That token is unstable: rounding only the input and weights of the output projections to bfloat16 in
the reference moves a logit by 1.2 there (docs/LOG.md).
"""


@pytest.fixture(scope="module")
def fast() -> Iterator[CausalLM]:
    model = load_model(open_source(), mode="fast", num_threads=2)
    if not model.numerics.endswith("-amx"):
        model.close()
        pytest.skip(f"fast mode is {model.numerics} here: what deterministic mode is")
    yield model
    model.close()


def test_fast_chunks_stay_close(
    fast: CausalLM, answers: list[tuple[list[int], torch.Tensor]]
) -> None:
    """As above, with bounds of bfloat16."""
    pool = fast.new_pool(8, BLOCK)
    worst, divergences, losses = 0.0, [], []
    for text, wanted in answers:
        found = logits_of(fast, pool, [Chunk(token_ids=text[:-1])])
        worst = max(worst, float((found - wanted).abs().max()))
        p, q = wanted.log_softmax(-1), found.log_softmax(-1)
        divergences.append((p.exp() * (p - q)).sum(-1))
        targets = torch.tensor(text[1:])[:, None]
        losses.append([float(-x.gather(1, targets).mean()) for x in (p, q)])
    assert worst < MAX_FAST_LOGIT_ERROR
    assert float(torch.cat(divergences).mean()) < 5e-4
    reference_loss, loss = np.mean(losses, axis=0)
    assert abs(np.exp(loss) / np.exp(reference_loss) - 1) < 1e-2


def test_fast_tokens_differ_only_at_near_ties(
    fast: CausalLM, answers: list[tuple[list[int], torch.Tensor]], prompts: list[list[int]]
) -> None:
    wanted = {tuple(text): logits for text, logits in answers}
    found = _generate(fast, prompts)
    for (text, _), (reference_text, logits) in zip(found, wanted.items(), strict=True):
        pairs = zip(text, reference_text, strict=True)
        split = next((i for i, pair in enumerate(pairs) if pair[0] != pair[1]), None)
        if split is not None:
            best = logits[split - 1].topk(2).values
            assert float(best[0] - best[1]) < MAX_FAST_LOGIT_ERROR


def test_fast_rows_depend_on_their_own_chunk_only(
    fast: CausalLM, compiled: CausalLM, prompts: list[list[int]]
) -> None:
    """Short chunks have the deterministic bits, long ones their own, whatever runs beside them."""
    text = [token for prompt in prompts for token in prompt][:90]
    short, other = prompts[0][:4], prompts[4] * 7
    alone = logits_of(fast, fast.new_pool(8, BLOCK), [Chunk(token_ids=text)])
    exact = logits_of(compiled, compiled.new_pool(8, BLOCK), [Chunk(token_ids=short)])
    together = logits_of(
        fast,
        fast.new_pool(16, BLOCK),
        [
            Chunk(token_ids=text, blocks=[4, 5]),
            Chunk(token_ids=short, blocks=[6]),
            Chunk(token_ids=other, blocks=[7, 8, 9]),
        ],
    )
    assert torch.equal(together[:90], alone)
    assert torch.equal(together[90:94], exact)
    pool = fast.new_pool(8, BLOCK)
    parts = [
        logits_of(fast, pool, [Chunk(token_ids=text[start:end], first=start)])
        for start, end in ((0, 37), (37, 64), (64, 90))
    ]
    assert torch.equal(torch.cat(parts), alone)


def test_fast_rows_that_leave_have_the_bits_of_all(
    fast: CausalLM, prompts: list[list[int]]
) -> None:
    """The last layer computes only the row blocks that are asked for."""
    text = [token for prompt in prompts for token in prompt][:90]
    whole = logits_of(fast, fast.new_pool(8, BLOCK), [Chunk(token_ids=text)])
    batch = flat_batch([Chunk(token_ids=text)], BLOCK)
    for rows in ([89], [40, 89], [31, 32], []):
        pool = fast.new_pool(8, BLOCK)
        part = replace(batch, logit_rows=torch.tensor(rows, dtype=torch.int64))
        hidden = fast.forward(part, pool)
        if rows:
            assert torch.equal(fast.logits(hidden), whole[rows])
        # What later chunks read is complete.
        more = Chunk(token_ids=text[:20], first=90)
        wanted_pool = fast.new_pool(8, BLOCK)
        fast.forward(batch, wanted_pool)
        found = logits_of(fast, pool, [more])
        assert torch.equal(found, logits_of(fast, wanted_pool, [more]))
