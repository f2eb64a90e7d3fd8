"""Parsers of every family: what they find, wherever the text is cut, and that nothing is lost."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finback.shared.codec.dialogue import ToolChoice
from finback.shared.codec.formats.span_parser import MAX_HEAD_CHARS
from finback.shared.codec.formats.spans import Start
from support.codec_families import FAMILIES, Family, conversation
from support.parsed import parsed

families = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
WORD = st.text(st.characters(codec="utf-8", min_codepoint=32, exclude_characters="<｜{[;"))
WORDS = WORD.map(str.strip)
ANY_TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\r"))
VALUES: st.SearchStrategy[object] = st.recursive(
    st.none() | st.booleans() | ANY_TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from('ab"\\é'), inner),
    max_leaves=5,
)
NUMBERS: st.SearchStrategy[object] = st.integers() | st.floats(
    allow_nan=False, allow_infinity=False
)
ARGUMENTS = st.fixed_dictionaries(
    {"city": ANY_TEXT},
    optional={"days": NUMBERS, "options": VALUES.map(lambda value: {"v": value})},
)
CUTS = st.lists(st.integers(0, 600), max_size=12)


@families
@settings(max_examples=50)
@given(
    reasoning=WORDS, content=WORDS, calls=st.lists(ARGUMENTS, max_size=3), cuts=CUTS,
    start=st.sampled_from(["opened", "expected"]),
)  # fmt: skip
def test_what_is_written_is_read(
    family: Family,
    reasoning: str,
    content: str,
    calls: list[dict[str, object]],
    cuts: list[int],
    start: Start,
) -> None:
    thought = f"{reasoning}\n</think>\n\n" if reasoning else "</think>"
    opening = "<think>\n" if start == "expected" else ""
    bodies = [("get_weather", json.dumps(call, ensure_ascii=False)) for call in calls]
    said = content if not bodies or family.can_follow_text else ""
    block = family.calls(*bodies) if bodies else ""
    parser = family.format(start).parser(conversation())
    found = parsed(parser, opening + thought + said + block, cuts)
    wanted: list[object] = [("reasoning", reasoning)] if reasoning else []
    wanted += [("text", said)] if said else []
    assert [part for part in found if part[0] != "call"] == wanted
    called = [part for part in found if part[0] == "call"]
    assert [json.loads(str(part[2])) for part in called] == calls
    assert all(part[1] == "get_weather" and part[3] is True for part in called)
    assert found[: len(wanted)] == wanted


@families
@settings(max_examples=100)
@given(data=st.data(), cuts=CUTS, start=st.sampled_from(["opened", "answer"]))
def test_any_cut_and_no_loss(
    family: Family, data: st.DataObject, cuts: list[int], start: Start
) -> None:
    calls = [
        family.call("get", "{}"),
        family.calls(("get_weather", '{"city": "x"}'), ("get", "{}")),
    ]
    pieces = data.draw(st.lists(st.sampled_from([*family.fragments, *calls]), max_size=16))
    words = data.draw(st.sets(st.integers(0, len(pieces))))
    text = "".join(piece + f"w{at:02d}z" * (at in words) for at, piece in enumerate(pieces))
    whole = parsed(family.format(start).parser(conversation()), text)
    assert parsed(family.format(start).parser(conversation()), text, cuts) == whole
    assert parsed(family.format(start).parser(conversation()), text, range(len(text))) == whole
    told = "".join("".join(map(str, part[1:3])) for part in whole)
    assert all(told.count(f"w{at:02d}z") == 1 for at in words if at < len(pieces))
    without_calls = family.format(start).parser(conversation(tool_choice=ToolChoice(mode="none")))
    parts = parsed(without_calls, text)
    assert all(part[0] != "call" for part in parts)
    assert solid("".join(str(part[1]) for part in parts)) == solid(markers_out(text, start))
    if all(part[0] != "call" for part in whole):
        assert whole == parts


def solid(text: str) -> str:
    return re.sub(r"\s+", "", text)


def markers_out(text: str, start: Start) -> str:
    """Without the marks of the one reasoning span that an answer can begin with."""
    if start == "answer":
        begun = text.lstrip()
        if not begun.startswith("<think>"):
            return text
        text = begun.removeprefix("<think>")
    return text.replace("</think>", "", 1)


@families
def test_unknown_names_are_text_and_known_ones_are_not(family: Family) -> None:
    block = family.calls(("rm", '{"a": 1}'))
    assert parsed(family.format().parser(conversation()), block) == [("text", block)]
    only = conversation(tool_choice=ToolChoice(names=("query",)))
    block = family.calls(("get", "{}"))
    assert parsed(family.format().parser(only), block) == [("text", block)]
    assert parsed(family.format().parser(conversation()), block) == [("call", "get", "{}", True)]


@families
def test_a_custom_tool_gets_its_text(family: Family) -> None:
    sql = 'select "é" -- 😀\n from \\t'
    block = family.calls(("query", json.dumps({"input": sql})))
    for cuts in ((), range(len(block))):
        found = parsed(family.format().parser(conversation()), block, cuts)
        assert found == [("call", "query", sql, True)]


@families
def test_arguments_stream(family: Family) -> None:
    block = family.calls(("get_weather", json.dumps({"city": "x" * 1000})))
    parser = family.format().parser(conversation())
    parser.push(block[:500])
    held = sum(len(getattr(event, "text", "")) for event in parser.push(block[500:700]))
    assert held >= 190


@families
def test_memory_is_bounded(family: Family) -> None:
    """Whatever is written again and again, little of it is held back."""
    for fragment in family.fragments:
        parser = family.format().parser(conversation())
        parser.push(family.fragments[0])
        for _ in range(40):
            parser.push(fragment * (4000 // len(fragment)))
        left = parser.finish()
        assert sum(len(getattr(event, "text", "")) for event in left) <= 2 * MAX_HEAD_CHARS


@families
def test_a_call_cut_off_says_so(family: Family) -> None:
    block = family.calls(("get_weather", '{"city": "Paris", "days": 3}'))
    cut = block.index("Par") + 3
    found = parsed(family.format().parser(conversation()), block[:cut])
    assert len(found) == 1
    assert found[0][:2] == ("call", "get_weather")
    assert "Par" in str(found[0][2])
    assert found[0][3] is False
