"""Sampling in plain torch, a row at a time, so that no row can depend on its batch."""

import math
from collections.abc import Callable

import torch

from finback.kernels.sample_tokens import SampledTokens, SamplingTensors
from finback.kernels.sample_tokens.adjust import adjust
from finback.kernels.sample_tokens.noise import gumbel

_FIRST_CANDIDATES = 64
_GROWTH = 16


def sample_tokens(logits: torch.Tensor, params: SamplingTensors) -> SampledTokens:
    """logits: float32 [R, V], not changed. See the package's docstring for the contract."""
    adjusted = adjust(logits, params)
    temperatures = params.temperature.tolist()
    chosen = torch.empty(logits.shape[0], dtype=torch.int32, device=logits.device)
    finite = torch.empty(logits.shape[0], dtype=torch.bool, device=logits.device)
    for row, temperature in enumerate(temperatures):
        scores = adjusted[row]
        finite[row] = scores.max().isfinite()  # max is NaN where any is
        if temperature > 0.0:
            scores = _noisy(scores / temperature, params, row)
        chosen[row] = scores.argmax()
    found = SampledTokens(token_ids=chosen, is_finite=finite)
    return (
        found if params.num_logprobs is None else with_logprobs(found, logits, params.num_logprobs)
    )


def _noisy(scores: torch.Tensor, params: SamplingTensors, row: int) -> torch.Tensor:
    if params.has_filters:
        limit = threshold(
            scores, int(params.top_k[row]), float(params.top_p[row]), float(params.min_p[row])
        )
        scores = scores.masked_fill(scores < limit, float("-inf"))
    ids = torch.arange(scores.shape[0], device=scores.device)
    return scores + gumbel(int(params.seed[row]), int(params.position[row]), ids)


def threshold(scores: torch.Tensor, top_k: int, top_p: float, min_p: float) -> float:
    """The least score that top-k, top-p and min-p leave in; -inf if all are. scores: [V]."""
    vocab_size = scores.shape[0]
    limit = float("-inf")
    highest = float(scores.max())
    if 0 < top_k < vocab_size:
        limit = float(torch.topk(scores, top_k).values[-1])
    if top_p < 1.0:
        limit = max(limit, _top_p_limit(scores, limit, top_p))
    if min_p > 0.0:
        limit = max(limit, highest + math.log(min_p))
    return limit


def _top_p_limit(scores: torch.Tensor, limit: float, top_p: float) -> float:
    """The last score of the smallest set that holds `top_p` of the mass at or above `limit`."""
    kept = scores.masked_fill(scores < limit, float("-inf"))
    total = torch.logsumexp(kept.double(), 0)
    size = _FIRST_CANDIDATES
    while True:
        size = min(size, scores.shape[0])
        best = torch.topk(kept, size).values
        reached = ((best.double() - total).exp().cumsum(0) >= top_p).nonzero()
        if len(reached):
            return float(best[reached[0, 0]])
        if size == scores.shape[0]:
            return float(best[-1])  # rounding: the whole mass is just under top_p
        size *= _GROWTH


def _log_mass(scores: torch.Tensor) -> torch.Tensor:
    """log(sum(exp(scores))). scores: [V]."""
    return torch.logsumexp(scores, 0)


def with_logprobs(
    found: SampledTokens,
    logits: torch.Tensor,
    num_top: int,
    log_mass: Callable[[torch.Tensor], torch.Tensor | float] = _log_mass,
) -> SampledTokens:
    """Add the logprobs of the raw distribution: the token's own and the `num_top` likeliest."""
    own, ids, values = [], [], []
    for row, token_id in enumerate(found.token_ids.tolist()):
        total = log_mass(logits[row])
        own.append(logits[row, token_id] - total)
        best = torch.topk(logits[row], num_top)
        ids.append(best.indices.int())
        values.append(best.values - total)
    return SampledTokens(
        token_ids=found.token_ids,
        is_finite=found.is_finite,
        logprobs=torch.stack(own),
        top_ids=torch.stack(ids),
        top_logprobs=torch.stack(values),
    )
