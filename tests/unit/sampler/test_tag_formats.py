"""Structural tags given as a tree: every chunk through the real engine, and what is refused by its path."""

import json
from typing import Any, Final

import pytest

from finback.services.sampler.compiler import Vocabulary, compile_grammar
from finback.services.sampler.grammar_source import read_source
from finback.shared.codec.structural_tags import structural_tag_of
from finback.shared.codec.tag_chunks import TagFault
from finback.shared.errors import InvalidRequest
from finback.shared.wire.messages.generate import GrammarSpec
from support.grammar_walk import Walk, vocabulary

ANY: Final = {"type": "any_text"}
BOOL: Final = {"type": "json_schema", "json_schema": {"type": "boolean"}}
WORD: Final = {"type": "regex", "pattern": "[a-z]+"}
UNIQUE: Final = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}


def const(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def tag(begin: str, content: Any, end: Any = "</t>") -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def row(*items: Any) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(items)}


def triggered(*tags: Any, **more: Any) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": ["<t"], "tags": list(tags), **more}


TA: Final = tag("<ta>", BOOL)
TB: Final = tag("<tb>", ANY)
ONE: Final = {"at_least_one": True}
STOP: Final = {"stop_after_first": True}


def spec(found: Any, strictness: str = "strict") -> GrammarSpec:
    text = json.dumps({"type": "structural_tag", "format": found})
    return GrammarSpec(kind="structural_tag", text=text, strictness=strictness)


@pytest.fixture(scope="module")
def engine() -> Vocabulary:
    return vocabulary()


# (format, whole answers, texts that are none)
CASES: Final[list[tuple[Any, list[str], list[str]]]] = [
    (const('a"b\\'), ['a"b\\'], ["a", 'a"b\\\\']),
    (BOOL, ["true"], ["1", "true!"]),
    (WORD, ["a", "abc"], ["", "A"]),
    (ANY, ["", "what ever\n"], []),
    (row(const("x"), BOOL, const("y")), ["xtruey"], ["xtrue", "truey"]),
    (row(ANY, const("</think>"), BOOL), ["hm</think>true", "</think>false"], ["true", "</think>x"]),
    (row(WORD, const("b"), ANY), ["abX", "aab"], ["b", "A"]),
    ({"type": "or", "elements": [const("yes"), BOOL]}, ["yes", "true"], ["yestrue"]),
    ({"type": "or", "elements": [triggered(TA, TB), const("no")]}, ["<ta>true</t>", "no"], ["<t"]),
    ({"type": "optional", "content": const("x")}, ["", "x"], ["xx"]),
    ({"type": "star", "content": const("x")}, ["", "xxx"], ["y"]),
    ({"type": "plus", "content": tag("<", BOOL, ">")}, ["<true>", "<true><false>"], ["", "<true"]),
    ({"type": "repeat", "content": const("x"), "min": 2, "max": 3}, ["xx", "xxx"], ["x", "xxxx"]),
    ({"type": "repeat", "content": const("x"), "min": 2, "max": -1}, ["xx", "xxxxxx"], ["x"]),
    (tag("<a>", ANY, "</a>"), ["<a></a>", "<a>b<a></a>"], ["<a>", "<a></a>b"]),
    (tag("<a>", WORD, ["</a>", "."]), ["<a>b</a>", "<a>bc."], ["<a>b", "<a></a>"]),
    (tag("<a>", {"type": "regex", "pattern": ".*"}, "</a>"), ["<a>b</a>"], ["<a>b</a></a>"]),
    (tag("{", BOOL, ""), ["{true"], ["{"]),
    (tag("<a>", triggered(TA, TB), "</z>"),
     ["<a>x</z>", "<a>x<ta>true</t>y</z>", "<a><tb>free</t></z>"], ["<a>x", "<a><ta>1</t></z>"]),
    (triggered(TA, TB), ["", "x", "x<ta>true</t>y<tb>z</t>"], ["<t", "<ta>x</t>", "<tb>z"]),
    (triggered(TA, **ONE), ["<ta>true</t>", "<ta>true</t>x<ta>false</t>"], ["", "x<ta>true</t>"]),
    (triggered(TA, **STOP), ["", "x", "x<ta>true</t>"], ["<ta>true</t>x"]),
    (triggered(TA, **ONE, **STOP), ["<ta>true</t>"], ["", "x<ta>true</t>", "<ta>true</t>x"]),
    ({"type": "tags_with_separator", "tags": [TA, TB], "separator": ", "},
     ["", "<ta>true</t>", "<ta>true</t>, <tb>x</t>"], ["<ta>true</t>, ", "<ta>true</t><tb>x</t>"]),
    ({"type": "tags_with_separator", "tags": [TA], "separator": "", **ONE},
     ["<ta>true</t>", "<ta>true</t><ta>true</t>"], [""]),
    ({"type": "tags_with_separator", "tags": [TA], "separator": ",", **STOP},
     ["", "<ta>true</t>"], ["<ta>true</t>,<ta>true</t>"]),
    # A thought, then text with calls in it.
    (row(tag("<think>", ANY, "</think>"), triggered(TA)),
     ["<think>x<t</think>", "<think></think>so<ta>true</t>"], ["so", "<think></think><tx"]),
]  # fmt: skip


