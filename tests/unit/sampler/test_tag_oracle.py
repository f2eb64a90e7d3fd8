"""Random structural tags: what the engine lets through, Python's expression of the same tag matches."""

import json
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from finback.services.sampler.compiler import Vocabulary
from finback.services.sampler.grammar_source import read_source
from finback.shared.errors import InvalidRequest
from finback.shared.wire.messages.generate import GrammarSpec
from support.grammar_walk import Walk, vocabulary
from support.tag_oracle import expression, trees


@pytest.fixture(scope="module")
def engine() -> Vocabulary:
    return vocabulary()


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(trees(), st.integers(0, 2**30))
def test_nothing_else_comes_through(engine: Vocabulary, tree: Any, seed: int) -> None:
    spec = GrammarSpec(kind="structural_tag", text=json.dumps({"format": tree}))
    try:
        read_source(spec)
    except InvalidRequest:
        reject()
    walk, wanted, draw = Walk(engine, spec), expression(tree), random.Random(seed)
    for _ in range(2):
        answer = walk.draw(draw.randrange(2**30))
        if answer is None:
            continue
        assert wanted.fullmatch(answer), answer
        for _ in range(4):
            other = changed(answer, draw)
            assert not walk.accepts(other) or wanted.fullmatch(other), other


def changed(text: str, draw: random.Random) -> str:
    """One character is gone, new, or another."""
    at, new = draw.randrange(len(text) + 1), draw.choice("<>ab[]/07x")
    return text[:at] + draw.choice(["", new]) + text[at + draw.randrange(2) :]
