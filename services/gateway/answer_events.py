"""What is told of an answer as it comes, whatever API it was asked through."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from finback.shared.codec.output import OutputEvent, OutputParser
from finback.shared.wire.messages.generate import TokenLogprob


@dataclass(frozen=True, slots=True)
class ChoiceEvent:
    """What is new in one choice. `finish_reason` set: it is its last event.

    `stop_reason`: the stop string or the caller's own stop token that ended it. `parts`: what a
    parser found, if the answer has one; `text` and `logprobs` are then those of the content among
    it. `num_tokens`: how many tokens the event stands for; `token_ids`: which, if they are wanted.
    """

    index: int
    text: str
    logprobs: tuple[tuple[int, TokenLogprob], ...] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    parts: Sequence[OutputEvent] = ()
    num_tokens: int = 0
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of a whole answer; the prompt counts once for all its choices."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_completion_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """How an answer is parsed. `shown`: control tokens (id to spelling) that the parser must see."""

    new_parser: Callable[[], OutputParser]
    shown: Mapping[int, bytes]
