"""How the tokens of an answer are chosen: the fields that several APIs have, checked and in one form."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from finback.services.gateway.schema import GenerationRequest
from finback.services.gateway.served_model import ServedModel
from finback.shared.errors import InvalidRequest
from finback.shared.wire.messages.generate import ChoiceSpec, SamplingSpec

_SEED_BITS: Final = 63
# The likeliest token alone is always within it; 0 itself would leave none.
_LEAST_TOP_P: Final = 1e-6
# Longer ones are no token ids, and from some length on not even converted.
MAX_ID_DIGITS: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerLimits:
    """`max_tokens`: of the answer. `num_logprobs`: alternatives a token; None: no logprobs."""

    max_tokens: int
    num_logprobs: int | None
    seed: int


def sampling_of(
    request: GenerationRequest, model: ServedModel, limits: AnswerLimits
) -> SamplingSpec:
    """The sampling of one prompt."""

    def given(value: Any, default: Any) -> Any:
        return default if value is None else value

    max_tokens = limits.max_tokens
    ends = () if request.ignore_eos else model.tokenizer.eos_ids
    own = tuple(request.stop_token_ids or ())
    model.check_ids(own, "stop_token_ids")
    if (request.min_tokens or 0) > max_tokens:
        raise InvalidRequest(
            f"min_tokens is above the {max_tokens} tokens that the answer may have",
            param="min_tokens",
        )
    return SamplingSpec(
        temperature=given(request.temperature, 1.0),
        top_k=max(0, given(request.top_k, 0)),
        top_p=top_p_of(request.top_p),
        min_p=given(request.min_p, 0.0),
        repetition_penalty=given(request.repetition_penalty, 1.0),
        presence_penalty=given(request.presence_penalty, 0.0),
        frequency_penalty=given(request.frequency_penalty, 0.0),
        logit_bias=_logit_bias(request, model),
        seed=limits.seed,
        num_logprobs=limits.num_logprobs,
        stop_token_ids=tuple(dict.fromkeys([*own, *ends])),
        ignore_eos=bool(request.ignore_eos),
        min_tokens=request.min_tokens or 0,
        max_tokens=max_tokens,
    )


def _logit_bias(request: GenerationRequest, model: ServedModel) -> dict[int, float] | None:
    if not request.logit_bias:
        return None
    biases = {}
    for key, bias in request.logit_bias.items():
        param = f"logit_bias.{key[:40]}"
        is_number = key.isascii() and key.isdigit() and len(key) <= MAX_ID_DIGITS
        if not is_number or int(key) >= model.vocab_size:
            raise InvalidRequest(f"'{key[:40]}' is not a token id of this model", param=param)
        if not isinstance(bias, int | float) or isinstance(bias, bool) or not -100 <= bias <= 100:
            raise InvalidRequest("a bias must be a number from -100 to 100", param=param)
        biases[int(key)] = float(bias)
    return biases


def top_p_of(asked: float | None) -> float:
    """`top_p` for an engine: 0 means the likeliest token."""
    return 1.0 if asked is None else max(asked, _LEAST_TOP_P)


def new_seed() -> int:
    """A seed for a request that names none."""
    return secrets.randbits(_SEED_BITS)


def choices_of(request: GenerationRequest) -> tuple[ChoiceSpec, ...]:
    """The choices of each prompt, each with a seed of its own."""
    # Any 64 bits are a seed; the engines want it without a sign.
    seed = new_seed() if request.seed is None else request.seed % 2**_SEED_BITS
    count = request.n or 1
    return tuple(ChoiceSpec(index=index, seed=choice_seed(seed, index)) for index in range(count))


def choice_seed(seed: int, index: int) -> int:
    """The seed of choice `index`: the request's own for the first, then a mix (splitmix64)."""
    if index == 0:
        return seed
    mixed = (seed + index * 0x9E3779B97F4A7C15) % 2**64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) % 2**64
    return (mixed ^ (mixed >> 31)) >> (64 - _SEED_BITS)


def stops_of(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Stop strings, given as one or as several."""
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def check_stream_options(request: GenerationRequest) -> None:
    """They belong to a stream."""
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest(
            "stream_options is only allowed when stream is true", param="stream_options"
        )