@pytest.mark.parametrize(("found", "good", "bad"), CASES)
def test_chunks(engine: Vocabulary, found: Any, good: list[str], bad: list[str]) -> None:
    compile_grammar(engine, spec(found), "")
    walk = Walk(engine, spec(found))
    assert [text for text in good if not walk.accepts(text)] == []
    assert [text for text in bad if walk.accepts(text)] == []
    for seed in range(3):
        answer = walk.draw(seed)
        assert answer is None or walk.accepts(answer)


@pytest.mark.parametrize(
    ("found", "pointer"),
    [
        (1, ""),
        ({"type": "grammar", "grammar": "root ::= x"}, "/type"),
        ({"type": "dispatch"}, "/type"),
        (const(""), "/value"),
        ({**const("x"), "more": 1}, "/more"),
        ({**BOOL, "style": "qwen_xml"}, "/style"),
        ({**BOOL, "any_order": True}, "/any_order"),
        ({"type": "json_schema", "json_schema": "{}"}, "/json_schema"),
        ({"type": "regex", "pattern": ""}, "/pattern"),
        ({"type": "any_text", "max_tokens": 5}, "/max_tokens"),
        ({"type": "any_text", "excludes": ["x"]}, "/excludes"),
        (row(), "/elements"),
        (row(const("a"), {"type": "x"}), "/elements/1/type"),
        ({"type": "repeat", "content": ANY, "min": 2, "max": 1}, "/max"),
        ({"type": "repeat", "content": ANY, "min": -1, "max": 1}, "/min"),
        (tag("", ANY), "/begin"),
        (tag("<", ANY, []), "/end"),
        (tag("<", ANY, [1]), "/end/0"),
        (tag({"type": "token", "token": 1}, ANY), "/begin"),  # type: ignore[arg-type]  # as wrong as that
        (triggered(tag("<x>", ANY)), "/tags/0/begin"),
        (triggered(TA, at_least_one=1), "/at_least_one"),
        (triggered(TA, excludes=["x"]), "/excludes"),
        (triggered(ANY), "/tags/0"),
        (triggered(TA, triggers=["<t", "<u"]), "/triggers/1"),
        # Free text that nothing ends, or whose end never comes.
        (row(ANY, BOOL), "/elements/0"),
        (row(triggered(TA), BOOL), "/elements/0"),
        ({"type": "star", "content": ANY}, "/content"),
        (tag("<", ANY, ""), "/content"),
        (tag("<a>", triggered(TA), "<"), "/content/triggers/0"),
        (tag("<a>", triggered(TA), "x<ty"), "/content/triggers/0"),
    ],
)
def test_refused_by_pointer(found: Any, pointer: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_source(spec(found))
    assert caught.value.reason == f"structural_tag at #/format{pointer}"
    assert caught.value.param == "structured_outputs.structural_tag"


def test_deep_trees_and_two_forms_at_once() -> None:
    deep: Any = ANY
    for _ in range(30):
        deep = row(deep)
    with pytest.raises(TagFault, match="nested"):
        structural_tag_of({"format": deep})
    with pytest.raises(TagFault) as caught:
        structural_tag_of({"format": ANY, "structures": []})
    assert caught.value.path == ("structures",)


def test_schemas_and_expressions_by_their_pointers(engine: Vocabulary) -> None:
    unique = {"type": "json_schema", "json_schema": UNIQUE}
    found = row(const("x"), triggered(tag("<t>", unique)))
    at = "#/format/elements/1/tags/0/content/json_schema/uniqueItems"
    with pytest.raises(InvalidRequest, match=at):
        read_source(spec(found))
    assert read_source(spec(found, "lenient")).widened == (at,)
    looks = tag("<t>", {"type": "regex", "pattern": "a(?=b)"})
    with pytest.raises(InvalidRequest, match=r"position 1.*#/format/content/pattern"):
        read_source(spec(looks))
    range_ = tag("<t>", {"type": "regex", "pattern": "ab[z-a]"})
    with pytest.raises(InvalidRequest, match="position 3"):
        compile_grammar(engine, spec(range_), "")
