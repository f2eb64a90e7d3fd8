"""Op `sample_tokens`: from logits to tokens, as a pure function of (logits, seed, position).

The contract, in order, for every row by itself:

1. penalties (repetition over prompt and completion, presence and frequency over the completion),
   logit bias, grammar bitmask;
2. division by the temperature; temperature 0 is greedy and ends here (lowest id on a tie);
3. top-k, then top-p over what is left, then min-p relative to the likeliest. Each becomes a threshold:
   all tokens that reach the last kept value stay, so ties never depend on an order;
4. token = argmax(logit / temperature + gumbel(seed, position, token id)), which is a sample of the
   softmax (E. J. Gumbel, 1954) without drawing from a stream, so one seed gives one text however
   requests are batched and whether drafts were verified or not.

Logprobs are those of the raw logits, before step 1.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingTensors:
    """Parameters of R rows. Tensors are on the logits' device.

    temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty: [R] float32.
    top_k: [R] int32, 0 = off. seed: [R] int64. position: [R] int64, absolute position of the token
    to come. output_counts: [R, V] int32, how often each token occurs in the completion;
    prompt_mask: [R, V] bool, tokens of the prompt; both None when no row has penalties.
    bias_rows, bias_ids [B] int64, bias_values [B] float32: added to single logits (-inf forbids).
    bitmask: [R, ceil(V / 32)] int32, all ones for rows without a grammar, or None.
    num_logprobs: None = no logprobs, n = the token's own and the n likeliest.
    The flags say what any row needs, so that nothing else is touched.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seed: torch.Tensor
    position: torch.Tensor
    repetition_penalty: torch.Tensor | None = None
    presence_penalty: torch.Tensor | None = None
    frequency_penalty: torch.Tensor | None = None
    output_counts: torch.Tensor | None = None
    prompt_mask: torch.Tensor | None = None
    bias_rows: torch.Tensor | None = None
    bias_ids: torch.Tensor | None = None
    bias_values: torch.Tensor | None = None
    bitmask: torch.Tensor | None = None
    num_logprobs: int | None = None
    is_all_greedy: bool = False
    has_filters: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    """token_ids: [R] int32. logprobs: [R] float32; top_ids [R, n] int32; top_logprobs [R, n] float32.

    `is_finite`: [R] bool, False where a row held a NaN or no allowed token; its token is no token.
    """

    token_ids: torch.Tensor
    is_finite: torch.Tensor
    logprobs: torch.Tensor | None = None
    top_ids: torch.Tensor | None = None
    top_logprobs: torch.Tensor | None = None


def greedy(num_rows: int, device: str = "cpu", num_logprobs: int | None = None) -> SamplingTensors:
    """Parameters of rows that all take the likeliest token."""
    zeros = torch.zeros(num_rows, device=device)
    return SamplingTensors(
        temperature=zeros,
        top_k=torch.zeros(num_rows, dtype=torch.int32, device=device),
        top_p=torch.ones(num_rows, device=device),
        min_p=zeros,
        seed=torch.zeros(num_rows, dtype=torch.int64, device=device),
        position=torch.zeros(num_rows, dtype=torch.int64, device=device),
        num_logprobs=num_logprobs,
        is_all_greedy=True,
        has_filters=False,
    )
