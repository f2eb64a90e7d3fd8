"""The requests that a decode instance holds, their tokens, and which attempts are void.

Plain bookkeeping on the event loop: no engine, no bus, no clock of its own.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from finback.shared.wire.messages.generate import (
    EndInfo,
    GenerationSpec,
    TokenLogprob,
    TokenRow,
)

Key = tuple[str, int]

_MAX_FENCES: Final = 8192
_TOKEN_BYTES: Final = 4


class ChoiceState(StrEnum):
    """`waiting`: its prompt is still being handed over or queued; `ended` is kept for resume."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(slots=True, kw_only=True)
class Choice:
    """One completion: what there is of it so far (int32 LE) and how it ended.

    The first `num_known` tokens came with the request, from an instance that could not go on.
    `logprobs` are of the tokens behind them. `num_cached`: prompt tokens that needed no computing,
    once that is known.
    """

    request_id: str
    index: int
    attempt: int
    state: ChoiceState = ChoiceState.WAITING
    is_in_engine: bool = False
    tokens: bytearray = field(default_factory=bytearray)
    num_known: int = 0
    num_cached: int | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    end: EndInfo | None = None
    ended_s: float = 0.0
    is_acknowledged: bool = False

    @property
    def key(self) -> Key:
        """How the engine knows it."""
        return (self.request_id, self.index)

    @property
    def num_tokens(self) -> int:
        """Completion tokens so far."""
        return len(self.tokens) // _TOKEN_BYTES

    def append(self, offset: int, token_ids: bytes, logprobs: tuple[TokenLogprob, ...]) -> None:
        """Take new tokens; `offset` must continue what is there."""
        if offset != self.num_tokens:
            raise ValueError(f"tokens at {offset} do not continue {self.num_tokens}")
        self.tokens += token_ids
        self.logprobs.extend(logprobs)

    def row_from(self, offset: int) -> TokenRow:
        """Everything from `offset` on, as a gateway asks for it after a gap."""
        start = min(max(offset, self.num_known), self.num_tokens)
        return TokenRow(
            request_id=self.request_id,
            choice=self.index,
            attempt=self.attempt,
            offset=start,
            token_ids=bytes(self.tokens[start * _TOKEN_BYTES :]),
            logprobs=tuple(self.logprobs[start - self.num_known :]) if self.logprobs else None,
            end=self.end,
            num_cached_tokens=self.num_cached,
        )


@dataclass(slots=True, kw_only=True)
class Request:
    """One attempt at a generation: the spec, who sent it, and its choices.

    `prompt`: int32 LE (the spec's own ids may be a first piece only). `parent` is the trace context
    that came with it. `heard_s` (monotonic): when prefill was last heard of; `first_missing`: the
    first block whose KV did not arrive whole.
    """

    spec: GenerationSpec
    prompt: bytes
    parent: Any
    heard_s: float
    deadline_s: float
    prefill_instance: str = ""
    prefill_epoch: int = 0
    is_activated: bool = False
    first_missing: int | None = None
    choices: dict[int, Choice] = field(default_factory=dict)

    @property
    def request_id(self) -> str:
        """The id that every service knows it by."""
        return self.spec.request_id

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt length."""
        return len(self.prompt) // _TOKEN_BYTES

    @property
    def is_ended(self) -> bool:
        """True once every choice has ended."""
        return all(choice.state is ChoiceState.ENDED for choice in self.choices.values())


class RequestTable:
    """Requests by id. An attempt that was cancelled or superseded never comes back."""

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}
        self._fences: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._requests.values()))

    def add(self, request: Request) -> None:
        """Take a new request; its choices are made from the spec."""
        spec = request.spec
        for choice in spec.choices:
            request.choices[choice.index] = Choice(
                request_id=spec.request_id,
                index=choice.index,
                attempt=spec.attempt,
                tokens=bytearray(choice.token_ids),
                num_known=len(choice.token_ids) // _TOKEN_BYTES,
            )
        self._requests[spec.request_id] = request

    def get(self, request_id: str, attempt: int | None = None) -> Request | None:
        """The request, if it is here (and is that attempt)."""
        request = self._requests.get(request_id)
        if request is None or attempt not in (None, request.spec.attempt):
            return None
        return request

    def choice(self, key: Key, attempt: int | None = None) -> Choice | None:
        """One choice, if it is here (and of that attempt)."""
        request = self.get(key[0], attempt)
        return None if request is None else request.choices.get(key[1])

    def remove(self, request_id: str) -> None:
        """Forget a request."""
        self._requests.pop(request_id, None)

    def fence(self, request_id: str, attempt: int) -> None:
        """From now on attempts up to this one are void."""
        self._fences[request_id] = max(attempt, self._fences.get(request_id, 0))
        self._fences.move_to_end(request_id)
        while len(self._fences) > _MAX_FENCES:
            self._fences.popitem(last=False)

    def is_fenced(self, request_id: str, attempt: int) -> bool:
        """True if the attempt was cancelled or superseded."""
        return attempt <= self._fences.get(request_id, 0)

    def open_choices(self) -> list[Choice]:
        """Every choice that has not ended."""
        return [
            choice
            for request in self._requests.values()
            for choice in request.choices.values()
            if choice.state is not ChoiceState.ENDED
        ]

    def live_gateways(self) -> set[str]:
        """The gateways that wait for tokens."""
        return {request.spec.gateway for request in self._requests.values() if not request.is_ended}

    def by_gateway(self, gateway: str) -> list[Request]:
        """What one gateway has here."""
        return [r for r in self._requests.values() if r.spec.gateway == gateway]

    def awaiting(self, prefill_instance: str) -> list[Request]:
        """Requests that still wait for blocks of this prefill instance."""
        return [
            r
            for r in self._requests.values()
            if r.prefill_instance == prefill_instance and not r.is_activated
        ]
