"""Items, tools and choices: what is sent becomes turns, and what is wrong is named."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finback.services.gateway.query_values import typed
from finback.services.gateway.responses_items import items_of
from finback.services.gateway.responses_sealed import Seals
from finback.services.gateway.responses_tools import tool_choice_of, tools_of
from finback.services.gateway.responses_turns import turns_of
from finback.shared.codec.dialogue import Turn
from finback.shared.errors import InvalidRequest, ServingError

FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}


def _turns(given: Any, instructions: str | None = None) -> list[Turn]:
    return turns_of(items_of(given), instructions=instructions, unseal=lambda text: f"un{text}")


def _call(call_id: str, **more: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "f", "arguments": "{}", **more}


def _result(call_id: str, output: Any = "done") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def test_a_text_is_a_users_message() -> None:
    (item,) = items_of("hello")
    assert item["content"] == [{"type": "input_text", "text": "hello"}]
    assert _turns("hello", "be brief") == [
        Turn(role="system", content="be brief"),
        Turn(role="user", content="hello"),
    ]


def test_thoughts_message_and_calls_are_one_turn() -> None:
    turns = _turns(
        [
            {"role": "developer", "content": "rules"},
            {"role": "user", "content": [{"type": "input_text", "text": "go"}]},
            {
                "type": "reasoning",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "hm"}],
            },
            {"role": "assistant", "content": [{"type": "output_text", "text": "so"}]},
            _call("c1"),
            {"type": "custom_tool_call", "call_id": "c2", "name": "sql", "input": "select 1"},
            _result("c1", [{"type": "input_text", "text": "1"}]),
            {"type": "custom_tool_call_output", "call_id": "c2", "output": "2"},
            {"role": "user", "content": "and?"},
        ]
    )
    assert [turn.role for turn in turns] == [
        "system", "user", "assistant", "tool", "tool", "user",
    ]  # fmt: skip
    said = turns[2]
    assert (said.reasoning, said.content) == ("hm", "so")
    assert [(call.name, call.kind, call.arguments) for call in said.tool_calls] == [
        ("f", "function", "{}"),
        ("sql", "custom", "select 1"),
    ]
    assert [(turn.name, turn.content) for turn in turns[3:5]] == [("f", "1"), ("sql", "2")]


def test_sealed_thoughts_are_opened_only_where_there_is_no_text() -> None:
    sealed = {"type": "reasoning", "summary": [], "encrypted_content": "x"}
    plain = {**sealed, "content": [{"type": "reasoning_text", "text": "hm"}]}
    after = {"role": "assistant", "content": "a"}
    assert _turns([sealed, after])[0].reasoning == "unx"
    assert _turns([plain, after])[0].reasoning == "hm"


def test_items_of_the_server_come_back_unchanged() -> None:
    given = [
        _call("c1", id="fc_1", status="completed", parsed_arguments={"a": 1}, namespace=None),
        _result("c1"),
        {
            "id": "msg_1", "type": "message", "role": "assistant", "status": "completed",
            "phase": "final_answer",
            "content": [{"type": "output_text", "text": "", "annotations": [], "logprobs": [], "parsed": None}],
        },
        {"id": "msg_2", "type": "message", "role": "assistant", "content": []},
    ]  # fmt: skip
    once = items_of(given)
    assert items_of(json.loads(json.dumps(once))) == once
    assert once[0]["id"] == "fc_1"


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ([{"role": "robot", "content": "x"}], "input.0.role"),
        ([{"role": "user", "content": 5}], "input.0.content"),
        ([{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}], "input.0.content.0.type"),
        ([{"role": "user", "content": [{"type": "input_file"}]}], "input.0.content.0.type"),
        ([{"role": "user", "content": [{"type": ["x"]}]}], "input.0.content.0.type"),
        ([{"role": "user", "content": [{"type": "input_text", "text": None}]}], "input.0.content.0.text"),
        ([{"type": "web_search_call", "id": "ws"}], "input.0.type"),
        ([{"type": ["message"]}], "input.0.type"),
        ([{"type": "function_call", "call_id": "c", "name": "f"}], "input.0.arguments"),
        ([{"type": "function_call_output", "output": "x"}], "input.0.call_id"),
        ([{"type": "message", "role": "user", "content": "x", "id": "a b"}], "input.0.id"),
        ([{"type": "reasoning", "summary": [{"type": "x"}]}], "input.0.summary.0.type"),
        ([7], "input.0"),
        ([{"role": "user", "content": "x", "more": 1}], "input.0.more"),
        ([{"role": "user", "content": [{"type": "input_text", "text": "x", "parsed": 1}]}], "input.0.content.0.parsed"),
        ([{"role": "assistant", "content": [{"type": "refusal", "refusal": "x", "text": "y"}]}], "input.0.content.0.text"),
        ([_call("c", namespace="other")], "input.0.namespace"),
        ([_result("c", [{"type": "input_text", "text": "x", "more": 1}])], "input.0.output.0.more"),
        ([{"type": "reasoning", "summary": [], "text": "x"}], "input.0.text"),
        ([{"type": "reasoning", "summary": [{"type": "summary_text", "text": "x", "more": 1}]}], "input.0.summary.0.more"),
        ([{"type": "item_reference", "id": "x", "role": "user"}], "input.0.role"),
        ([{}], "input.0.id"),
    ],
)  # fmt: skip
def test_wrong_items_are_named(given: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        items_of(given)
    assert caught.value.param == param


def test_what_sdks_add_to_items_is_accepted() -> None:
    text = {"type": "output_text", "text": "a", "annotations": [], "logprobs": [], "parsed": {}}
    hinted = {"type": "input_text", "text": "x", "prompt_cache_breakpoint": {"mode": "explicit"}}
    items = items_of(
        [
            {"role": "user", "content": [hinted, {**hinted, "cache_control": {}}], "more": None},
            {"role": "user", "content": [text]},
            {"role": "assistant", "id": "m", "phase": "final_answer", "content": [text]},
            _call(
                "c", parsed_arguments={}, caller={"type": "direct"}, namespace=None, async_=False
            ),
            {**_result("c"), "name": "f", "created_by": "x", "id": "o", "status": "completed"},
            {"type": "reasoning", "id": "r", "summary": [], "content": None, "status": None},
        ]
    )
    assert len(items) == 6


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({**FUNCTION, "more": 1}, "tools.0.more"),
        ({**FUNCTION, "format": {"type": "text"}}, "tools.0.format"),
        ({**FUNCTION, "defer_loading": True}, "tools.0.defer_loading"),
        ({"type": "custom", "name": "n", "parameters": {}}, "tools.0.parameters"),
        ({"type": "custom", "name": "n", "format": {"type": "text", "syntax": "lark"}}, "tools.0.format.syntax"),
    ],
)  # fmt: skip
def test_unknown_fields_of_tools_are_named(tool: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        tools_of([tool])
    assert (caught.value.param, caught.value.reason) == (param, "unknown_parameter")
    assert tools_of([{**FUNCTION, "defer_loading": False, "allowed_callers": None}])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([_result("c9")], "No tool call found for function call output with call_id c9"),
        ([_call("c1")], "No tool output found for function call c1"),
        ([_call("c1"), {"role": "user", "content": "x"}], "No tool output found"),
        ([], "nothing to answer"),
    ],
)
def test_calls_and_outputs_belong_together(given: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        _turns(given)


@pytest.mark.parametrize(
    "kind", ["web_search", "file_search", "computer", "mcp", "namespace", None]
)
def test_tools_of_the_server_are_refused_by_name(kind: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        tools_of([FUNCTION, {"type": kind}])
    assert caught.value.param == "tools.1.type"


def test_strictness() -> None:
    closed = {
        "type": "object", "properties": {"x": {}}, "required": ["x"], "additionalProperties": False,
    }  # fmt: skip
    given = [
        {**FUNCTION, "name": "open"},
        {**FUNCTION, "name": "closed", "parameters": closed},
        {**FUNCTION, "name": "loose", "parameters": closed, "strict": False},
        {**FUNCTION, "name": "told", "strict": True},
    ]
    assert [tool.strict for tool in tools_of(given)] == [False, True, False, True]


def test_custom_tools_have_grammars() -> None:
    grammar = {"type": "grammar", "syntax": "regex", "definition": "[0-9]+"}
    (tool,) = tools_of([{"type": "custom", "name": "n", "format": grammar}])
    assert tool.kind == "custom" and tool.grammar is not None
    assert (tool.grammar.kind, tool.grammar.text) == ("regex", "[0-9]+")


def test_tool_choices() -> None:
    tools = tools_of([FUNCTION, {**FUNCTION, "name": "g"}, {"type": "custom", "name": "c"}])

    def choice(given: Any) -> tuple[str, tuple[str, ...]]:
        made = tool_choice_of(given, tools, is_parallel=True)
        return made.mode, made.names

    allowed = [{"type": "function", "name": "g"}, {"type": "custom", "name": "c"}]
    assert choice(None) == choice("auto") == ("auto", ())
    assert choice("none") == ("none", ())
    assert choice("required") == ("required", ())
    assert choice({"type": "function", "name": "f"}) == ("required", ("f",))
    assert choice({"type": "custom", "name": "c"}) == ("required", ("c",))
    assert choice({"type": "allowed_tools", "mode": "auto", "tools": allowed}) == (
        "auto",
        ("g", "c"),
    )
    for wrong, param in (
        ("sometimes", "tool_choice"),
        ({"type": "function", "name": "c"}, "tool_choice.name"),
        ({"type": "function", "name": "f", "function": {}}, "tool_choice.function"),
        ({"type": "allowed_tools", "mode": "auto", "names": []}, "tool_choice.names"),
        ({"type": "web_search_preview"}, "tool_choice.type"),
        ({"type": "allowed_tools", "mode": "x", "tools": allowed}, "tool_choice.mode"),
        ({"type": "allowed_tools", "mode": "auto", "tools": []}, "tool_choice.tools"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            tool_choice_of(wrong, tools, is_parallel=True)
        assert caught.value.param == param
    with pytest.raises(InvalidRequest):
        tool_choice_of("required", (), is_parallel=True)


def test_sealed_thoughts_are_for_one_tenant_and_one_cluster() -> None:
    seals = Seals(b"k" * 32)
    for text in ("", "a thought of some length", "思考" * 1000):
        sealed = seals.seal(text, "a")
        assert Seals(b"k" * 32).unseal(sealed, "a") == text
        assert text == "" or text not in sealed
        for reader, tenant in ((seals, "b"), (Seals(b"j" * 32), "a"), (Seals(b""), "a")):
            with pytest.raises(InvalidRequest):
                reader.unseal(sealed, tenant)
    with pytest.raises(InvalidRequest):
        seals.unseal(sealed[:-8] + "AAAAAAA=", "a")


def test_equal_thoughts_are_sealed_differently() -> None:
    seals = Seals(b"k" * 32)
    assert seals.seal("hm", "a") != seals.seal("hm", "a")


def test_query_values() -> None:
    fields = {"stream": "TRUE", "after": "5", "limit": "-3", "x": "--3", "include": "a"}
    found = typed(fields, booleans=("stream", "y"), numbers=("limit", "x"), lists=("include",))
    assert found == {"stream": True, "after": "5", "limit": -3, "x": "--3", "include": ["a"]}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)
_KINDS = [
    "message", "function_call", "function_call_output", "custom_tool_call",
    "custom_tool_call_output", "reasoning", "item_reference", "input_text",
]  # fmt: skip
shaped = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(_KINDS) | json_values,
        "role": st.sampled_from(["user", "assistant", "system"]) | json_values,
        "content": st.lists(
            st.fixed_dictionaries(
                {
                    "type": st.sampled_from(
                        ["input_text", "output_text", "reasoning_text", "refusal"]
                    )
                },
                optional={"text": st.text(max_size=4) | json_values, "refusal": st.text()},
            )
            | json_values,
            max_size=3,
        )
        | json_values,
        "call_id": st.sampled_from(["c1", "c2"]) | json_values,
        "name": st.text(max_size=4) | json_values,
        "arguments": st.text(max_size=4) | json_values,
        "input": st.text(max_size=4) | json_values,
        "output": st.text(max_size=4) | json_values,
        "summary": json_values,
        "status": json_values,
        "id": st.text(max_size=6) | json_values,
        "encrypted_content": json_values,
    },
)


@settings(max_examples=60, deadline=None)
@given(st.lists(shaped | json_values, max_size=6))
def test_any_items_are_turns_or_a_named_error(given: list[Any]) -> None:
    try:
        made = items_of(given)
    except ServingError as error:
        assert error.param is not None and error.param.startswith("input")
        return
    assert items_of(json.loads(json.dumps(made))) == made
    if any(item["type"] == "item_reference" for item in made):
        return
    try:
        turns_of(made, instructions=None, unseal=lambda text: text)
    except InvalidRequest as error:
        assert error.param == "input"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(json_values | st.builds(lambda x: {**FUNCTION, "parameters": x}, json_values)),
    json_values,
)
def test_any_tools_are_tools_or_a_named_error(given: list[Any], choice: Any) -> None:
    try:
        tools = tools_of(given)
        tool_choice_of(choice, tools, is_parallel=False)
    except InvalidRequest as error:
        assert error.param is not None and error.param.startswith("tool")
