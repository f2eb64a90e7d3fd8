"""The Responses API with the official client, against a real gateway: text, tools, thoughts."""

import json
from typing import Any

import httpx
import openai
import pydantic
import pytest

from support.gateway_stack import GatewayStack
from support.response_events import check_stream
from support.said import PARAMETERS, call, thought

MODEL = "thinker"
ADD: dict[str, Any] = {"type": "function", "name": "add", "parameters": PARAMETERS}
NOTE: dict[str, Any] = {"type": "custom", "name": "note"}
BOTH = thought("two sums") + "Adding.\n" + call("add", a=1, b=2) + "\n" + call("add", a=3, b=4)


class Sum(pydantic.BaseModel):
    """Both numbers."""

    a: int
    b: int


def ask(client: openai.OpenAI, said: Any, **fields: Any) -> Any:
    create: Any = client.responses.create
    return create(**{"model": MODEL, "input": said, **fields})


def raw_events(stack: GatewayStack, **body: Any) -> list[dict[str, Any]]:
    """A stream as it is on the wire: every record names its event, and nothing follows the last."""
    sent = {"model": MODEL, "stream": True, **body}
    reply = httpx.post(f"{stack.url}/v1/responses", json=sent, timeout=30)
    assert reply.headers["content-type"].startswith("text/event-stream"), reply.text
    events = []
    for record in reply.text.split("\n\n")[:-1]:
        if record.startswith(":"):
            continue
        name, data = record.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def test_thoughts_text_and_parallel_calls(thinker: openai.OpenAI) -> None:
    made = ask(thinker, BOTH, tools=[ADD])
    assert [item.type for item in made.output] == [
        "reasoning", "message", "function_call", "function_call",
    ]  # fmt: skip
    assert made.status == "completed" and made.output_text == "Adding."
    assert made.output[0].content[0].text == "two sums"
    calls = made.output[2:]
    assert [json.loads(c.arguments) for c in calls] == [{"a": 1, "b": 2}, {"a": 3, "b": 4}]
    assert len({c.call_id for c in calls} | {c.id for c in calls}) == 4
    usage = made.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert 2 <= usage.output_tokens_details.reasoning_tokens < usage.output_tokens
    assert usage.input_tokens_details.cached_tokens == 0


@pytest.mark.parametrize(
    "text",
    [
        "hello",
        thought("hm") + "yes",
        BOTH,
        call("add", a=1, b=2),
        "",
        "<tool_call>\nnone",
        "Grüße 👍🏽",
    ],
)
@pytest.mark.parametrize("limit", [None, 7])
def test_streams_follow_the_rules_on_the_wire(
    thinking_stack: GatewayStack, thinker: openai.OpenAI, text: str, limit: int | None
) -> None:
    fields: dict[str, Any] = {"tools": [ADD], "max_output_tokens": limit, "seed": 5}
    final = check_stream(raw_events(thinking_stack, input=text, **fields))
    body = {**fields, "seed": None}
    whole = ask(thinker, text, extra_body={"seed": 5}, **{k: v for k, v in body.items() if v})
    plain = whole.model_dump(mode="json")
    assert [item["type"] for item in final["output"]] == [item["type"] for item in plain["output"]]
    assert final["status"] == plain["status"]
    assert final["usage"] == whole.usage.model_dump(mode="json", exclude_none=True)
    if limit is not None and final["status"] == "incomplete":
        assert final["incomplete_details"] == {"reason": "max_output_tokens"}
        assert final["usage"]["output_tokens"] == limit


def test_stream_helper(thinker: openai.OpenAI) -> None:
    stream: Any = thinker.responses.stream
    with stream(model=MODEL, input=BOTH, tools=[ADD]) as events:
        kinds = [event.type for event in events]
        final = events.get_final_response()
    assert final.output_text == "Adding."
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert kinds.count("response.function_call_arguments.done") == 2
    assert "response.reasoning_text.delta" in kinds


