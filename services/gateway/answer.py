"""An answer as it comes: the rows of its generations turned into text, choice by choice.

Protocol-neutral: a protocol turns `ChoiceEvent`s into its own documents.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence

from finback.services.gateway.answer_events import ChoiceEvent, Output, Usage
from finback.services.gateway.choice_text import ChoiceText, Reading
from finback.services.gateway.desk import Desk
from finback.services.gateway.generation import Choice, Generation
from finback.services.gateway.guarded_choice import Guard, GuardedChoice
from finback.services.gateway.parsed_text import ParsedText, RawText
from finback.services.gateway.ticker import Ticker
from finback.services.gateway.whole_answers import WholeAnswers
from finback.shared.clock import monotonic_s
from finback.shared.codec.answer_text import AnswerText
from finback.shared.codec.tokenizer import Tokenizer
from finback.shared.wire.messages.decode import FinishReply
from finback.shared.wire.messages.generate import TokenLogprob

# The counts of a choice that a stop string ended are asked for; they are not worth a longer wait.
_COUNTS_TIMEOUT_S = 2.0


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
        output: Output | None = None,
        has_token_ids: bool = False,
        own_stop_ids: frozenset[int] = frozenset(),
    ) -> None:
        """`output`: how the text of a choice is parsed; None leaves it as it is.

        `has_token_ids`: events bring ids, those of tokens without text of their own too.
        `own_stop_ids`: the caller's, which ends an answer kept to a grammar only where that may end.
        """
        self.generations = generations
        self._desk = desk
        self._reading = Reading(
            new_text=self._new_text,
            finish=self._finish,
            eos_ids=frozenset(tokenizer.eos_ids),
            has_token_ids=has_token_ids,
        )
        self._tokenizer = tokenizer
        self._stops = stops
        self._notify = notify
        self._output = output
        has_stops = bool(stops or own_stop_ids)
        self._is_guarded = has_stops and any(made.spec.grammar for made in generations)
        self._own_stop_ids = own_stop_ids
        self._whole = WholeAnswers(desk)
        self._texts = [self._new_texts(at, made) for at, made in enumerate(generations)]
        # What turning ids into text took, and how many events it made.
        self.busy_ns = 0
        self.num_events = 0
        self._num_untold = sum(len(texts) for texts in self._texts)
        self._took: list[tuple[Generation, Choice]] = []

    async def events(
        self, tick_s: float, pace: Callable[[], float]
    ) -> AsyncIterator[list[ChoiceEvent]]:
        """New events as they come; an empty list after `tick_s` without any.

        `pace` says how long after some events the next are told at the earliest, so that they
        gather. Raises the `ServingError` of the first generation that failed.
        """
        told_s = -math.inf
        ticker = Ticker(tick_s, self._notify)
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
                if self._num_untold == 0:
                    return
                if events:
                    told_s = monotonic_s()
                await self._notify.wait()
                # Where tokens come slower than the pace, this needs no timer at all.
                pause_s = told_s + pace() - monotonic_s()
                if pause_s > 0 and not self._is_ending():
                    await asyncio.sleep(pause_s)
                if ticker.has_ticked():
                    yield []
        finally:
            ticker.stop()
            await self._unguard()

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
        events: list[ChoiceEvent] = []
        for at, generation in enumerate(self.generations):
            for text in self._texts[at]:
                if isinstance(text, GuardedChoice) and text.is_in_doubt:
                    self._keep(text.settle(), events)
                    if text.is_in_doubt:
                        continue
                if not text.choice.waiting:
                    continue
                piece = generation.take(text.choice)
                if piece is None or text.is_told:
                    continue
                self._keep(text.push(piece), events)
                self._took.append((generation, text.choice))
        return events

    def _keep(self, event: ChoiceEvent | None, events: list[ChoiceEvent]) -> None:
        if event is not None:
            events.append(event)
            self._num_untold -= event.finish_reason is not None

    async def _unguard(self) -> None:
        for text in (text for texts in self._texts for text in texts):
            if isinstance(text, GuardedChoice):
                text.cancel()
        await self._whole.close()

    def _new_texts(self, at: int, generation: Generation) -> list[ChoiceText]:
        first = at * len(generation.choices)
        if self._is_guarded:
            guard = self._guard()
            return [
                GuardedChoice(self._reading, generation, choice, first + choice.index, guard)
                for choice in generation.choices
            ]
        return [
            ChoiceText(self._reading, generation, choice, first + choice.index)
            for choice in generation.choices
        ]

    def _guard(self) -> Guard:
        return Guard(
            verdict=self._whole.ask,
            token_bytes=self._token_bytes,
            encode=self._tokenizer.encode,
            own_ids=self._own_stop_ids,
            wake=self._notify.set,
        )

    def _token_bytes(self, token_id: int) -> bytes:
        """Of a token as its choice's text shows it."""
        shown = self._output.shown if self._output is not None else {}
        return shown.get(token_id) or self._tokenizer.token_bytes(token_id)

    def _is_ending(self) -> bool:
        return all(generation.is_complete for generation in self.generations)

    async def _grant(self) -> None:
        took, self._took = self._took, []
        for generation, choice in took:
            if choice.end is None and generation.needs_grant(choice):
                await self._desk.grant(generation, choice)

    def _new_text(self, min_tokens: int) -> ParsedText | RawText:
        tokenizer, output = self._tokenizer, self._output
        if output is None:
            made = AnswerText[TokenLogprob](
                tokenizer, self._stops, min_tokens=min_tokens, is_doubtful=self._is_guarded
            )
            return RawText(made)
        text = AnswerText[TokenLogprob](tokenizer, (), shown=output.shown)
        return ParsedText(
            text,
            output.new_parser(),
            stops=self._stops,
            min_tokens=min_tokens,
            token_bytes=self._token_bytes,
            is_doubtful=self._is_guarded,
        )

    def _finish(
        self, generation: Generation, choice: Choice, num_tokens: int
    ) -> asyncio.Task[FinishReply | None]:
        return asyncio.create_task(self._desk.finish(generation, choice, num_tokens))
