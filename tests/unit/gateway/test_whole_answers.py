"""Is the beginning of an answer a whole one: asked of the sampler's own sequences, which get lost."""

import asyncio
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from finback.services.gateway import whole_answers
from finback.services.gateway.desk import Desk
from finback.services.gateway.generation import Generation
from finback.services.gateway.whole_answers import WholeAnswers
from finback.services.sampler.sequences import Sequences
from finback.shared.actor.deadline import Deadline
from finback.shared.errors import Unavailable
from finback.shared.wire.messages.generate import (
    ChoiceSpec,
    GenerationSpec,
    GrammarSpec,
    SamplingSpec,
)
from finback.shared.wire.messages.sampler import Mask, MaskReply, MaskRequest
from support.grammar_walk import vocabulary

VOCABULARY = vocabulary()
GRAMMAR = GrammarSpec(kind="regex", text="(ab|cd)*e?", grammar_id="g")
START = LLMatcher(VOCABULARY.tokenizer, LLMatcher.grammar_from_regex(GRAMMAR.text), log_level=0)


class Sampler:
    """Answers as the service does; `troubles` says what goes wrong with each message in turn."""

    def __init__(self, troubles: list[str]) -> None:
        self.troubles = troubles
        self.sequences = Sequences(VOCABULARY)
        self.has_grammar = False
        self.num_tokens = 0
        self.ended: list[tuple[str, int]] = []

    async def call(self, _: str, request: MaskRequest, *__: Any, **___: Any) -> MaskReply:
        trouble = self.troubles.pop(0) if self.troubles else ""
        if trouble == "away":
            raise Unavailable("nobody listens")
        if trouble == "late":
            return MaskReply(masks=())
        if trouble == "forgot":
            self.sequences, self.has_grammar = Sequences(VOCABULARY), False
        (row,) = request.rows
        self.num_tokens += len(row.token_ids) // 4
        self.has_grammar = self.has_grammar or row.grammar is not None
        key = (request.instance, request.epoch, row.request_id, row.choice)
        start = START if self.has_grammar else None
        mask: Mask = self.sequences.answer(key, row, start, 0.0)
        return MaskReply(masks=(mask,))

    async def publish(self, _: str, request: MaskRequest) -> None:
        self.ended += request.ended


def asker(sampler: Sampler) -> WholeAnswers:
    subjects = SimpleNamespace(service=lambda *_: "s")
    desk: Any = SimpleNamespace(
        client=sampler, subjects=subjects, instance="gateway-1", publish=sampler.publish
    )
    made: Desk = desk
    return WholeAnswers(made)


def generation() -> Generation:
    spec = GenerationSpec(
        request_id="r",
        attempt=1,
        model="m",
        token_ids=array("i", [1]).tobytes(),
        sampling=SamplingSpec(),
        choices=(ChoiceSpec(index=0, seed=0), ChoiceSpec(index=1, seed=1)),
        gateway="g",
        grammar=GRAMMAR,
    )
    return Generation(spec, block_hashes=b"", deadline=Deadline(), notify=asyncio.Event())


def is_whole(text: str) -> bool:
    pairs, rest = divmod(len(text.removesuffix("e")), 2)
    body = text.removesuffix("e")
    return not rest and all(body[2 * i : 2 * i + 2] in ("ab", "cd") for i in range(pairs))


@settings(max_examples=60, deadline=None)
@given(
    asked=st.lists(
        st.tuples(st.integers(0, 1), st.sampled_from(["", "a", "ab", "abcd", "abc", "abe", "cde", "b"])),
        max_size=6,
    ),
    troubles=st.lists(st.sampled_from(["", "away", "late", "forgot"]), max_size=6),
)  # fmt: skip
def test_answers_are_right_whatever_goes_wrong(
    asked: list[tuple[int, str]], troubles: list[str]
) -> None:
    async def run() -> None:
        sampler, made = Sampler(troubles), generation()
        whole = asker(sampler)
        for index, text in asked:
            task = whole.ask(made, made.choices[index], list(text.encode()))
            assert await task == is_whole(text), text
        await whole.close()
        assert set(sampler.ended) == {("r#stop", index) for index, _ in asked}

    asyncio.run(run())


def test_what_is_known_is_not_told_again() -> None:
    async def run() -> int:
        sampler, made = Sampler([]), generation()
        whole = asker(sampler)
        for end in range(0, 200, 2):
            assert await whole.ask(made, made.choices[0], list(b"ab" * 100)[:end])
        return sampler.num_tokens

    assert asyncio.run(run()) == 198


def test_a_sampler_that_stays_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_answers, "_PATIENCE_S", 0.05)

    async def run() -> None:
        sampler, made = Sampler(["away"] * 1000), generation()
        await asker(sampler).ask(made, made.choices[0], [97])

    with pytest.raises(Unavailable, match="does not answer"):
        asyncio.run(run())
