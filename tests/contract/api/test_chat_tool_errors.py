"""Bad tools, choices and messages: a 400 that names the path."""

from typing import Any

import httpx
import pytest

from support.gateway_stack import GatewayStack
from support.said import ADD, NOTE, PARAMETERS, user

MODEL = "thinker"
CALLED = {
    "role": "assistant",
    "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    ],
}


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


def result(call_id: str | None = "c1", content: Any = "x") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [ADD, function(parameters=5)]}, "tools.1.function.parameters"),
        ({"tools": [function(parameters={"type": "array"})]}, "tools.0.function.parameters"),
        ({"tools": [function(parameters={"properties": {"x": {"type": "nonsense"}}})]},
         "tools.0.function.parameters"),
        ({"tools": [function(parameters={"required": "x"})]}, "tools.0.function.parameters"),
        ({"tools": [function(name="has space")]}, "tools.0.function.name"),
        ({"tools": [function(name="x" * 65)]}, "tools.0.function.name"),
        ({"tools": [function(name="")]}, "tools.0.function.name"),
        ({"tools": [function(name="naïve")]}, "tools.0.function.name"),
        ({"tools": [ADD, ADD]}, "tools.1.function.name"),
        ({"tools": [ADD] * 129}, "tools"),
        ({"tools": [function(strict="yes")]}, "tools.0.function.strict"),
        ({"tools": [function(more=1)]}, "tools.0.function.more"),
        ({"tools": [{"type": "custom"}]}, "tools.0.custom"),
        ({"tools": [{"type": "custom", "custom": {"name": "n", "format": {"type": "grammar"}}}]},
         "tools.0.custom.format.grammar"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "function", "function": {"name": "none"}}},
         "tool_choice.function.name"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "add"}}},
         "tool_choice.custom.name"),
        ({"tool_choice": "required", "tools": None}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "all"}}},
         "tool_choice.allowed_tools.mode"),
        ({"tool_choice": {"type": "allowed_tools",
                          "allowed_tools": {"mode": "auto", "tools": []}}},
         "tool_choice.allowed_tools.tools"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {
            "mode": "auto", "tools": [{"type": "function", "function": {"name": "no"}}]}}},
         "tool_choice.allowed_tools.tools.0.function.name"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
        ({"audio": {"voice": "v", "format": "wav"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"metadata": {"k": 5}}, "metadata.k"),
        ({"metadata": {str(at): "" for at in range(17)}}, "metadata"),
        ({"messages": [result()]}, "messages.0.tool_call_id"),
        ({"messages": [*user("x"), CALLED, result("c2")]}, "messages.2.tool_call_id"),
        ({"messages": [*user("x"), CALLED, result(None)]}, "messages.2.tool_call_id"),
        ({"messages": [*user("x"), CALLED, result(), result()]}, "messages.3.tool_call_id"),
        ({"messages": [*user("x"), CALLED, result(content=None)]}, "messages.2.content"),
        ({"messages": [*user("x"), CALLED, *user("y")]}, "messages.2"),
        ({"messages": [*user("x"), CALLED]}, "messages.2"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages.0.content"),
        ({"messages": [{"role": "function", "name": "f", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url":
            {"url": "data:image/png;base64,AA=="}}]}]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
         "messages.0.content.0.type"),
        ({"messages": [{"role": "user", "content": [{"type": "refusal", "refusal": "no"}]}]},
         "messages.0.content.0.type"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "more": 1}]}]},
         "messages.0.content.0.more"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x",
            "refusal": "y"}]}]}, "messages.0.content.0.refusal"),
        ({"tool_choice": {"type": "function", "function": {"name": "add"}, "more": 1}},
         "tool_choice.more"),
        ({"tool_choice": {"type": "function", "function": {"name": "add", "more": 1}}},
         "tool_choice.function.more"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "more": 1}}},
         "tool_choice.allowed_tools.more"),
        ({"tool_choice": ""}, "tool_choice"),
        ({"tool_choice": "required", "min_tokens": 5, "max_tokens": 20}, "min_tokens"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
    ],
)  # fmt: skip
def test_faults_name_the_path(
    thinking_stack: GatewayStack, fields: dict[str, Any], param: str
) -> None:
    body = {"model": MODEL, "messages": user("x"), "tools": [ADD, NOTE], **fields}
    reply = httpx.post(f"{thinking_stack.url}/v1/chat/completions", json=body, timeout=20)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "none"},
        {"tool_choice": "auto", "parallel_tool_calls": False},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "add"}}},
        {"tool_choice": {"type": "custom", "custom": {"name": "note"}}},
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {
            "mode": "required", "tools": [{"type": "function", "function": {"name": "add"}}]}}},
        {"tools": [function(parameters=PARAMETERS, strict=True)]},
        {"tools": [function(parameters={}), function(name="g", description="d")]},
        {"tools": [{"type": "custom", "custom": {"name": "n", "format": {
            "type": "grammar", "grammar": {"syntax": "regex", "definition": "[a-z]+"}}}}]},
        {"messages": [*user("x"), CALLED, result(content=[{"type": "text", "text": "y"}])]},
        {"messages": [{"role": "developer", "content": "d"}, *user("x")]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "y", "refusal": None,
            "cache_control": {"type": "ephemeral"},
            "prompt_cache_breakpoint": {"mode": "explicit"}}]}]},
        {"messages": [*user("x"), {"role": "assistant", "content": [
            {"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}]}, *user("y")]},
    ],
)  # fmt: skip
def test_accepted(thinking_stack: GatewayStack, fields: dict[str, Any]) -> None:
    body = {"model": MODEL, "messages": user("x"), "tools": [ADD, NOTE], **fields}
    reply = httpx.post(f"{thinking_stack.url}/v1/chat/completions", json=body, timeout=20)
    assert reply.status_code == 200, reply.text


def test_a_grammar_that_is_none_blames_its_tool(thinking_stack: GatewayStack) -> None:
    grammar = {"syntax": "regex", "definition": "[a-"}
    tool = {"type": "custom", "custom": {"name": "n", "format": {"type": "grammar",
                                                                "grammar": grammar}}}  # fmt: skip
    body = {"model": MODEL, "messages": user("x"), "tools": [tool], "tool_choice": "required"}
    reply = httpx.post(f"{thinking_stack.url}/v1/chat/completions", json=body, timeout=20)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"].startswith("tools")
