"""An answer as it comes: the rows of its generations turned into text, choice by choice.

Protocol-neutral: a protocol turns `ChoiceEvent`s into its own documents.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from finback.services.gateway.desk import Desk
from finback.services.gateway.generation import Choice, Generation, Piece
from finback.shared.codec.answer_text import AnswerText, TextDelta
from finback.shared.codec.tokenizer import Tokenizer
from finback.shared.wire.messages.decode import FinishReply
from finback.shared.wire.messages.generate import EndInfo, TokenLogprob

# The counts of a choice that a stop string ended are asked for; they are not worth a longer wait.
_COUNTS_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class ChoiceEvent:
    """What is new in one choice. `finish_reason` set: it is its last event.

    `stop_reason`: the stop string or the caller's own stop token that ended it.
    """

    index: int
    text: str
    logprobs: tuple[tuple[int, TokenLogprob], ...] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of a whole answer; the prompt counts once for all its choices."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_completion_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


class Answer:
    """Consumes one or several generations (one a prompt) with n choices each."""

    def __init__(
        self,
        generations: Sequence[Generation],
        desk: Desk,
        tokenizer: Tokenizer,
        *,
        stops: Sequence[str],
        notify: asyncio.Event,
        on_restart: Callable[[int], None],
    ) -> None:
        self.generations = generations
        self._desk = desk
        self._tokenizer = tokenizer
        self._stops = stops
        self._notify = notify
        self._on_restart = on_restart
        self._attempts = [0] * len(generations)
        self._texts: list[list[_ChoiceText]] = [[] for _ in generations]

    def commit(self) -> None:
        """Something is about to reach the client: no generation may start over from here on."""
        for generation in self.generations:
            generation.is_committed = True

    async def events(self, tick_s: float) -> AsyncIterator[list[ChoiceEvent]]:
        """New events as they come; an empty list after `tick_s` without any.

        Raises the `ServingError` of the first generation that failed.
        """
        while True:
            self._notify.clear()
            events = [event for at in range(len(self.generations)) for event in self._collect(at)]
            if events:
                yield events
                await self._grant()
            for generation in self.generations:
                if generation.error is not None:
                    raise generation.error
            if self._is_told():
                return
            if not self._notify.is_set():
                try:
                    async with asyncio.timeout(tick_s):
                        await self._notify.wait()
                except TimeoutError:
                    yield []

    async def usage(self) -> Usage:
        """The counts, once all choices have ended."""
        texts = [text for texts in self._texts for text in texts]
        finishing = [text.finishing for text in texts if text.finishing is not None]
        if finishing:
            await asyncio.wait(finishing, timeout=_COUNTS_TIMEOUT_S)
        ends = [text.counts() for text in texts]
        return Usage(
            num_prompt_tokens=sum(len(g.spec.token_ids) // 4 for g in self.generations),
            num_cached_tokens=sum(texts[0].counts().num_cached_tokens for texts in self._texts),
            num_completion_tokens=sum(end.num_completion_tokens for end in ends),
            num_draft_tokens=sum(end.num_draft_tokens for end in ends),
            num_accepted_tokens=sum(end.num_accepted_tokens for end in ends),
        )

    def _collect(self, at: int) -> list[ChoiceEvent]:
        generation = self.generations[at]
        if generation.attempt != self._attempts[at]:
            self._restart(at, generation)
        events = []
        for text in self._texts[at]:
            piece = generation.take(text.choice)
            if piece is not None and not text.is_told:
                event = text.push(piece)
                if event is not None:
                    events.append(event)
        return events

    def _restart(self, at: int, generation: Generation) -> None:
        self._attempts[at] = generation.attempt
        first = at * len(generation.spec.choices)
        for index in range(first, first + len(generation.choices)):
            self._on_restart(index)
        self._texts[at] = [
            _ChoiceText(self, generation, choice, first + choice.index)
            for choice in generation.choices
        ]

    def _is_told(self) -> bool:
        return all(texts and all(text.is_told for text in texts) for texts in self._texts)

    async def _grant(self) -> None:
        for texts, generation in zip(self._texts, self.generations, strict=True):
            for text in texts:
                await self._desk.grant(generation, text.choice)

    def make_text(self, generation: Generation) -> AnswerText[TokenLogprob]:
        """A fresh text for one choice."""
        min_tokens = generation.spec.sampling.min_tokens
        return AnswerText(self._tokenizer, self._stops, min_tokens=min_tokens)

    def finish(
        self, generation: Generation, choice: Choice, num_tokens: int
    ) -> asyncio.Task[FinishReply | None]:
        """Tell decode that a stop string ended a choice, without waiting for its answer."""
        return asyncio.create_task(self._desk.finish(generation, choice, num_tokens))


class _ChoiceText:
    """One choice's text, and what ended it."""

    def __init__(
        self, answer: Answer, generation: Generation, choice: Choice, index: int
    ) -> None:
        self.choice = choice
        self.is_told = False
        self.finishing: asyncio.Task[FinishReply | None] | None = None
        self._answer = answer
        self._generation = generation
        self._index = index
        self._text = answer.make_text(generation)
        self._end: EndInfo | None = None

    def push(self, piece: Piece) -> ChoiceEvent | None:
        """The event that a piece makes, if it makes any."""
        token_ids: list[int] = memoryview(piece.token_ids).cast("i").tolist()
        logprobs, end = piece.logprobs, piece.end
        if end is not None and token_ids and token_ids[-1] == end.stop_token_id:
            token_ids.pop()  # the token that ended the answer is no part of its text
            logprobs = logprobs[:-1] if logprobs is not None else None
        delta = self._text.push(token_ids, logprobs)
        if delta.stop is None and end is not None:
            delta = _both(delta, self._text.finish())
        if delta.stop is not None:
            return self._stopped(delta, end)
        if end is not None:
            return self._ended(delta, end)
        if not delta.text and not delta.logprobs:
            return None
        return ChoiceEvent(self._index, delta.text, delta.logprobs)

    def _stopped(self, delta: TextDelta[TokenLogprob], end: EndInfo | None) -> ChoiceEvent | None:
        stop = delta.stop
        if stop is None:
            return None
        known = end or EndInfo(finish_reason="stop")
        self._end = EndInfo(
            finish_reason="stop",
            num_cached_tokens=known.num_cached_tokens,
            num_completion_tokens=stop.num_tokens,
            num_draft_tokens=known.num_draft_tokens,
            num_accepted_tokens=known.num_accepted_tokens,
        )
        if self._generation.finish(self.choice, self._end):
            self.finishing = self._answer.finish(self._generation, self.choice, stop.num_tokens)
        self.is_told = True
        return ChoiceEvent(self._index, delta.text, delta.logprobs, "stop", stop.matched)

    def _ended(self, delta: TextDelta[TokenLogprob], end: EndInfo) -> ChoiceEvent:
        self._end = end
        self.is_told = True
        own = self._generation.spec.sampling.stop_token_ids
        reason = end.stop_token_id if end.stop_token_id in own else None
        return ChoiceEvent(self._index, delta.text, delta.logprobs, end.finish_reason, reason)

    def counts(self) -> EndInfo:
        """The choice's counts; those that only decode knows may be missing."""
        end = self._end or EndInfo(finish_reason="error")
        reply = None
        if self.finishing is not None and self.finishing.done():
            reply = self.finishing.result()
        if reply is None:
            return end
        return EndInfo(
            finish_reason="stop",
            num_cached_tokens=reply.num_cached_tokens,
            num_completion_tokens=end.num_completion_tokens,
            num_draft_tokens=reply.num_draft_tokens,
            num_accepted_tokens=reply.num_accepted_tokens,
        )


def _both(
    first: TextDelta[TokenLogprob], second: TextDelta[TokenLogprob]
) -> TextDelta[TokenLogprob]:
    return TextDelta(first.text + second.text, first.logprobs + second.logprobs, second.stop)
