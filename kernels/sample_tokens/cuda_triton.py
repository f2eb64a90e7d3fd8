"""Sampling in Triton: two short kernels, and one more where top-k, top-p or min-p are asked for.

A program scores a stretch of one row and keeps its best; a second kernel takes the best of a row's
stretches. A row's numbers never depend on its batch. Filters become a threshold by a radix search
over the bits of the scores, two bits a pass, so nothing is sorted. The search goes over the candidates
near the maximum, if the threshold is sure to lie among them, else over the whole row.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# (a Triton kernel's arguments have no Python types, and its decorator has none at all)

from dataclasses import replace

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from finback.kernels.sample_tokens import SampledTokens, SamplingTensors
from finback.kernels.sample_tokens.adjust import adjust
from finback.kernels.token_bitmask.cuda_triton import token_bitmask
from finback.kernels.triton_launch import has_dependent_launch, is_interpreted

_STRETCH = 4096
_SEARCH_BLOCK = 8192
_MAX_CANDIDATES = 4096
_CANDIDATE_BLOCK = 1024
_INTERPRETED = tl.constexpr(is_interpreted())


@triton.jit
def _splitmix(value):
    """One step of splitmix64, as in noise.py."""
    value = value + 0x9E3779B97F4A7C15
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def _mix(value):
    """lowbias32, as in noise.py."""
    value = value ^ (value >> 16)
    value = value * 0x7FEB352D
    value = value ^ (value >> 15)
    value = value * 0x846CA68B
    return value ^ (value >> 16)


@triton.jit
def _log2(value):
    """log2 by the hardware's instruction: absolute error 2^-22 between 1/2 and 2, relative elsewhere."""
    if _INTERPRETED:
        return tl.log2(value)
    return tl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [value], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def gumbel(seed, position, ids):
    """noise.py's noise for token ids (uint32)."""
    state = _splitmix(seed ^ _splitmix(position))
    first = (state & 0xFFFFFFFF).to(tl.uint32)
    second = (state >> 32).to(tl.uint32)
    value = _mix(_mix(ids * 0x9E3779B9 + first) ^ second)
    # (value + 0.5) / 2^32, rounded once: both halves are exact, by the bits of 2^23 + half.
    high = ((value >> 16) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    low = ((value & 0xFFFF) | 0x4B000000).to(tl.float32, bitcast=True) - 8388607.5
    uniform = tl.fma(high, 1.52587890625e-05, low * 2.3283064365386963e-10)
    uniform = tl.minimum(uniform, 0.999999940395355224609375)
    # -log(1 - u): a series where 1 - u would lose bits. Relative error under 4e-6.
    series = tl.fma(tl.fma(uniform, 0.16666667, 0.2), uniform, 0.25)
    series = tl.fma(tl.fma(series, uniform, 0.33333334), uniform, 0.5)
    series = tl.fma(series * uniform, uniform, uniform)
    logarithm = -0.6931471805599453 * _log2(1.0 - uniform)
    exponential = tl.where(uniform < 0.0625, series, logarithm)
    return -0.6931471805599453 * _log2(exponential)


@triton.jit
def _best_of_stretch(
    logits_ptr, temperature_ptr, limit_ptr, seed_ptr, position_ptr, value_ptr, id_ptr,
    vocab_size, num_stretches, GREEDY: tl.constexpr, FILTERED: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Best score (NaN if there is one) and its token of BLOCK tokens of a row."""
    if PDL:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    stretch = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    ids = stretch * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab_size
    score = tl.load(logits_ptr + row * vocab_size + ids, mask=inside, other=float("-inf"))
    score = score.to(tl.float32)
    has_nan = tl.max((score != score).to(tl.int32), axis=0)  # noqa: PLR0124 - true for NaN alone
    if not GREEDY:
        temperature = tl.load(temperature_ptr + row)
        if temperature > 0.0:
            score = score * (1.0 / temperature)
            if FILTERED:
                score = tl.where(score < tl.load(limit_ptr + row), float("-inf"), score)
            seed = tl.load(seed_ptr + row).to(tl.uint64, bitcast=True)
            position = tl.load(position_ptr + row).to(tl.uint64, bitcast=True)
            score = score + gumbel(seed, position, ids.to(tl.uint32))
    best = tl.max(score, axis=0)
    # The lowest id of the best: cheaper than carrying ids through the reduction.
    index = tl.min(tl.where(score == best, ids, vocab_size), axis=0)
    best = tl.where(has_nan > 0, float("nan"), best)
    tl.store(value_ptr + row * num_stretches + stretch, best)
    tl.store(id_ptr + row * num_stretches + stretch, index)


@triton.jit
def _best_of_row(
    value_ptr, id_ptr, token_ptr, finite_ptr, num_stretches, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The token of a row, and whether its scores were sound."""
    if PDL:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < num_stretches
    values = tl.load(value_ptr + row * num_stretches + at, mask=inside, other=float("-inf"))
    is_nan = values != values  # noqa: PLR0124 - true for NaN alone
    has_nan = tl.max(is_nan.to(tl.int32), axis=0)
    values = tl.where(is_nan, float("-inf"), values)
    best, index = tl.max(values, axis=0, return_indices=True, return_indices_tie_break_left=True)
    token_id = tl.load(id_ptr + row * num_stretches + index)
    is_finite = (has_nan == 0) & (best > float("-inf")) & (best < float("inf"))
    tl.store(token_ptr + row, token_id)
    tl.store(finite_ptr + row, is_finite.to(tl.int8))


@triton.jit
def _ordered(scores):
    """uint32 keys in the order of the scores."""
    bits = scores.to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _reached(
    start, inverse, high, vocab_size, first, second, third, BLOCK: tl.constexpr,
    MASS: tl.constexpr,
):  # fmt: skip
    """How much lies at or above each of three keys: tokens, or exp(score - high)."""
    a = tl.zeros([BLOCK], dtype=tl.float32)
    b = tl.zeros([BLOCK], dtype=tl.float32)
    c = tl.zeros([BLOCK], dtype=tl.float32)
    for offset in range(0, vocab_size, BLOCK):
        ids = offset + tl.arange(0, BLOCK)
        score = tl.load(start + ids, mask=ids < vocab_size, other=float("-inf")) * inverse
        key = tl.where(ids < vocab_size, _ordered(score), 0)
        weight = tl.exp(score - high) if MASS else tl.full([BLOCK], 1.0, dtype=tl.float32)
        a += tl.where(key >= first, weight, 0.0)
        b += tl.where(key >= second, weight, 0.0)
        c += tl.where(key >= third, weight, 0.0)
    return tl.sum(a, axis=0), tl.sum(b, axis=0), tl.sum(c, axis=0)


@triton.jit
def _search(
    start, inverse, high, vocab_size, goal, BLOCK: tl.constexpr, MASS: tl.constexpr
):  # fmt: skip
    """The largest key at or above which at least `goal` lies; 0 if there is none."""
    found = tl.full([], 0, dtype=tl.uint32)
    for step in range(16):
        unit = tl.full([], 0x40000000, dtype=tl.uint32) >> (2 * step)
        first = found + unit
        second = first + unit
        third = second + unit
        a, b, c = _reached(start, inverse, high, vocab_size, first, second, third, BLOCK, MASS)
        found = tl.where(a >= goal, first, found)
        found = tl.where(b >= goal, second, found)
        found = tl.where(c >= goal, third, found)
    return found


@triton.jit
def _score_of(key):
    """The score of a key; 0 stands for no limit."""
    bits = tl.where(key >> 31 == 1, key & 0x7FFFFFFF, key ^ 0xFFFFFFFF)
    return tl.where(key == 0, float("-inf"), bits.to(tl.float32, bitcast=True))


@triton.jit
def _candidate_range(
    start, inverse, high, vocab_size, BLOCK: tl.constexpr, CAPACITY: tl.constexpr
):  # fmt: skip
    """(the widest range below `high` with at most CAPACITY tokens, exp(score - high) of the row)."""
    mass = tl.zeros([BLOCK], dtype=tl.float32)
    a = tl.zeros([BLOCK], dtype=tl.int32)
    b = tl.zeros([BLOCK], dtype=tl.int32)
    c = tl.zeros([BLOCK], dtype=tl.int32)
    d = tl.zeros([BLOCK], dtype=tl.int32)
    for offset in range(0, vocab_size, BLOCK):
        ids = offset + tl.arange(0, BLOCK)
        score = tl.load(start + ids, mask=ids < vocab_size, other=float("-inf")) * inverse
        below = high - score
        mass += tl.exp(-below)
        a += (below <= 4.0).to(tl.int32)
        b += (below <= 10.0).to(tl.int32)
        c += (below <= 18.0).to(tl.int32)
        d += (below <= 28.0).to(tl.int32)
    wide = tl.where(tl.sum(a, axis=0) <= CAPACITY, 4.0, -1.0)
    wide = tl.where(tl.sum(b, axis=0) <= CAPACITY, 10.0, wide)
    wide = tl.where(tl.sum(c, axis=0) <= CAPACITY, 18.0, wide)
    wide = tl.where(tl.sum(d, axis=0) <= CAPACITY, 28.0, wide)
    return wide, tl.sum(mass, axis=0)


@triton.jit
def _gather_candidates(
    start, candidates, inverse, high, wide, vocab_size, BLOCK: tl.constexpr
):  # fmt: skip
    """Keep the scores at most `wide` below `high`; how many there are."""
    count = tl.full([], 0, dtype=tl.int32)
    for offset in range(0, vocab_size, BLOCK):
        ids = offset + tl.arange(0, BLOCK)
        score = tl.load(start + ids, mask=ids < vocab_size, other=float("-inf")) * inverse
        is_candidate = (high - score <= wide).to(tl.int32)
        more = tl.sum(is_candidate, axis=0)
        if more > 0:
            at = count + tl.cumsum(is_candidate, axis=0) - 1
            tl.store(candidates + at, score, mask=is_candidate > 0)
        count += more
    tl.debug_barrier()
    return count


@triton.jit
def _limit_of_row(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, limit_ptr, candidate_ptr,
    vocab_size, BLOCK: tl.constexpr, CAPACITY: tl.constexpr, SMALL_BLOCK: tl.constexpr,
):  # fmt: skip
    """The least score that a row's filters leave in."""
    row = tl.program_id(0).to(tl.int64)
    start = logits_ptr + row * vocab_size
    candidates = candidate_ptr + row * CAPACITY
    temperature = tl.load(temperature_ptr + row)
    limit = tl.full([], float("-inf"), dtype=tl.float32)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    has_top_k = (top_k > 0) & (top_k < vocab_size)
    if (temperature > 0.0) & (has_top_k | (top_p < 1.0) | (min_p > 0.0)):
        highs = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
        for offset in range(0, vocab_size, BLOCK):
            ids = offset + tl.arange(0, BLOCK)
            highs = tl.maximum(
                highs, tl.load(start + ids, mask=ids < vocab_size, other=float("-inf"))
            )
        inverse = 1.0 / temperature
        high = tl.max(highs, axis=0) * inverse
        count = tl.full([], 0, dtype=tl.int32)
        mass = tl.full([], 0.0, dtype=tl.float32)
        if has_top_k | (top_p < 1.0):
            wide, mass = _candidate_range(start, inverse, high, vocab_size, BLOCK, CAPACITY)
            if wide > 0.0:
                count = _gather_candidates(
                    start, candidates, inverse, high, wide, vocab_size, BLOCK
                )
        has_all = count > 0
        if has_top_k:
            if has_all & (count >= top_k):
                key = _search(
                    candidates, 1.0, high, count, top_k.to(tl.float32), SMALL_BLOCK, False
                )
            else:
                key = _search(start, inverse, high, vocab_size, top_k.to(tl.float32), BLOCK, False)
            limit = _score_of(key)
        if top_p < 1.0:
            floor = _ordered(limit)
            near = tl.full([], 0.0, dtype=tl.float32)
            if has_all:
                near, _, _ = _reached(
                    candidates, 1.0, high, count, floor, floor, floor, SMALL_BLOCK, True
                )
            kept = mass
            if has_top_k:
                kept = near
                if (has_all == 0) | (count < top_k):
                    kept, _, _ = _reached(
                        start, inverse, high, vocab_size, floor, floor, floor, BLOCK, True
                    )
            if has_all & (near >= top_p * kept):
                key = _search(candidates, 1.0, high, count, top_p * kept, SMALL_BLOCK, True)
            else:
                key = _search(start, inverse, high, vocab_size, top_p * kept, BLOCK, True)
            limit = tl.maximum(limit, _score_of(key))
        if min_p > 0.0:
            limit = tl.maximum(limit, high + tl.log(min_p))
    tl.store(limit_ptr + row, limit)


def filter_limits(logits: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """[R] float32: the least logit / temperature that each row's filters leave in."""
    num_rows, vocab_size = logits.shape
    limits = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    candidates = torch.empty((num_rows, _MAX_CANDIDATES), dtype=torch.float32, device=logits.device)
    _limit_of_row[(num_rows,)](
        logits, params.temperature, params.top_k, params.top_p, params.min_p, limits, candidates,
        vocab_size, BLOCK=min(_SEARCH_BLOCK, triton.next_power_of_2(vocab_size)),
        CAPACITY=_MAX_CANDIDATES, SMALL_BLOCK=_CANDIDATE_BLOCK, num_warps=16,
    )  # fmt: skip
    return limits


def sample_tokens(logits: torch.Tensor, params: SamplingTensors) -> SampledTokens:
    """See the package's docstring. logits: [R, V], contiguous, any float type, not changed."""
    num_rows, vocab_size = logits.shape
    device = logits.device
    adjusted = adjust(logits, replace(params, bitmask=None))
    if params.bitmask is not None:
        adjusted = token_bitmask(adjusted, params.bitmask)
    num_stretches = triton.cdiv(vocab_size, _STRETCH)
    values = torch.empty((num_rows, num_stretches), dtype=torch.float32, device=device)
    ids = torch.empty((num_rows, num_stretches), dtype=torch.int32, device=device)
    chosen = torch.empty(num_rows, dtype=torch.int32, device=device)
    finite = torch.empty(num_rows, dtype=torch.bool, device=device)
    filtered = params.has_filters and not params.is_all_greedy
    limits = filter_limits(adjusted, params) if filtered and num_rows else params.temperature
    if num_rows:
        pdl = has_dependent_launch(device)
        extra = {"launch_pdl": True} if pdl else {}
        _best_of_stretch[(num_stretches, num_rows)](
            adjusted, params.temperature, limits, params.seed, params.position, values, ids,
            vocab_size, num_stretches, GREEDY=params.is_all_greedy, FILTERED=filtered,
            BLOCK=_STRETCH, PDL=pdl, num_warps=8, **extra,
        )  # fmt: skip
        _best_of_row[(num_rows,)](
            values, ids, chosen, finite.view(torch.int8), num_stretches,
            BLOCK=triton.next_power_of_2(num_stretches), PDL=pdl, num_warps=1, **extra,
        )  # fmt: skip
    found = SampledTokens(token_ids=chosen, is_finite=finite)
    if params.num_logprobs is None:
        return found
    return _with_logprobs(found, logits.float(), params.num_logprobs)


def _with_logprobs(found: SampledTokens, logits: torch.Tensor, num_top: int) -> SampledTokens:
    """The logprobs of the raw distribution, all rows at once."""
    totals = torch.logsumexp(logits, dim=1)
    own = logits.gather(1, found.token_ids.long()[:, None])[:, 0] - totals
    best = torch.topk(logits, num_top, dim=1)
    return SampledTokens(
        token_ids=found.token_ids,
        is_finite=found.is_finite,
        logprobs=own,
        top_ids=best.indices.int(),
        top_logprobs=best.values - totals[:, None],
    )
