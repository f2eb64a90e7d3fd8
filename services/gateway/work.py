"""What a checked request comes to: prompts, sampling, and how its answer is told."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from finback.services.gateway.answer_events import ChoiceEvent, Output, Usage
from finback.services.gateway.caching import NO_CACHING, Caching
from finback.services.gateway.served_model import Prompt
from finback.shared.errors import ServingError
from finback.shared.wire.messages.generate import ChoiceSpec, GrammarSpec, SamplingSpec


class AnswerProtocol(Protocol):
    """Turns events into documents of one API."""

    def opening(self) -> list[bytes]:
        """What a stream begins with, before any event; nothing of the answer is in it."""

    def chunks(self, events: Sequence[ChoiceEvent]) -> list[bytes]:
        """The documents of some events of a stream."""

    def last_chunks(self, usage: Usage) -> list[bytes]:
        """What follows the last event of a stream."""

    def failure(self, error: ServingError) -> list[bytes]:
        """How a stream that has begun says that it failed."""

    def ping(self) -> bytes | None:
        """A document that is a sign of life; None: the sink has a better one."""

    def add(self, events: Sequence[ChoiceEvent]) -> None:
        """Keep events for the body."""

    def body(self, usage: Usage) -> dict[str, Any]:
        """The whole answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a request comes to: `samplings[i]` and `choices` apply to `prompts[i]`.

    `grammar` is not compiled yet; `grammar_param` is the request field to blame for it. `output`:
    how the text of each choice is parsed, None: not at all. `is_open_ended`: nobody asked for a
    limit to the answer, so that it is as much as the model has room for. `has_token_ids`: the answer
    tells its ids. The prompts are hashed with the salt of `caching`.
    """

    is_stream: bool
    prompts: tuple[Prompt, ...]
    samplings: tuple[SamplingSpec, ...]
    choices: tuple[ChoiceSpec, ...]
    stops: tuple[str, ...]
    protocol: AnswerProtocol
    grammar: GrammarSpec | None = None
    grammar_param: str = ""
    is_open_ended: bool = False
    output: Output | None = None
    has_token_ids: bool = False
    caching: Caching = NO_CACHING