def test_parse_with_pydantic(thinker: openai.OpenAI) -> None:
    parse: Any = thinker.responses.parse
    assert parse(model=MODEL, input='{"a": 5, "b": 6}', text_format=Sum).output_parsed == Sum(
        a=5, b=6
    )
    made = parse(model=MODEL, input=BOTH, tools=[openai.pydantic_function_tool(Sum, name="add")])
    parsed = [item.parsed_arguments for item in made.output if item.type == "function_call"]
    assert parsed == [Sum(a=1, b=2), Sum(a=3, b=4)]
    stream: Any = thinker.responses.stream
    with stream(model=MODEL, input='{"a": 5, "b": 6}', text_format=Sum) as events:
        assert events.get_final_response().output_parsed == Sum(a=5, b=6)


async def test_async_client(thinking_stack: GatewayStack) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{thinking_stack.url}/v1", api_key="none", max_retries=0
    ) as client:
        create: Any = client.responses.create
        kinds = [event.type async for event in await create(model=MODEL, input="hi", stream=True)]
        assert kinds[-1] == "response.completed"
        stream: Any = client.responses.stream
        async with stream(model=MODEL, input=BOTH, tools=[ADD]) as events:
            final = await events.get_final_response()
        assert final.output_text == "Adding."
        assert (await client.responses.retrieve(final.id)).output_text == "Adding."


def test_a_whole_loop_by_items_and_by_id(thinker: openai.OpenAI) -> None:
    """What came back goes back, or is referred to; both make the same prompt."""
    first = ask(thinker, BOTH, tools=[ADD])
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": f"result {at}"}
        for at, item in enumerate(first.output[2:])
    ]
    by_id = ask(thinker, results, tools=[ADD], previous_response_id=first.id)
    assert by_id.previous_response_id == first.id
    items = [{"role": "user", "content": BOTH}, *(i.model_dump() for i in first.output), *results]
    by_items = ask(thinker, items, tools=[ADD])
    references = [{"type": "item_reference", "id": item.id} for item in first.output]
    by_reference = ask(thinker, [items[0], *references, *results], tools=[ADD])
    assert "result 1" in by_id.output_text
    assert by_id.usage == by_items.usage == by_reference.usage
    with pytest.raises(openai.BadRequestError, match="No tool output found"):
        ask(thinker, results[:1], tools=[ADD], previous_response_id=first.id)


def test_custom_tools(thinker: openai.OpenAI, thinking_stack: GatewayStack) -> None:
    said = '<tool_call>\n{"name": "note", "arguments": {"input": "a\\nb"}}\n</tool_call>'
    made = ask(thinker, said, tools=[NOTE])
    (item,) = made.output
    assert (item.type, item.name, item.input) == ("custom_tool_call", "note", "a\nb")
    result = {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "kept"}
    again = ask(thinker, [result], tools=[NOTE], previous_response_id=made.id)
    assert "kept" in again.output_text
    events = raw_events(thinking_stack, input=said, tools=[NOTE])
    check_stream(events)
    assert "response.custom_tool_call_input.done" in [event["type"] for event in events]


@pytest.mark.parametrize(
    ("choice", "tools"),
    [
        ("auto", [ADD]),
        ("none", [ADD]),
        ("required", [ADD]),
        ({"type": "function", "name": "add"}, [ADD]),
        ({"type": "custom", "name": "note"}, [ADD, NOTE]),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]}, [ADD]),
    ],
)  # fmt: skip
def test_tool_choices_are_taken_and_echoed(thinker: openai.OpenAI, choice: Any, tools: Any) -> None:
    said = call("add", a=1, b=2)
    made = ask(thinker, said, tools=tools, tool_choice=choice, parallel_tool_calls=False)
    echoed = made.tool_choice if isinstance(choice, str) else made.tool_choice.model_dump()
    assert echoed == choice
    assert made.parallel_tool_calls is False
    assert made.tools[0].strict is True  # the schema is closed


