"""Structural tags through the real engine: free outside, and nothing but islands behind triggers."""

import json
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from finback.services.sampler.compiler import Vocabulary, compile_grammar
from finback.services.sampler.grammar_source import read_source
from finback.shared.codec.structural_tags import structural_tag_of
from finback.shared.codec.tag_chunks import TagFault
from finback.shared.errors import InvalidRequest
from finback.shared.wire.messages.generate import GrammarSpec
from support.grammar_walk import Walk, vocabulary
from support.structured import islands

PLACE: Final = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "string", "maxLength": 5}},
    "required": ["a"],
    "additionalProperties": False,
}
WORD: Final = {"type": "string", "maxLength": 4}
FOO: Final = {"begin": "<function=foo>", "schema": PLACE, "end": "</function>"}
BAR: Final = {"begin": "<function=bar>\n", "schema": WORD, "end": "\n</function>"}
ASK: Final = {"begin": "[ask]", "schema": {"enum": ["yes", "no"]}, "end": "."}
TAG: Final = {"structures": [FOO, BAR, ASK], "triggers": ["<function=", "[ask"]}
# Not enforceable.
UNIQUE: Final = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}


@pytest.fixture(scope="module")
def engine() -> Vocabulary:
    return vocabulary()


@pytest.fixture(scope="module")
def walk(engine: Vocabulary) -> Walk:
    return Walk(engine, spec(TAG))


def spec(tag: Any, strictness: str = "strict") -> GrammarSpec:
    return GrammarSpec(kind="structural_tag", text=json.dumps(tag), strictness=strictness)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Text, <func and [as, </function> \U0001f600\n",
        'x<function=foo>{"a": 3}</function>y',
        '<function=bar>\n"x"\n</function><function=foo>{"a":1}</function>[ask]"no".',
        '<<function=bar>\n"[ask"\n</function>',
    ],
)
def test_text_around_islands_is_free(walk: Walk, text: str) -> None:
    islands(text, TAG)
    assert walk.accepts(text)


@pytest.mark.parametrize(
    "text",
    [
        "<function=",
        "<function=baz>",
        '<function=foo>{"a": true}</function>',
        '<function=foo>{"b": "x"}</function>',
        '<function=foo>{"a": 1}',
        '<function=foo>{"a": 1}</functions>',
        '<function=bar>"x"</function>',
        "[ask] me",
        "[ask]maybe.",
    ],
)
def test_behind_a_trigger_nothing_else_comes(walk: Walk, text: str) -> None:
    assert not walk.accepts(text)


def test_random_answers(walk: Walk) -> None:
    draws = [walk.draw(seed) for seed in range(40)]
    answers = [answer for answer in draws if answer is not None]
    assert len(answers) > 20
    found = [value for answer in answers for value in islands(answer, TAG)]
    assert found
    assert any(answer.strip() and not islands(answer, TAG) for answer in answers)


MARKS = st.text(
    st.sampled_from('ab<>="\\/\n\t\x01\x7f{}[]()|*+?.é\U0001f600 \u2028'), min_size=1, max_size=4
)
SCHEMAS = st.sampled_from(
    [
        {"type": "boolean"},
        {"enum": ["x", "yy"]},
        {**PLACE, "properties": {"a": {"type": "boolean"}}},
    ]
)


@st.composite
def tags(draw: Any) -> dict[str, Any]:
    """Any marks, one or two structures for a trigger."""
    triggers = draw(st.lists(MARKS, min_size=1, max_size=3, unique=True))
    begins = [
        t + draw(st.just("") | MARKS) for t in triggers for _ in range(draw(st.integers(1, 2)))
    ]
    structures = [{"begin": b, "schema": draw(SCHEMAS), "end": draw(MARKS)} for b in begins]
    return {"triggers": triggers, "structures": structures}


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@given(tags(), st.integers(0, 2**30))
def test_any_marks(engine: Vocabulary, tag: dict[str, Any], seed: int) -> None:
    try:
        structural_tag_of(tag)
    except TagFault:
        reject()
    compile_grammar(engine, spec(tag), "")
    walk = Walk(engine, spec(tag))
    for answer in (walk.draw(seed), walk.draw(seed + 1)):
        islands(answer or "", tag)


def test_as_a_part_of_an_answer(engine: Vocabulary) -> None:
    lark = 'start: head @p0\nhead[lazy]: /(.|\\n)*/ "</think>"'
    parts = {"p0": {"kind": "structural_tag", "text": json.dumps(TAG)}}
    whole = GrammarSpec(kind="structural", text=json.dumps({"lark": lark, "parts": parts}))
    walk = Walk(engine, whole)
    assert walk.accepts('<function=, hm</think>so [ask]"yes".')
    assert not walk.accepts('so [ask]"yes".')
    assert not walk.accepts("</think><function=baz>")


@pytest.mark.parametrize(
    ("changed", "pointer"),
    [
        ([], "#"),
        ({"format": {}}, "#/structures"),
        ({"type": "text"}, "#/type"),
        ({"more": 1}, "#/more"),
        ({"triggers": []}, "#/triggers"),
        ({"triggers": [""]}, "#/triggers/0"),
        ({"triggers": ["<f", "<function="]}, "#/triggers/1"),
        ({"triggers": ["<", "<"]}, "#/triggers/1"),
        ({"triggers": ["<function=", "[ask", "{"]}, "#/triggers/2"),
        ({"triggers": ["<function="]}, "#/structures/2/begin"),
        ({"structures": {}}, "#/structures"),
        ({"structures": [FOO] * 129}, "#/structures"),
        ({"structures": [FOO, 1]}, "#/structures/1"),
        ({"structures": [{**FOO, "stop": ""}]}, "#/structures/0/stop"),
        ({"structures": [{**FOO, "begin": "x" * 1025}]}, "#/structures/0/begin"),
        ({"structures": [{**FOO, "end": 1}]}, "#/structures/0/end"),
        ({"structures": [{**FOO, "schema": "{}"}]}, "#/structures/0/schema"),
    ],
)
def test_refused_by_pointer(changed: Any, pointer: str) -> None:
    tag = {**TAG, **changed} if isinstance(changed, dict) else changed
    with pytest.raises(InvalidRequest) as caught:
        read_source(spec(tag))
    assert caught.value.param == "structured_outputs.structural_tag"
    assert caught.value.reason == f"structural_tag at {pointer}"


def test_schemas_by_strictness(engine: Vocabulary) -> None:
    tag = {**TAG, "structures": [FOO, BAR, {**ASK, "schema": UNIQUE}]}
    at = "#/structures/2/schema/uniqueItems"
    with pytest.raises(InvalidRequest, match=at) as caught:
        compile_grammar(engine, spec(tag), "")
    assert caught.value.reason == f"uniqueItems at {at}"
    made = compile_grammar(engine, spec(tag, "lenient"), "")
    assert made.source.widened == (at,)


def test_a_schema_cannot_loosen_the_options() -> None:
    loose = {"type": "integer", "x-guidance": {"lenient": True}}
    tag = {**TAG, "structures": [{**FOO, "schema": loose}, BAR, ASK]}
    grammars = json.loads(read_source(spec(tag)).text)["grammars"]
    assert [g["name"] for g in grammars] == ["tag", "tag_s0", "tag_s1", "tag_s2"]
    assert grammars[1]["json_schema"]["x-guidance"]["lenient"] is False
