"""Any body gets an answer or a named 4xx, soon: never a 500, never a hang."""

import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.gateway_stack import GatewayStack
from support.response_events import check_stream

MODEL = "thinker"
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 2**60)
    | st.floats(allow_nan=False)
    | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)
names = st.sampled_from(["add", "note", ""]) | st.text(max_size=4)
items = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(
            ["message", "function_call", "function_call_output", "reasoning", "item_reference"]
        )
        | values,
        "role": st.sampled_from(["user", "assistant", "developer"]) | values,
        "content": st.text(max_size=5) | values,
        "call_id": st.just("c1") | values,
        "name": names | values,
        "arguments": st.just("{}") | values,
        "output": st.text(max_size=5) | values,
        "encrypted_content": st.text(max_size=5) | values,
        "id": st.just("msg_1") | values,
    },
)
tools = st.fixed_dictionaries(
    {"type": st.sampled_from(["function", "custom", "web_search"]) | values},
    optional={
        "name": names | values,
        "parameters": st.sampled_from([{"type": "object"}, {"type": "x"}, {}, {"$ref": "#"}])
        | values,
        "strict": st.booleans() | values,
        "format": st.sampled_from([{"type": "text"}, {"type": "grammar", "syntax": "lark"}])
        | values,
    },
)
formats = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "json_object", "json_schema"]) | values},
    optional={"name": names | values, "schema": values, "strict": values},
)
wild: dict[str, st.SearchStrategy[Any]] = {
    "input": st.text(max_size=9) | st.lists(items | values, max_size=4) | values,
    "instructions": st.text(max_size=5) | values,
    "tools": st.lists(tools | values, max_size=3) | values,
    "tool_choice": st.sampled_from(
        ["auto", "none", "required", {"type": "function", "name": "add"}]
    )
    | values,
    "text": st.fixed_dictionaries({"format": formats | values}) | values,
    "reasoning": st.fixed_dictionaries({"effort": st.sampled_from(["low", "none"]) | values})
    | values,
    "stream": st.booleans() | values,
    "store": st.booleans() | values,
    "background": st.booleans() | values,
    "conversation": st.text(max_size=5) | st.fixed_dictionaries({"id": values}) | values,
    "previous_response_id": st.text(max_size=5) | values,
    "metadata": values,
    "include": values,
    "temperature": values,
    "top_p": values,
    "top_logprobs": values,
    "truncation": st.sampled_from(["auto", "disabled"]) | values,
    "chat_template_kwargs": values,
    "user": values,
    "seed": values,
}
tame = st.fixed_dictionaries(
    {
        "model": st.just(MODEL),
        "max_output_tokens": st.integers(1, 9),
        "input": st.text(max_size=9) | st.just([{"role": "user", "content": "hi"}]),
    },
    optional={
        "instructions": st.text(max_size=5),
        "tools": st.just([{"type": "function", "name": "add"}, {"type": "custom", "name": "note"}]),
        "stream": st.booleans(),
        "background": st.just(True),
        "include": st.just(["message.output_text.logprobs"]),
        "metadata": st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=3),
        "temperature": st.floats(0, 2),
        "truncation": st.just("auto"),
    },
)


@st.composite
def bodies(draw: st.DrawFn) -> dict[str, Any]:
    """A good body of which up to three fields are anything."""
    body = draw(tame)
    for name in draw(st.lists(st.sampled_from(sorted(wild)), max_size=3)):
        body[name] = draw(wild[name])
    return body


PATHS = (
    ("POST", "/v1/responses/input_tokens"),
    ("POST", "/v1/conversations"),
    ("POST", "/v1/conversations/conv_x"),
    ("POST", "/v1/conversations/conv_x/items"),
    ("POST", "/v1/responses/resp_x/cancel"),
)
SLOW = settings(
    max_examples=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@pytest.fixture(scope="module")
def http(thinking_stack: GatewayStack) -> Any:
    with httpx.Client(base_url=thinking_stack.url, timeout=20) as client:
        yield client


def _check_error(reply: httpx.Response) -> None:
    assert 400 <= reply.status_code < 500, reply.text
    error = reply.json()["error"]
    assert error["message"] and error["type"] and "param" in error


@SLOW
@given(bodies())
def test_any_create(http: httpx.Client, body: dict[str, Any]) -> None:
    reply = http.post("/v1/responses", content=json.dumps(body).encode())
    if reply.status_code != 200:
        return _check_error(reply)
    if reply.headers["content-type"] == "application/json":
        made = reply.json()
        assert made["object"] == "response" and made["status"] in (
            "completed", "incomplete", "queued",
        )  # fmt: skip
        return None
    events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: ")]
    check_stream(events)


@SLOW
@given(st.sampled_from(PATHS), st.dictionaries(st.sampled_from(["input", "items", "metadata", "model", "x"]), values | st.lists(items)))  # fmt: skip
def test_any_other_body(http: httpx.Client, path: tuple[str, str], body: dict[str, Any]) -> None:
    reply = http.request(*path, content=json.dumps(body).encode())
    if reply.status_code != 200:
        _check_error(reply)


@SLOW
@given(st.sampled_from(["resp_x", "resp_x/input_items", "%00", "a b", "é" * 200]), st.dictionaries(st.sampled_from(["stream", "starting_after", "limit", "order", "after", "include", "include[]"]), st.text(max_size=4)))  # fmt: skip
def test_any_query(http: httpx.Client, name: str, query: dict[str, str]) -> None:
    _check_error(http.get(f"/v1/responses/{name}", params=query))
    _check_error(http.get(f"/v1/conversations/{name.replace('input_', '')}", params=query))


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{", b'{"model": NaN}', b'{"input": "\\ud800"}', b"\xff"]
)
def test_what_is_no_object(http: httpx.Client, body: bytes) -> None:
    for path in ("/v1/responses", "/v1/conversations", "/v1/responses/input_tokens"):
        if body or path != "/v1/conversations":
            _check_error(http.post(path, content=body))
