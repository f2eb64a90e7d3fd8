"""What requests say of their answers' text, on every API: one thing, in a known form, or a 400 by path."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finback.services.gateway.answer_formats import asked_of, from_text_format
from finback.services.gateway.chat_schema import ChatRequest
from finback.services.gateway.chat_work import conversation_of
from finback.services.gateway.grammar import Asked, blame, check_together, with_strictness
from finback.services.gateway.grammar_verdict import MAX_WIDENED_CHARS, refusal, widened_header
from finback.services.gateway.messages_schema import RULES, MessagesRequest
from finback.services.gateway.messages_work import conversation_of as messages_conversation
from finback.services.gateway.responses_conversation import (
    conversation_of as responses_conversation,
)
from finback.services.gateway.responses_items import items_of
from finback.services.gateway.responses_schema import ResponsesRequest
from finback.services.gateway.schema import CompletionRequest
from finback.services.gateway.service import load_model
from finback.services.gateway.validation import check
from finback.shared import config
from finback.shared.errors import InvalidRequest, Unavailable
from finback.shared.wire.messages.generate import GrammarSpec

MESSAGES = [{"role": "user", "content": "?"}]
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"}],
    "triggers": ["<f="],
}
NAMED = {"name": "n", "schema": {"type": "object"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
FORMS: list[tuple[dict[str, Any], str]] = [
    ({"json": {"type": "object"}}, "json_schema"),
    ({"json": '{"type":"object"}'}, "json_schema"),
    ({"json": False}, "json_schema"),
    ({"json_object": True}, "json_object"),
    ({"regex": "a+"}, "regex"),
    ({"choice": ["a", "b"]}, "choice"),
    ({"grammar": "start: A"}, "lark"),
    ({"structural_tag": TAG}, "structural_tag"),
    ({"structural_tag": json.dumps(TAG)}, "structural_tag"),
    ({"regex": "a", "choice": None, "strictness": "lenient"}, "regex"),
]
FIELDS = ["json", "json_object", "regex", "choice", "grammar", "structural_tag", "strictness"]
WORDS = [*FIELDS, "type", "json_schema", "schema", "name", "strict", "structures", "triggers",
         "begin", "end", "format", "elements", "content", "tags"]  # fmt: skip
# (structured_outputs, the field that is refused)
BAD: list[tuple[Any, str]] = [
    ({}, ""),
    ({"regex": None}, ""),
    ({"strictness": "strict"}, ""),
    ({"regex": "a", "choice": ["b"]}, ""),
    ([], ""),
    ({"other": "x"}, "other"),
    ({"regex": 5}, "regex"),
    ({"regex": ""}, "regex"),
    ({"choice": []}, "choice"),
    ({"choice": "a"}, "choice"),
    ({"choice": ["a", ""]}, "choice.1"),
    ({"choice": ["a", 1]}, "choice.1"),
    ({"choice": ["a"] * 10_001}, "choice"),
    ({"json": "{"}, "json"),
    ({"json": 5}, "json"),
    ({"json_object": False}, "json_object"),
    ({"grammar": {}}, "grammar"),
    ({"regex": "a", "strictness": "some"}, "strictness"),
    ({"structural_tag": "{"}, "structural_tag"),
    ({"structural_tag": {"type": "structural_tag", "format": {}}}, "structural_tag.format.type"),
    ({"structural_tag": {**TAG, "triggers": []}}, "structural_tag.triggers"),
    ({"structural_tag": {**TAG, "structures": [{"begin": "<f="}]}},
     "structural_tag.structures.0.end"),
    ({"structural_tag": {**TAG, "triggers": ["<f=", "<g="]}}, "structural_tag.triggers.1"),
]  # fmt: skip


def of_chat(**fields: Any) -> Asked | None:
    body = {"model": "m", "messages": MESSAGES, **fields}
    conversation = conversation_of(check(body, ChatRequest))
    return _asked(conversation.answer, conversation.answer_param)


def of_completion(**fields: Any) -> Asked | None:
    return asked_of(check({"model": "m", "prompt": "?", **fields}, CompletionRequest))


def of_responses(**fields: Any) -> Asked | None:
    request = check({"model": "m", "input": "?", **fields}, ResponsesRequest)
    conversation = responses_conversation(request, items_of("?"), lambda text: text)
    return _asked(conversation.answer, conversation.answer_param)


def of_messages(**fields: Any) -> Asked | None:
    body = {"model": "m", "messages": MESSAGES, "max_tokens": 9, **fields}
    conversation = messages_conversation(check(body, MessagesRequest, RULES))
    return _asked(conversation.answer, conversation.answer_param)


def _asked(spec: GrammarSpec | None, param: str) -> Asked | None:
    return None if spec is None else Asked(spec=spec, field=param.split(".")[0], param=param)


apis = pytest.mark.parametrize("api", [of_chat, of_completion, of_responses, of_messages])


@apis
@pytest.mark.parametrize(("given", "kind"), FORMS)
def test_every_form_on_every_api(api: Any, given: dict[str, Any], kind: str) -> None:
    found = api(structured_outputs=given)
    assert found.spec.kind == kind
    assert found.param == f"structured_outputs.{next(iter(given))}"
    assert api() is None and api(structured_outputs=None) is None


@apis
@pytest.mark.parametrize(("given", "param"), BAD)
def test_bad_forms_on_every_api(api: Any, given: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        api(structured_outputs=given)
    assert caught.value.param == f"structured_outputs.{param}".rstrip(".")


@pytest.mark.parametrize(
    ("api", "name", "value"),
    [
        (of_chat, "response_format", {"type": "json_object"}),
        (of_completion, "response_format", {"type": "json_schema", "json_schema": NAMED}),
        (of_responses, "text", {"format": {"type": "json_object"}}),
        (of_messages, "output_format", {"type": "json_schema", "schema": {}}),
        (of_messages, "output_config", {"format": {"type": "json_schema", "schema": {}}}),
    ],
)
def test_two_fields_are_refused_by_both_names(api: Any, name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"structured_outputs.*{name}") as caught:
        api(structured_outputs={"regex": "a"}, **{name: value})
    assert caught.value.param == "structured_outputs"
    assert caught.value.reason == "mutually_exclusive_parameters"


def test_text_formats_stand_beside_anything() -> None:
    given = {"regex": "a"}
    assert of_chat(structured_outputs=given, response_format={"type": "text"})
    assert of_responses(structured_outputs=given, text={"format": {"type": "text"}})


def test_long_grammars_are_refused_by_their_field() -> None:
    with pytest.raises(InvalidRequest, match="262144") as caught:
        of_chat(structured_outputs={"regex": "a" * 300_000})
    assert caught.value.param == "structured_outputs.regex"


@pytest.mark.parametrize("name", ["json", "regex", "choice", "grammar"])
def test_older_names_are_told_the_newer(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"use structured_outputs.{name}") as caught:
        of_chat(**{f"guided_{name}": "a"})
    assert caught.value.param == f"guided_{name}"


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, "json_object"),
        ({"type": "json_schema", "json_schema": NAMED}, "json_schema"),
        (TAG, "structural_tag"),
    ],
)
def test_response_formats(given: Any, kind: str | None) -> None:
    found = of_chat(response_format=given)
    assert (found.spec.kind if found else None) == kind


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"type": "xml"}, "type"),
        ({"type": "json_schema"}, "json_schema"),
        ({"type": "json_schema", "json_schema": {"schema": {}}}, "json_schema.name"),
        ({"type": "json_schema", "json_schema": {"name": "a b"}}, "json_schema.name"),
        ({"type": "json_schema", "json_schema": {"name": "n"}}, "json_schema.schema"),
        ({"type": "json_schema", "json_schema": {**NAMED, "schema": 5}}, "json_schema.schema"),
        ({"type": "json_schema", "json_schema": {**NAMED, "schemas": {}}}, "json_schema.schemas"),
        ({"type": "json_schema", "json_schema": {**NAMED, "strict": 1}}, "json_schema.strict"),
        ({"type": "json_object", "schema": {}}, "schema"),
        ({"type": "text", "schema": {}}, "schema"),
        ({**TAG, "triggers": 1}, "triggers"),
    ],
)
def test_bad_response_formats(given: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        of_chat(response_format=given)
    assert caught.value.param == f"response_format.{param}"


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"type": "xml"}, "text.format.type"),
        ({"type": "json_schema", "name": "n"}, "text.format.schema"),
        ({"type": "json_schema", "schema": {}}, "text.format.name"),
        ({"type": "json_schema", "json_schema": NAMED}, "text.format.json_schema"),
        ({"type": "json_object", "schema": {}}, "text.format.schema"),
    ],
)
def test_bad_text_formats(given: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        from_text_format(given)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("given", "default", "wanted"),
    [
        ({"json": {}}, "strict", "strict"),
        ({"json": {}}, "lenient", "lenient"),
        ({"json": {}, "strictness": "lenient"}, "strict", "lenient"),
        ({"structural_tag": TAG, "strictness": "strict"}, "lenient", "strict"),
        ({"regex": "a", "strictness": "lenient"}, "lenient", "strict"),
        ({"json_object": True}, "lenient", "strict"),
    ],
)
def test_strictness(given: dict[str, Any], default: str, wanted: str) -> None:
    found = of_chat(structured_outputs=given)
    assert found is not None
    assert with_strictness(found.spec, default).strictness == wanted


def test_the_settings_decide_where_nobody_does() -> None:
    body = {"model": "m", "messages": MESSAGES, "structured_outputs": {"json": {}}}
    conversation = conversation_of(check(body, ChatRequest))
    for strictness in ("strict", "lenient"):
        chosen = {"grammar_strictness": strictness, "model_name": "m"}
        found = load_model(config.load(None, {}, chosen)[0]).grammar(conversation)
        assert found is not None
        assert found.strictness == strictness


@pytest.mark.parametrize(("strict", "wanted"), [(True, "strict"), (False, "lenient"), (None, "")])
def test_strict_of_a_format(strict: bool | None, wanted: str) -> None:
    chat = of_chat(
        response_format={"type": "json_schema", "json_schema": {**NAMED, "strict": strict}}
    )
    text = of_responses(text={"format": {"type": "json_schema", **NAMED, "strict": strict}})
    assert chat is not None and text is not None
    assert chat.spec.strictness == text.spec.strictness == wanted


def test_islands_of_two_kinds_exclude_each_other() -> None:
    body = {"model": "m", "messages": MESSAGES, "tools": [TOOL],
            "structured_outputs": {"structural_tag": TAG}}  # fmt: skip
    with pytest.raises(InvalidRequest, match="'tools'") as caught:
        check_together(conversation_of(check(body, ChatRequest)))
    assert caught.value.param == "structured_outputs.structural_tag"
    check_together(conversation_of(check({**body, "tool_choice": "none"}, ChatRequest)))
    other = {**body, "structured_outputs": {"regex": "a"}}
    check_together(conversation_of(check(other, ChatRequest)))


def test_who_is_to_blame() -> None:
    body = {"model": "m", "messages": MESSAGES, "tools": [TOOL]}
    one = conversation_of(check(body, ChatRequest))
    assert blame(one) == "tools.0.function.parameters"
    other = {"type": "custom", "custom": {"name": "g"}}
    two = conversation_of(check({**body, "tools": [TOOL, other]}, ChatRequest))
    assert blame(two) == "tools"
    formatted = {**body, "response_format": {"type": "json_object"}}
    assert blame(conversation_of(check(formatted, ChatRequest))) == "response_format"


def test_verdicts() -> None:
    plain, parts = GrammarSpec(kind="regex"), GrammarSpec(kind="structural")
    said = InvalidRequest("no", param="tools.1.function.parameters", reason="x")
    assert refusal(said, plain, "structured_outputs.regex").param == "structured_outputs.regex"
    assert refusal(said, parts, "tools").param == "tools.1.function.parameters"
    unknown = InvalidRequest("no", param="tools")
    assert refusal(unknown, parts, "response_format").param == "response_format"
    mismatch = InvalidRequest("no", reason="vocabulary_mismatch")
    assert isinstance(refusal(mismatch, plain, "x"), Unavailable)


def test_a_header_of_what_is_not_enforced() -> None:
    assert widened_header(["#/a/not", "#/a/not", "#/b/uniqueItems"]) == "#/a/not, #/b/uniqueItems"
    assert widened_header(["#/é,\n/format"]) == "#/%C3%A9%2C%0A/format"
    many = widened_header([f"#/properties/p{index}/format" for index in range(500)])
    assert len(many) <= MAX_WIDENED_CHARS + 10
    shown, left = many.rsplit(", +", 1)
    assert len(shown.split(", ")) + int(left) == 500
    assert widened_header(["x" * 2000, "y"]) == "x" * MAX_WIDENED_CHARS + ", +2"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(WORDS) | st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=2), VALUES)
def test_anything_is_a_grammar_or_a_refusal_by_its_field(given: Any, other: Any) -> None:
    for fields in ({"structured_outputs": given}, {"response_format": other}):
        try:
            found = of_chat(**fields)
        except InvalidRequest as error:
            assert (error.param or "").split(".")[0] in fields
            continue
        assert found is None or found.spec.kind
