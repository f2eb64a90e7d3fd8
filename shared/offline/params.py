"""How the caller of the offline API says how to sample. Torch-free."""

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from finback.shared.offline.errors import InvalidInput
from finback.shared.wire.messages.generate import SamplingSpec

_REALS: Final = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
_WHOLES: Final = ("top_k", "min_tokens")
_OPTIONAL_WHOLES: Final = ("max_tokens", "seed", "logprobs")
_MAX_TOKENS: Final = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of an answer are chosen, and where it ends.

    `temperature` 0 is greedy; `top_k` 0, `top_p` 1.0 and `min_p` 0.0 switch those filters off.
    `max_tokens` None: up to the context. `stop`: text that ends the answer and is not shown.
    `stop_token_ids` end it as the model's own end-of-text tokens do, which `ignore_eos` ignores;
    none of them is sampled before `min_tokens`. `seed` None: a new one for every prompt.
    `logprobs` None: none; 0: the chosen token's; n up to 20: the n likeliest as well.

    Raises `InvalidInput` (a `ValueError`) that names the field and its limit.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for name in _REALS:
            _check_real(name, getattr(self, name))
        for name in _WHOLES:
            _check_whole(name, getattr(self, name))
        for name in _OPTIONAL_WHOLES:
            if getattr(self, name) is not None:
                _check_whole(name, getattr(self, name))
        if not isinstance(self.ignore_eos, bool):
            _refuse("ignore_eos", f"must be True or False, not {self.ignore_eos!r}")
        self._check_stops()
        self._check_logit_bias()
        self._check_ranges()

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings, also where one was given as itself."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def spec(self, room_tokens: int) -> SamplingSpec:
        """For the engine. `room_tokens`: what the context leaves for the answer."""
        return SamplingSpec(
            temperature=float(self.temperature),
            top_k=int(self.top_k),
            top_p=float(self.top_p),
            min_p=float(self.min_p),
            repetition_penalty=float(self.repetition_penalty),
            presence_penalty=float(self.presence_penalty),
            frequency_penalty=float(self.frequency_penalty),
            logit_bias=_plain_bias(self.logit_bias),
            seed=int(self.seed or 0),
            num_logprobs=None if self.logprobs is None else int(self.logprobs),
            stop_token_ids=tuple(int(token_id) for token_id in self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            min_tokens=int(self.min_tokens),
            max_tokens=room_tokens if self.max_tokens is None else int(self.max_tokens),
        )

    def _check_stops(self) -> None:
        if not isinstance(self.stop, Sequence):
            _refuse("stop", f"must be a text or a list of texts, not {self.stop!r}")
        for text in self.stops:
            if not isinstance(text, str) or not text:
                _refuse("stop", f"must hold texts that are not empty, not {text!r}")
        if isinstance(self.stop_token_ids, str) or not isinstance(self.stop_token_ids, Sequence):
            _refuse("stop_token_ids", f"must be a list of token ids, not {self.stop_token_ids!r}")
        for token_id in self.stop_token_ids:
            _check_token_id("stop_token_ids", token_id)

    def _check_logit_bias(self) -> None:
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, Mapping):
            _refuse("logit_bias", f"must map token ids to numbers, not {self.logit_bias!r}")
        for token_id, bias in self.logit_bias.items():
            _check_token_id("logit_bias", token_id)
            _check_real("logit_bias", bias)

    def _check_ranges(self) -> None:
        """The limits are the engine's own, kept beside its message."""
        try:
            self.spec(_MAX_TOKENS)
        except ValueError as error:
            name, _, rest = str(error).partition(" ")
            _refuse("logprobs" if name == "num_logprobs" else name, rest)


def _plain_bias(bias: Mapping[int, float] | None) -> dict[int, float] | None:
    return {int(key): float(value) for key, value in bias.items()} if bias else None


def _check_real(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        _refuse(name, f"must be a number, not {value!r}")


def _check_whole(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        _refuse(name, f"must be a whole number, not {value!r}")


def _check_token_id(name: str, value: Any) -> None:
    _check_whole(name, value)
    if not 0 <= value < 2**31:
        _refuse(name, f"must hold token ids of at least 0, not {value}")


def _refuse(name: str, what: str) -> NoReturn:
    raise InvalidInput(f"{name} {what}", param=name)
