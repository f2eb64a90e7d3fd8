"""Sampling on the CPU: one compiled call for all rows; no sort and no noise that is not needed."""

import numpy as np
import torch

from finback.kernels.compiled import compiled, device_function, inlined
from finback.kernels.native import peek_f32, peek_i32, poke_f32
from finback.kernels.sample_tokens import SampledTokens, SamplingTensors
from finback.kernels.sample_tokens.adjust import adjust
from finback.kernels.sample_tokens.cpu_rows import (
    STATE_BYTES,
    exponential_mass,
    search_greedy,
    search_noisy,
    start_search,
)
from finback.kernels.sample_tokens.noise import row_keys
from finback.kernels.sample_tokens.reference import with_logprobs
from finback.kernels.simd import LANES

_BLOCK_VECTORS = 64
"""Vectors whose mass is summed in float32 before it joins a float64."""


def sample_tokens(logits: torch.Tensor, params: SamplingTensors) -> SampledTokens:
    """logits: float32 [R, V] with contiguous rows, not changed. See the package's docstring."""
    num_rows, vocab_size = logits.shape
    adjusted = adjust(logits, params)
    if adjusted.stride(1) != 1:
        adjusted = adjusted.contiguous()
    chosen = torch.empty(num_rows, dtype=torch.int32)
    finite = torch.empty(num_rows, dtype=torch.bool)
    temperature = params.temperature.numpy()
    # Room for a search's state, the row's last incomplete vector, and the best scores of a row.
    scratch = np.empty(STATE_BYTES // 4 + LANES + 1, np.float32)
    _sample_rows(
        adjusted.data_ptr(),
        adjusted.stride(0) * 4,
        vocab_size,
        temperature,
        params.top_k.numpy(),
        params.top_p.numpy(),
        params.min_p.numpy(),
        _keys(params, temperature),
        params.has_filters,
        scratch,
        np.empty(vocab_size if params.has_filters else 0, np.float32),
        chosen.numpy(),
        finite.numpy(),
    )
    found = SampledTokens(token_ids=chosen, is_finite=finite)
    if params.num_logprobs is None:
        return found
    return with_logprobs(found, logits, params.num_logprobs, _log_mass)


def _log_mass(scores: torch.Tensor) -> float:
    """log(sum(exp(scores))), the same for any number of threads. scores: float32 [V].

    Torch cuts a long sum into one part a thread, so that its last bit depends on how many there are.
    """
    row = scores.numpy()
    top = row.max()
    with np.errstate(invalid="ignore"):  # a row that is not finite is reported as such
        return float(top + np.log(np.exp(row - top).sum(dtype=np.float64)))


def _keys(params: SamplingTensors, temperature: np.ndarray) -> np.ndarray:
    """[R] int64, both keys of a row; greedy rows draw nothing."""
    keys = np.zeros(len(temperature), np.int64)
    if params.is_all_greedy:
        return keys
    for row, (seed, position) in enumerate(
        zip(params.seed.tolist(), params.position.tolist(), strict=True)
    ):
        first, second = row_keys(seed, position)
        keys[row] = np.int64(np.uint64(first | second << 32))
    return keys


# mypy: disable-error-code="no-untyped-def"


@compiled(
    "void(int64, int64, int64, float32[::1], int32[::1], float32[::1], float32[::1], int64[::1],"
    " boolean, float32[::1], float32[::1], int32[::1], boolean[::1])"
)
def _sample_rows(logits, row_step, vocab_size, temperature, top_k, top_p, min_p, keys, has_filters,
                 scratch, best, chosen, finite):  # fmt: skip
    vectors = vocab_size // LANES
    num_left = vocab_size - vectors * LANES
    state = scratch.ctypes.data
    tail = state + STATE_BYTES
    for row in range(len(chosen)):
        scores = logits + row * row_step
        for lane in range(LANES):
            last = (vectors * LANES + lane) * 4
            poke_f32(tail + lane * 4, peek_f32(scores + last) if lane < num_left else -np.inf)
        start_search((state,))
        search_greedy((scores, vectors, 0, state))
        search_greedy((tail, 1, vectors * LANES, state))
        value, token_id, is_clean = _winner(state)
        if temperature[row] > 0.0 and is_clean and np.isfinite(value):
            top = np.float32(np.float32(value) / temperature[row])
            # Noise lies within (-3.2, 22.2): what is further below the highest can never win.
            limit = np.float32(top - np.float32(26.0))
            if has_filters:
                found = _limit(scores, vectors, tail, vocab_size, temperature[row], top_k[row],
                               top_p[row], min_p[row], top, best)  # fmt: skip
                limit = max(limit, found)
            bits = (_bits(temperature[row]), _bits(limit), keys[row])
            start_search((state,))
            search_noisy((scores, vectors, 0, state, bits[0], bits[1], bits[2]))
            search_noisy((tail, 1, vectors * LANES, state, bits[0], bits[1], bits[2]))
            value, token_id, is_clean = _winner(state)
        chosen[row] = min(token_id, vocab_size - 1)
        finite[row] = is_clean and value > -np.inf and value < np.inf


@inlined
def _bits(value):
    return np.int64(np.float32(value).view(np.uint32))


@inlined
def _winner(state):
    """Best value, its lowest id, and whether no lane saw a NaN."""
    value, token_id, spoiled = -np.inf, 0, 0
    for lane in range(LANES):
        at = state + lane * 4
        other, other_id = peek_f32(at), peek_i32(at + LANES * 4)
        if other > value or (other == value and other_id < token_id):
            value, token_id = other, other_id
        spoiled |= peek_i32(at + 2 * LANES * 4)
    return value, token_id, spoiled == 0


@inlined
def _limit(scores, vectors, tail, vocab_size, temperature, top_k, top_p, min_p, top, best):
    """The least score / temperature that top-k, top-p and min-p leave in; `top` is the highest."""
    limit = np.float32(-np.inf)
    temperature = np.float32(temperature)
    if min_p > 0.0:
        limit = np.float32(top + np.float32(np.log(np.float64(min_p))))
    if 0 < top_k < vocab_size:
        return max(limit, _limit_of_k(scores, vocab_size, temperature, top_k, top_p, top, best))
    if top_p < 1.0:
        return max(
            limit, _limit_of_p(scores, vectors, tail, vocab_size, temperature, top_p, top, best)
        )
    return limit


@inlined
def _limit_of_k(scores, vocab_size, temperature, top_k, top_p, top, best):
    """The k-th score, or the later of those that hold `top_p` of the k best's mass."""
    window, count = np.float32(6.0), 0
    while count < top_k and window < 1e30:
        count = _gather(scores, vocab_size, temperature, np.float32(top - window), best)
        window = np.float32(window * 2.5) if window < 90.0 else np.float32(np.inf)
    if count < top_k:
        count = _gather(scores, vocab_size, temperature, np.float32(-np.inf), best)
    ordered = np.sort(best[:count])[::-1]
    kth = ordered[min(top_k, count) - 1]
    if top_p >= 1.0:
        return kth
    total = 0.0
    for i in range(count):
        if ordered[i] >= kth:
            total += np.exp(np.float64(ordered[i]) - top)
    return _last_of_mass(ordered, count, top, np.float64(top_p) * total)


@inlined
def _limit_of_p(scores, vectors, tail, vocab_size, temperature, top_p, top, best):
    """The last score of the smallest set that holds `top_p` of the mass."""
    lowest = np.float32(-np.inf)
    wanted = np.float64(top_p) * _mass(scores, vectors, tail, top, temperature, lowest)
    # Narrow [low, high) down, by the mass at or above its middle, until few scores are left in it.
    low, high = np.float32(top - np.float32(64.0)), np.float32(top)
    if _mass(scores, vectors, tail, top, temperature, low) < wanted:
        return lowest
    for _ in range(10):
        middle = np.float32((low + high) / 2)
        if _mass(scores, vectors, tail, top, temperature, middle) >= wanted:
            low = middle
        else:
            high = middle
    count = _gather(scores, vocab_size, temperature, low, best)
    ordered = np.sort(best[:count])[::-1]
    return _last_of_mass(ordered, count, top, wanted)


@inlined
def _last_of_mass(ordered, count, top, wanted):
    mass = 0.0
    for i in range(count):
        mass += np.exp(np.float64(ordered[i]) - top)
        if mass >= wanted:
            return ordered[i]
    return ordered[count - 1]


@device_function
def _gather(scores, vocab_size, temperature, least, best):
    """All scores / temperature of at least `least`, in order of their ids; returns how many."""
    count = 0
    for token_id in range(vocab_size):
        value = np.float32(np.float32(peek_f32(scores + token_id * 4)) / temperature)
        if value >= least:
            best[count] = value
            count += 1
    return count


@device_function
def _mass(scores, vectors, tail, top, temperature, least):
    """Sum of exp(score / temperature - top) over those at or above `least`."""
    sum_at = tail + LANES * 4
    total, done = 0.0, 0
    bits = (_bits(top), _bits(temperature), _bits(least))
    while done < vectors:
        count = min(_BLOCK_VECTORS, vectors - done)
        exponential_mass((scores + done * LANES * 4, count, bits[0], bits[1], bits[2], sum_at))
        total += peek_f32(sum_at)
        done += count
    exponential_mass((tail, 1, bits[0], bits[1], bits[2], sum_at))
    return total + peek_f32(sum_at)
