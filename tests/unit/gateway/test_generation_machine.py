"""Rows, gaps, losses and ends in any order: each choice is told whole, once, and ends once.

The engines are honest: an attempt's rows continue the tokens that it was placed with, come in any
order or not at all, and older attempts go on sending (zombies). The desk's checks are played here.
"""

import asyncio
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from finback.services.gateway.generation import Generation, Lost
from finback.shared.actor.deadline import Deadline
from finback.shared.wire.messages.generate import (
    ChoiceSpec,
    EndInfo,
    GenerationSpec,
    SamplingSpec,
    TokenLogprob,
    TokenRow,
)


def ids(tokens: list[int]) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in tokens)


class GenerationMachine(RuleBasedStateMachine):
    """`truth[i]`: the tokens of choice i; `made[(attempt, i)]`: how far that attempt has come."""

    @initialize(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=3))
    def start(self, lengths: list[int]) -> None:
        self.truth = [[100 * i + at for at in range(size)] for i, size in enumerate(lengths)]
        spec = GenerationSpec(
            request_id="r",
            attempt=1,
            model="m",
            token_ids=b"\0\0\0\0",
            sampling=SamplingSpec(max_tokens=100),
            choices=tuple(ChoiceSpec(index=i, seed=i) for i in range(len(lengths))),
            gateway="g",
            credit_tokens=4,
        )
        self.generation = Generation(
            spec, block_hashes=b"", deadline=Deadline(), notify=asyncio.Event()
        )
        self.taken: list[list[int]] = [[] for _ in lengths]
        self.logprobs: list[list[int]] = [[] for _ in lengths]
        self.ends = [0] * len(lengths)
        self.known: dict[tuple[int, int], int] = {}
        self.made: dict[tuple[int, int], int] = {}
        self.stopped: dict[int, int] = {}
        self.is_lost = False
        self.attempt = 0
        self.place()

    def place(self) -> None:
        self.attempt += 1
        self.is_lost = False
        self.generation.begin(self.attempt)
        placed = self.generation.place_open()
        assert [c.index for c in placed] == [
            c.index for c in self.generation.choices if c.end is None
        ]
        for choice in placed:
            known = memoryview(choice.token_ids).cast("i").tolist() if choice.token_ids else []
            assert known == self.truth[choice.index][: len(known)]
            assert len(known) == self.generation.choices[choice.index].num_received
            key = (self.attempt, choice.index)
            self.known[key] = self.made[key] = len(known)

    @rule(data=st.data(), count=st.integers(1, 4))
    def compute(self, data: Any, count: int) -> None:
        """An instance gets on, whether anybody hears of it or not."""
        if self.made:
            key = data.draw(st.sampled_from(sorted(self.made)))
            self.made[key] = min(len(self.truth[key[1]]), self.made[key] + count)

    @rule(data=st.data(), start=st.integers(0, 12), count=st.integers(0, 6))
    def row(self, data: Any, start: int, count: int) -> None:
        """Some of what an attempt has made arrives: late, twice, with a gap before it."""
        if not self.made:
            return
        attempt, index = data.draw(st.sampled_from(sorted(self.made)))
        known, made = self.known[attempt, index], self.made[attempt, index]
        start = min(max(start, known), made)
        stop = min(made, start + count)
        if attempt != self.generation.attempt:
            return  # the desk drops it
        self._accept(attempt, index, start, stop)

    def _accept(self, attempt: int, index: int, start: int, stop: int) -> None:
        choice, truth = self.generation.choices[index], self.truth[index]
        before, had_end = choice.num_received, choice.end is not None
        is_end = stop == len(truth)
        row = TokenRow(
            request_id="r",
            choice=index,
            attempt=attempt,
            offset=start,
            token_ids=ids(truth[start:stop]),
            logprobs=tuple(TokenLogprob(logprob=-float(t)) for t in truth[start:stop]),
            end=EndInfo(finish_reason="length") if is_end else None,
            num_cached_tokens=attempt,
        )
        lacking = self.generation.accept(row)
        if had_end:
            assert lacking is None and choice.num_received == before
        elif start > before:
            assert lacking is choice and choice.num_received == before
        else:
            assert choice.num_received == max(before, stop)

    @rule(data=st.data())
    def resume(self, data: Any) -> None:
        """The instance is asked for everything that is missing."""
        index = data.draw(st.sampled_from(range(len(self.truth))))
        key = (self.generation.attempt, index)
        if key in self.made:
            start = self.generation.choices[index].num_received
            self._accept(*key, start, max(start, self.made[key]))

    @rule(index=st.integers(0, 2))
    def take(self, index: int) -> None:
        """The consumer reads."""
        if index < len(self.truth):
            self._take(index)

    def _take(self, index: int) -> None:
        piece = self.generation.take(self.generation.choices[index])
        if piece is not None:
            self.taken[index] += memoryview(piece.token_ids).cast("i").tolist()
            self.logprobs[index] += [int(-entry.logprob) for entry in piece.logprobs or ()]
            self.ends[index] += piece.end is not None

    @rule(index=st.integers(0, 2))
    def stop_string(self, index: int) -> None:
        """The consumer finds a stop string in what it has read."""
        if index >= len(self.truth):
            return
        choice = self.generation.choices[index]
        if self.generation.finish(choice, EndInfo(finish_reason="stop")):
            self.stopped[index] = len(self.taken[index])
            self.ends[index] += 1

    @rule()
    def lose(self) -> None:
        """The instance dies, hangs or drains; what it sent before may still come."""
        self.generation.lose(Lost("gone", "decode", is_crash=True))
        self.is_lost = not self.generation.is_complete

    @precondition(lambda self: self.is_lost and not self.generation.is_complete)
    @rule()
    def go_on(self) -> None:
        self.place()

    @invariant()
    def nothing_is_repeated_or_missing(self) -> None:
        if not hasattr(self, "truth"):
            return
        for index, choice in enumerate(self.generation.choices):
            truth = self.truth[index]
            assert self.taken[index] == truth[: len(self.taken[index])]
            assert self.logprobs[index] == self.taken[index]
            assert (
                list(memoryview(bytes(choice.token_ids)).cast("i")) == truth[: choice.num_received]
            )
            assert choice.num_taken == len(self.taken[index]) <= choice.num_received
            assert self.ends[index] <= 1
            assert choice.num_cached in (None, *range(1, self.attempt + 1))
        open_ = sum(choice.end is None for choice in self.generation.choices)
        assert self.generation.is_complete == (open_ == 0)

    def teardown(self) -> None:
        """Then everything that is left arrives."""
        if not hasattr(self, "truth"):
            return
        if self.is_lost and not self.generation.is_complete:
            self.place()
        for index, truth in enumerate(self.truth):
            key = (self.generation.attempt, index)
            if self.generation.choices[index].end is None:
                self.made[key] = len(truth)
                self._accept(*key, self.generation.choices[index].num_received, len(truth))
            self._take(index)
            assert self.taken[index] == truth[: self.stopped.get(index, len(truth))]
        assert self.ends == [1] * len(self.truth)
        assert self.generation.is_complete


GenerationMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)
TestGeneration = GenerationMachine.TestCase