def test_what_is_said_back(thinker: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "instructions": "be brief", "metadata": {"k": "v"}, "user": "me", "max_tool_calls": 3,
        "truncation": "auto", "prompt_cache_key": "pk", "safety_identifier": "si", "top_p": 0.5,
        "temperature": 0.3, "max_output_tokens": 50, "service_tier": "auto", "store": False,
    }  # fmt: skip
    made = ask(thinker, "x", text={"verbosity": "low"}, reasoning={"effort": "high"}, **fields)
    for name, value in fields.items():
        told = "default" if name == "service_tier" else value
        assert getattr(made, name) == told, name
    assert made.text.verbosity == "low" and made.reasoning.effort == "high"
    assert made.completed_at is not None and made.background is False


def test_logprobs(thinker: openai.OpenAI, thinking_stack: GatewayStack) -> None:
    said = thought("hm") + "Grüße 👍🏽."
    asked: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    made = ask(thinker, said, **asked)
    told = made.output[1].content[0].logprobs
    assert b"".join(bytes(entry.bytes) for entry in told).decode().strip() == made.output_text
    assert all(len(entry.top_logprobs) == 2 for entry in told)
    events = raw_events(thinking_stack, input=said, **asked)
    check_stream(events)
    deltas = [e for e in events if e["type"] == "response.output_text.delta"]
    streamed = [entry["token"] for e in deltas for entry in e["logprobs"]]
    assert streamed == [entry.token for entry in told]
    assert ask(thinker, said).output[1].content[0].logprobs == []


def test_sealed_thoughts_carry_a_stateless_conversation(thinker: openai.OpenAI) -> None:
    stateless: dict[str, Any] = {"store": False, "include": ["reasoning.encrypted_content"]}
    first = ask(thinker, thought("a secret") + "yes", **stateless)
    kept = [item.model_dump() for item in first.output]
    sealed = kept[0]["encrypted_content"]
    assert "secret" not in sealed
    kept[0].pop("content")
    items = [{"role": "user", "content": "q"}, *kept, {"role": "user", "content": "and?"}]
    assert ask(thinker, items, **stateless).output_text == "and?"
    kept[0]["encrypted_content"] = sealed[:-12] + sealed[-4:] * 3
    with pytest.raises(openai.BadRequestError, match="encrypted_content") as wrong:
        ask(thinker, items, **stateless)
    assert wrong.value.code == "invalid_encrypted_content"


