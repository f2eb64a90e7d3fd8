"""One choice of an answer: its pieces to events, and its counts."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

from finback.services.gateway.answer_events import ChoiceEvent
from finback.services.gateway.generation import Choice, Generation, Piece
from finback.services.gateway.parsed_text import ParsedDelta, ParsedText, RawText
from finback.shared.wire.messages.decode import FinishReply
from finback.shared.wire.messages.generate import EndInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How the tokens of all choices are read.

    `new_text`: a fresh text, given the tokens that come before stop strings count. `finish` tells
    decode, without waiting, that a stop string ended a choice after so many tokens.
    `has_token_ids`: events bring ids, those of tokens without text of their own too.
    """

    new_text: Callable[[int], ParsedText | RawText]
    finish: Callable[[Generation, Choice, int], asyncio.Task[FinishReply | None]]
    eos_ids: frozenset[int]
    has_token_ids: bool


class ChoiceText:
    """One choice's text, and what ended it."""

    def __init__(
        self, reading: Reading, generation: Generation, choice: Choice, index: int
    ) -> None:
        self.choice = choice
        self.is_told = False
        self.finishing: asyncio.Task[FinishReply | None] | None = None
        self._reading = reading
        self._generation = generation
        self._index = index
        self._text = reading.new_text(generation.spec.sampling.min_tokens)
        self._end: EndInfo | None = None
        # Tokens that made nothing to tell yet.
        self._num_silent = 0

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens so far that were reasoning."""
        return self._text.num_reasoning_tokens

    def push(self, piece: Piece) -> ChoiceEvent | None:
        """The event that a piece makes, if it makes any."""
        token_ids: list[int] = memoryview(piece.token_ids).cast("i").tolist()
        all_ids = tuple(token_ids) if self._reading.has_token_ids else ()
        logprobs, end = piece.logprobs, piece.end
        if end is not None and token_ids and token_ids[-1] == end.stop_token_id:
            token_ids.pop()  # the token that ended the answer is no part of its text
            logprobs = logprobs[:-1] if logprobs is not None else None
        delta = self._text.push(token_ids, logprobs)
        if delta.stop is None and end is not None:
            delta = _both(delta, self._text.finish())
        if delta.stop is not None:
            return self._stopped(delta, delta.stop.matched, delta.stop.num_tokens, end)
        if end is not None:
            num_tokens = self._num_silent + len(piece.token_ids) // 4
            return self._ended(delta, end, num_tokens, all_ids)
        return self._event(delta, len(piece.token_ids) // 4, all_ids)

    def _event(
        self, delta: ParsedDelta, num_new: int, all_ids: tuple[int, ...]
    ) -> ChoiceEvent | None:
        num_tokens = self._num_silent + num_new
        if not (delta.text or delta.logprobs or delta.parts or all_ids):
            self._num_silent = num_tokens
            return None
        self._num_silent = 0
        return ChoiceEvent(
            self._index,
            delta.text,
            delta.logprobs,
            parts=delta.parts,
            num_tokens=num_tokens,
            token_ids=all_ids,
        )

    def _stopped(
        self, delta: ParsedDelta, matched: str | int, num_tokens: int, end: EndInfo | None = None
    ) -> ChoiceEvent:
        """Something of the caller's ended the choice behind so many tokens."""
        known = end or EndInfo(finish_reason="stop")
        self._end = EndInfo(
            finish_reason="stop",
            num_cached_tokens=known.num_cached_tokens,
            num_completion_tokens=num_tokens,
            num_draft_tokens=known.num_draft_tokens,
            num_accepted_tokens=known.num_accepted_tokens,
        )
        if self._generation.finish(self.choice, self._end):
            self.finishing = self._reading.finish(self._generation, self.choice, num_tokens)
        self.is_told = True
        return ChoiceEvent(self._index, delta.text, delta.logprobs, "stop", matched, delta.parts)

    def _ended(
        self, delta: ParsedDelta, end: EndInfo, num_tokens: int, token_ids: tuple[int, ...]
    ) -> ChoiceEvent:
        self._end = end
        self.is_told = True
        # The caller's own stop tokens are named; that the model's end token came is no news.
        own = set(self._generation.spec.sampling.stop_token_ids) - self._reading.eos_ids
        reason = end.stop_token_id if end.stop_token_id in own else None
        return ChoiceEvent(
            self._index,
            delta.text,
            delta.logprobs,
            end.finish_reason,
            reason,
            delta.parts,
            num_tokens,
            token_ids,
        )

    def counts(self) -> EndInfo:
        """The choice's counts; those that only decode knows may be missing."""
        end = self._end or EndInfo(finish_reason="error")
        # What a later attempt found cached is the answer's own beginning, too.
        num_cached, reply = self.choice.num_cached, None
        if self.finishing is not None and self.finishing.done():
            reply = self.finishing.result()
        if reply is None:
            return end if num_cached is None else replace(end, num_cached_tokens=num_cached)
        return EndInfo(
            finish_reason="stop",
            num_cached_tokens=reply.num_cached_tokens if num_cached is None else num_cached,
            num_completion_tokens=end.num_completion_tokens,
            num_draft_tokens=reply.num_draft_tokens,
            num_accepted_tokens=reply.num_accepted_tokens,
        )


def _both(first: ParsedDelta, second: ParsedDelta) -> ParsedDelta:
    return ParsedDelta(
        first.parts + second.parts,
        first.text + second.text,
        first.logprobs + second.logprobs,
        second.stop,
    )
