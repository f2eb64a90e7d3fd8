"""Errors of the Messages API: their status, Anthropic's envelope, the path of what is wrong."""

from typing import Any

import anthropic
import httpx
import pytest

from support.gateway_stack import GatewayStack
from support.said import CLAUDE_ADD, user

MODEL = "thinker"
CALL = {"type": "tool_use", "id": "c1", "name": "add", "input": {}}
CALLED = {"role": "assistant", "content": [CALL]}


def post(stack: GatewayStack, body: Any, path: str = "/v1/messages") -> httpx.Response:
    return httpx.post(stack.url + path, json=body, timeout=20)


def result(call_id: Any = "c1", **fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call_id, **fields}]}


def blocks(*items: Any, role: str = "user") -> list[dict[str, Any]]:
    return [{"role": role, "content": list(items)}]


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "user", "content": ""}]}, "messages.0"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": blocks({"type": "text", "text": ""})}, "messages.0.content.0.text"),
        ({"messages": blocks({"type": "text"})}, "messages.0.content.0.text"),
        ({"messages": blocks({"text": "x"})}, "messages.0.content.0.type"),
        ({"messages": blocks({"type": "text", "text": "x", "more": 1})},
         "messages.0.content.0.more: Extra inputs are not permitted"),
        ({"messages": blocks(IMAGE)}, "images are not supported"),
        ({"messages": blocks({"type": "document", "source": {}})}, "documents are not supported"),
        ({"messages": blocks(CALL)}, "messages.0.content.0.type"),
        ({"messages": [*user("x"), *blocks({"type": "thinking"}, role="assistant")]},
         "messages.1.content.0.thinking"),
        ({"messages": [*user("x"), CALLED]}, "without `tool_result` blocks"),
        ({"messages": [*user("x"), CALLED, *user("y")]}, "without `tool_result` blocks"),
        ({"messages": [*user("x"), result()]}, "unexpected `tool_use_id`"),
        ({"messages": [*user("x"), CALLED, result("c2")]}, "unexpected `tool_use_id`"),
        ({"messages": [*user("x"), CALLED, *blocks(*(result()["content"] * 2))]},
         "messages.2.content.1.tool_use_id"),
        ({"messages": [*user("x"), CALLED, result(content=[IMAGE])]},
         "messages.2.content.0.content.0.type"),
        ({"messages": [*user("x"), CALLED, result(content=5)]}, "messages.2.content.0.content"),
        ({"messages": [*user("x"), {"role": "assistant", "content": "y "}]},
         "trailing whitespace"),
        ({"system": [{"type": "text", "text": ""}]}, "system.0.text"),
        ({"system": 5}, "system"),
        ({"tools": [{"name": "n"}]}, "tools.0.input_schema"),
        ({"tools": [{**CLAUDE_ADD, "name": "a b"}]}, "tools.0.name"),
        ({"tools": [CLAUDE_ADD, CLAUDE_ADD]}, "tools.1.name"),
        ({"tools": [{**CLAUDE_ADD, "input_schema": {"type": "array"}}]}, "tools.0.input_schema"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 1}]},
         "tools.0.type"),
        ({"tools": [{**CLAUDE_ADD, "more": 1}]}, "tools.0.more"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [CLAUDE_ADD], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [CLAUDE_ADD], "tool_choice": {"type": "tool", "name": "x"}},
         "tool_choice.name"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 10}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking.budget_tokens"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": 5}}}},
         "output_config.format.schema.type"),
        ({"stop_sequences": [" "]}, "stop_sequences.0"),
        ({"temperature": 1.5}, "temperature"),
        ({"no_such_field": 1}, "no_such_field: Extra inputs are not permitted"),
        ({"user": "me"}, "user: Extra inputs are not permitted"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
         "context_management"),
    ],
)  # fmt: skip
def test_bad_requests(thinking_stack: GatewayStack, fields: dict[str, Any], says: str) -> None:
    body = {"model": MODEL, "max_tokens": 99, "messages": user("x"), **fields}
    body = {name: value for name, value in body.items() if value is not None}
    for stream in (False, True):
        reply = post(thinking_stack, {**body, "stream": stream})
        assert reply.status_code == 400, reply.text
        error = reply.json()
        assert error["type"] == "error"
        assert error["error"]["type"] == "invalid_request_error"
        assert says in error["error"]["message"]
        assert error["request_id"] == reply.headers["request-id"]


def test_clients_know_the_errors(thinking_stack: GatewayStack, claude: anthropic.Anthropic) -> None:
    create: Any = claude.messages.create
    with pytest.raises(anthropic.NotFoundError) as missing:
        create(model="nope", max_tokens=9, messages=user("x"))
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]  # untyped
    with pytest.raises(anthropic.BadRequestError):
        create(model=MODEL, max_tokens=9, messages=user("word " * 9000))
    large = httpx.post(f"{thinking_stack.url}/v1/messages", content=b" " * (9 * 2**20), timeout=20)
    assert large.status_code == 413
    assert large.json()["error"]["type"] == "request_too_large"
    wrong = httpx.get(f"{thinking_stack.url}/v1/messages")
    assert (wrong.status_code, wrong.json()["type"]) == (405, "error")
    assert wrong.json()["request_id"] == wrong.headers["request-id"]
    unknown = httpx.get(f"{thinking_stack.url}/v1/messages/nothing")
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "not_found_error")
    count = post(thinking_stack, {"model": "nope", "messages": user("x")},
                 "/v1/messages/count_tokens")  # fmt: skip
    assert (count.status_code, count.json()["error"]["type"]) == (404, "not_found_error")


def test_accepted(claude: anthropic.Anthropic) -> None:
    create: Any = claude.messages.create
    create(
        model=MODEL,
        max_tokens=9,
        messages=[
            {"role": "user", "content": "a"},
            {"role": "user", "content": [{"type": "text", "text": "b"}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "t", "signature": "of another service"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "c", "citations": None}, CALL]},
            result(content=[{"type": "text", "text": "r"}], is_error=False,
                   cache_control={"type": "ephemeral"}),
            {"role": "system", "content": "Stay brief."},
            {"role": "user", "content": "d"},
        ],
        tools=[{**CLAUDE_ADD, "type": "custom", "cache_control": {"type": "ephemeral"},
                "strict": False, "input_examples": [{"a": 1, "b": 2}]}],
        metadata={"user_id": "u"},
        service_tier="auto",
        output_config={"effort": "low"},
        extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 5, "cache_control": None,
                    "context_management": {"edits": [
                        {"type": "clear_thinking_20251015", "keep": "all"}]}},
    )  # fmt: skip
