"""An answer as it comes: the rows of its generations turned into text, choice by choice.

Protocol-neutral: a protocol turns `ChoiceEvent`s into its own documents.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass

from finback.services.gateway.desk import Desk
from finback.services.gateway.generation import Choice, Generation, Piece
from finback.services.gateway.parsed_text import ParsedDelta, ParsedText, RawText
from finback.shared.codec.answer_text import AnswerText
from finback.shared.codec.output import OutputEvent, OutputParser
from finback.shared.codec.tokenizer import Tokenizer
from finback.shared.wire.messages.decode import FinishReply
from finback.shared.wire.messages.generate import EndInfo, TokenLogprob

# The counts of a choice that a stop string ended are asked for; they are not worth a longer wait.
_COUNTS_TIMEOUT_S = 2.0


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
        output: Output | None = None,
        has_token_ids: bool = False,
    ) -> None:
        """`output`: how the text of a choice is parsed; None leaves it as it is.

        `has_token_ids`: events bring ids, those of tokens without text of their own too.
        """
        self.has_token_ids = has_token_ids
        self.generations = generations
        self._desk = desk
        self.eos_ids = frozenset(tokenizer.eos_ids)
        self._tokenizer = tokenizer
        self._stops = stops
        self._notify = notify
        self._on_restart = on_restart
        self._output = output
        self._attempts = [0] * len(generations)
        self._texts: list[list[_ChoiceText]] = [[] for _ in generations]
        # What turning ids into text took, and how many events it made.
        self.busy_ns = 0
        self.num_events = 0
        self._num_untold = 0
        self._took: list[tuple[Generation, Choice]] = []

    def commit(self) -> None:
        """Something is about to reach the client: no generation may start over from here on."""
        for generation in self.generations:
            generation.is_committed = True

    async def events(
        self, tick_s: float, pace: Callable[[], float]
    ) -> AsyncIterator[list[ChoiceEvent]]:
        """New events as they come; an empty list after `tick_s` without any.

        `pace` says how long to gather events before the next are looked at (0: not at all); the
        first are told at once. Raises the `ServingError` of the first generation that failed.
        """
        ticker = _Ticker(tick_s, self._notify)
        try:
            while True:
                self._notify.clear()
                begun_ns = time.perf_counter_ns()
                events = self._collect()
                self.busy_ns += time.perf_counter_ns() - begun_ns
                self.num_events += len(events)
                if events:
                    ticker.reset()
                    yield events
                    await self._grant()
                for generation in self.generations:
                    if generation.error is not None:
                        raise generation.error
                if self._num_untold == 0 and self._texts_are_there():
                    return
                if events and (pause_s := pace()) and not self._is_ending():
                    await asyncio.sleep(pause_s)
                await self._notify.wait()
                if ticker.has_ticked():
                    yield []
        finally:
            ticker.stop()

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
            num_reasoning_tokens=sum(text.num_reasoning_tokens for text in texts),
        )

    def _collect(self) -> list[ChoiceEvent]:
        events = []
        for at, generation in enumerate(self.generations):
            if generation.attempt != self._attempts[at]:
                self._restart(at, generation)
            for text in self._texts[at]:
                if not text.choice.waiting:
                    continue
                piece = generation.take(text.choice)
                if piece is None or text.is_told:
                    continue
                event = text.push(piece)
                if event is not None:
                    events.append(event)
                    self._num_untold -= event.finish_reason is not None
                self._took.append((generation, text.choice))
        return events

    def _restart(self, at: int, generation: Generation) -> None:
        self._num_untold -= sum(not text.is_told for text in self._texts[at])
        self._attempts[at] = generation.attempt
        first = at * len(generation.spec.choices)
        for index in range(first, first + len(generation.choices)):
            self._on_restart(index)
        self._texts[at] = [
            _ChoiceText(self, generation, choice, first + choice.index)
            for choice in generation.choices
        ]
        self._num_untold += len(self._texts[at])

    def _texts_are_there(self) -> bool:
        return all(self._texts)

    def _is_ending(self) -> bool:
        return all(generation.is_complete for generation in self.generations)

    async def _grant(self) -> None:
        took, self._took = self._took, []
        for generation, choice in took:
            if choice.end is None and generation.needs_grant(choice):
                await self._desk.grant(generation, choice)

    def make_text(self, generation: Generation) -> ParsedText | RawText:
        """A fresh text for one choice."""
        min_tokens, tokenizer = generation.spec.sampling.min_tokens, self._tokenizer
        output = self._output
        if output is None:
            return RawText(AnswerText(tokenizer, self._stops, min_tokens=min_tokens))
        text = AnswerText[TokenLogprob](tokenizer, (), shown=output.shown)
        return ParsedText(
            text,
            output.new_parser(),
            stops=self._stops,
            min_tokens=min_tokens,
            token_bytes=lambda token_id: (
                output.shown.get(token_id) or tokenizer.token_bytes(token_id)
            ),
        )

    def finish(
        self, generation: Generation, choice: Choice, num_tokens: int
    ) -> asyncio.Task[FinishReply | None]:
        """Tell decode that a stop string ended a choice, without waiting for its answer."""
        return asyncio.create_task(self._desk.finish(generation, choice, num_tokens))


class _Ticker:
    """Wakes a consumer when nothing has come for a while. One timer, moved only when it rings."""

    __slots__ = ("_loop", "_notify", "_quiet_since_s", "_tick_s", "_ticked", "_timer")

    def __init__(self, tick_s: float, notify: asyncio.Event) -> None:
        self._tick_s = tick_s
        self._notify = notify
        self._ticked = False
        self._loop = asyncio.get_running_loop()
        self._quiet_since_s = self._loop.time()
        self._timer = self._loop.call_later(tick_s, self._ring)

    def reset(self) -> None:
        """Something came."""
        self._quiet_since_s = self._loop.time()

    def has_ticked(self) -> bool:
        """Was it quiet for a whole tick; asked once a tick."""
        ticked, self._ticked = self._ticked, False
        return ticked

    def stop(self) -> None:
        self._timer.cancel()

    def _ring(self) -> None:
        left_s = self._quiet_since_s + self._tick_s - self._loop.time()
        if left_s <= 0:
            self._ticked, left_s = True, self._tick_s
            self._quiet_since_s = self._loop.time()
            self._notify.set()
        self._timer = self._loop.call_later(left_s, self._ring)


class _ChoiceText:
    """One choice's text, and what ended it."""

    def __init__(self, answer: Answer, generation: Generation, choice: Choice, index: int) -> None:
        self.choice = choice
        self.is_told = False
        self.finishing: asyncio.Task[FinishReply | None] | None = None
        self._answer = answer
        self._generation = generation
        self._index = index
        self._text = answer.make_text(generation)
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
        all_ids = tuple(token_ids) if self._answer.has_token_ids else ()
        logprobs, end = piece.logprobs, piece.end
        if end is not None and token_ids and token_ids[-1] == end.stop_token_id:
            token_ids.pop()  # the token that ended the answer is no part of its text
            logprobs = logprobs[:-1] if logprobs is not None else None
        delta = self._text.push(token_ids, logprobs)
        if delta.stop is None and end is not None:
            delta = _both(delta, self._text.finish())
        if delta.stop is not None:
            return self._stopped(delta, end)
        num_tokens = self._num_silent + len(piece.token_ids) // 4
        if end is not None:
            return self._ended(delta, end, num_tokens, all_ids)
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

    def _stopped(self, delta: ParsedDelta, end: EndInfo | None) -> ChoiceEvent | None:
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
        return ChoiceEvent(
            self._index, delta.text, delta.logprobs, "stop", stop.matched, delta.parts
        )

    def _ended(
        self, delta: ParsedDelta, end: EndInfo, num_tokens: int, token_ids: tuple[int, ...]
    ) -> ChoiceEvent:
        self._end = end
        self.is_told = True
        # The caller's own stop tokens are named; that the model's end token came is no news.
        own = set(self._generation.spec.sampling.stop_token_ids) - self._answer.eos_ids
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


def _both(first: ParsedDelta, second: ParsedDelta) -> ParsedDelta:
    return ParsedDelta(
        first.parts + second.parts,
        first.text + second.text,
        first.logprobs + second.logprobs,
        second.stop,
    )