def test_one_conversation_costs_the_same_through_both_apis(thinker: openai.OpenAI) -> None:
    chat: Any = thinker.chat.completions.create
    function = {k: v for k, v in ADD.items() if k != "type"}
    called = {"name": "add", "arguments": '{"a": 1, "b": 2}'}
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "sum"},
        {
            "role": "assistant", "content": "Adding.", "reasoning_content": "hm",
            "tool_calls": [{"id": "c1", "type": "function", "function": called}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    ]  # fmt: skip
    tools = [{"type": "function", "function": {**function, "strict": True}}]
    asked = chat(model=MODEL, messages=messages, tools=tools).usage
    items = [
        {"role": "user", "content": "sum"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": "Adding."},
        {"type": "function_call", "call_id": "c1", **called},
        {"type": "function_call_output", "call_id": "c1", "output": "3"},
    ]
    made = ask(thinker, items, instructions="be brief", tools=[ADD]).usage
    assert (made.input_tokens, made.output_tokens) == (asked.prompt_tokens, asked.completion_tokens)


def test_counting_equals_usage(thinker: openai.OpenAI) -> None:
    first = ask(thinker, "hello", instructions="be brief", tools=[ADD])
    assert first.usage is not None
    count: Any = thinker.responses.input_tokens.count
    found = count(model=MODEL, input="hello", instructions="be brief", tools=[ADD])
    assert (found.object, found.input_tokens) == ("response.input_tokens", first.usage.input_tokens)
    more = count(model=MODEL, input="more", previous_response_id=first.id)
    assert (
        more.input_tokens == ask(thinker, "more", previous_response_id=first.id).usage.input_tokens
    )


NO_SCHEMA = {"type": "object", "properties": {"x": {"type": "nonsense"}}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": NO_SCHEMA}}},
         "text.format.schema"),
        ({"tools": [{"type": "function", "name": "f", "parameters": NO_SCHEMA, "strict": True}],
          "tool_choice": "required"}, "tools.0.parameters"),
        ({"tools": [{"type": "custom", "name": "n", "format": {
            "type": "grammar", "syntax": "regex", "definition": "[a-"}}]},
             "tools.0.format.definition"),
        ({"tools": [{"type": "function", "name": "f", "more": 1}]}, "tools.0.more"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["responses", "responses/input_tokens"])
def test_counting_refuses_what_creating_refuses(
    thinking_stack: GatewayStack, fields: dict[str, Any], param: str, path: str
) -> None:
    body = {"model": MODEL, "input": "x", **fields}
    reply = httpx.post(f"{thinking_stack.url}/v1/{path}", json=body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param


def test_truncation_drops_the_oldest_turns(thinker: openai.OpenAI) -> None:
    long = [{"role": "user", "content": "word " * 900} for _ in range(20)]
    with pytest.raises(openai.BadRequestError) as refused:
        ask(thinker, [*long, {"role": "user", "content": "last"}])
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "input")
    made = ask(thinker, [*long, {"role": "user", "content": "last"}], truncation="auto")
    assert made.output_text == "last"
    limit = next(iter(thinker.models.list())).model_dump()["max_model_len"]
    assert limit - 2000 < made.usage.input_tokens < limit


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "medium", "high", "xhigh"])
def test_efforts(thinker: openai.OpenAI, effort: Any) -> None:
    made = ask(thinker, "hello", reasoning={"effort": effort, "summary": "auto"})
    assert made.output_text == "hello" and made.reasoning.summary == "auto"


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "unsupported_value"),
        ({"tools": [ADD, {"type": "mcp", "server_label": "x"}]}, "tools.1.type", "unsupported_value"),
        ({"tools": [ADD], "tool_choice": {"type": "file_search"}}, "tool_choice.type", "unsupported_value"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "name": "sub"}}, "tool_choice.name", "invalid_value"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]},
         "input.0.content.0.type", "unsupported_value"),
        ({"input": [{"type": "computer_call", "id": "x"}]}, "input.0.type", "unsupported_value"),
        ({"previous_response_id": "resp_none"}, "previous_response_id", "previous_response_not_found"),
        ({"previous_response_id": "resp_none", "conversation": "conv_x"}, "previous_response_id", "mutually_exclusive_parameters"),
        ({"input": [{"type": "item_reference", "id": "msg_none"}]}, "input.0.id", "item_not_found"),
        ({"background": True, "store": False}, "background", "invalid_value"),
        ({"temperature": 3}, "temperature", "invalid_value"),
        ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
        ({"top_logprobs": 21}, "top_logprobs", "invalid_value"),
        ({"include": ["everything"]}, "include.0", "invalid_value"),
        ({"metadata": {"k": "v" * 513}}, "metadata.k", "invalid_value"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "invalid_value"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "unknown_parameter"),
        ({"stop": ["x"]}, "stop", "unknown_parameter"),
        ({"truncation": "sometimes"}, "truncation", "invalid_value"),
        ({"model": None}, "model", "missing_required_parameter"),
        ({"input": None}, "input", "missing_required_parameter"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_stream", [False, True])
def test_wrong_fields_are_named(
    thinking_stack: GatewayStack, fields: dict[str, Any], param: str, code: str, is_stream: bool
) -> None:
    body = {"model": MODEL, "input": "x", "stream": is_stream, **fields}
    reply = httpx.post(f"{thinking_stack.url}/v1/responses", json=body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert (error["param"], error["code"]) == (param, code)


def test_an_unknown_model_is_not_found(thinker: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        ask(thinker, "x", model="other")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as schema:
        bad = {"type": "json_schema", "name": "n", "schema": {"type": "nonsense"}}
        ask(thinker, "x", text={"format": bad})
    assert schema.value.param == "text.format.schema"
