"""The Messages API through Anthropic's official client, over real HTTP."""

import json
from typing import Any

import anthropic
import httpx
import openai
import pydantic
import pytest

from support.gateway_stack import GatewayStack
from support.said import ADD, CLAUDE_ADD, call, thought, user

MODEL = "thinker"
BOTH = thought("two sums") + "Adding.\n" + call("add", a=1, b=2) + "\n" + call("add", a=3, b=4)
THINK: dict[str, Any] = {"type": "adaptive"}


class Sum(pydantic.BaseModel):
    """Both numbers."""

    a: int
    b: int


def ask(client: anthropic.Anthropic, text: str, **fields: Any) -> Any:
    create: Any = client.messages.create
    return create(**{"model": MODEL, "max_tokens": 500, "messages": user(text), **fields})


def test_text(claude: anthropic.Anthropic) -> None:
    message = ask(claude, "Grüße 👍🏽", system="Be brief.")
    assert [block.model_dump() for block in message.content] == [
        {"type": "text", "text": "Grüße 👍🏽", "citations": None}
    ]
    assert (message.type, message.role, message.model) == ("message", "assistant", MODEL)
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.id.startswith("msg_")
    assert message._request_id in message.id
    usage = message.usage
    assert usage.input_tokens > 0
    assert usage.cache_read_input_tokens == usage.cache_creation_input_tokens == 0


def test_thinking_and_tools(claude: anthropic.Anthropic) -> None:
    message = ask(claude, BOTH, tools=[CLAUDE_ADD], thinking=THINK)
    kinds = [block.type for block in message.content]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"]
    assert message.content[0].thinking == "two sums"
    assert message.content[1].text.strip() == "Adding."
    assert [block.input for block in message.content[2:]] == [{"a": 1, "b": 2}, {"a": 3, "b": 4}]
    assert message.stop_reason == "tool_use"
    assert 2 <= message.usage.output_tokens_details.thinking_tokens < message.usage.output_tokens


def test_events(claude: anthropic.Anthropic) -> None:
    events = list(ask(claude, BOTH, tools=[CLAUDE_ADD], thinking=THINK, stream=True))
    whole = ask(claude, BOTH, tools=[CLAUDE_ADD], thinking=THINK)
    assert events[0].type == "message_start"
    assert events[0].message.content == []
    assert events[0].message.usage.input_tokens == whole.usage.input_tokens
    assert events[0].message.stop_reason is None
    open_block, index = None, -1
    for event in events[1:-2]:
        if event.type == "content_block_start":
            assert open_block is None
            index += 1
            assert event.index == index
            open_block = event.content_block
        elif event.type == "content_block_delta":
            assert open_block is not None
            assert event.index == index
        elif event.type == "content_block_stop":
            assert event.index == index
            open_block = None
    assert index == 3
    assert events[-2].type == "message_delta"
    assert events[-2].delta.stop_reason == "tool_use"
    assert events[-2].usage.output_tokens == whole.usage.output_tokens
    assert events[-1].type == "message_stop"


def test_stream_helper(claude: anthropic.Anthropic) -> None:
    stream: Any = claude.messages.stream
    with stream(
        model=MODEL, max_tokens=500, messages=user(BOTH), tools=[CLAUDE_ADD], thinking=THINK
    ) as events:
        kinds = {event.type for event in events}
        message = events.get_final_message()
    assert {"text", "thinking", "input_json", "signature"} <= kinds
    assert [block.input for block in message.content[2:]] == [{"a": 1, "b": 2}, {"a": 3, "b": 4}]
    assert message.stop_reason == "tool_use"
    with stream(model=MODEL, max_tokens=500, messages=user("one two")) as events:
        assert "".join(events.text_stream) == "one two"


async def test_async_client(thinking_stack: GatewayStack) -> None:
    async with anthropic.AsyncAnthropic(
        base_url=thinking_stack.url, api_key="none", max_retries=0
    ) as client:
        stream: Any = client.messages.stream
        async with stream(model=MODEL, max_tokens=50, messages=user("one two")) as events:
            assert await events.get_final_text() == "one two"
        count = await client.messages.count_tokens(
            model=MODEL, messages=[{"role": "user", "content": "one two"}]
        )
        assert count.input_tokens > 2


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"system": "Be brief."},
        {"system": [{"type": "text", "text": "Be", "cache_control": {"type": "ephemeral"}},
                    {"type": "text", "text": "brief."}]},
        {"tools": [CLAUDE_ADD], "tool_choice": {"type": "auto"}},
        {"tools": [CLAUDE_ADD], "tool_choice": {"type": "none"}},
        {"tools": [CLAUDE_ADD], "thinking": THINK},
        {"messages": [*user("x"), {"role": "assistant", "content": "The answer is"}]},
        {"messages": [{"role": "user", "content": [
            {"type": "text", "text": "a"},
            {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}]}]},
    ],
)  # fmt: skip
def test_counts_equal_the_usage(claude: anthropic.Anthropic, fields: dict[str, Any]) -> None:
    count: Any = claude.messages.count_tokens
    body = {"model": MODEL, "messages": user("x y"), **fields}
    counted = count(**body).input_tokens
    usage = ask(claude, "", **body).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens


def test_the_same_conversation_has_the_same_prompt(
    claude: anthropic.Anthropic, thinker: openai.OpenAI
) -> None:
    create: Any = thinker.chat.completions.create
    made = create(
        model=MODEL,
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "add"},
            {"role": "assistant", "content": "I add.", "tool_calls": [
                {"id": "c1", "type": "function",
                 "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}]},
            {"role": "tool", "tool_call_id": "c1", "content": "3"},
            {"role": "user", "content": "thanks"},
        ],
        tools=[ADD],
        reasoning_effort="none",
    )  # fmt: skip
    count: Any = claude.messages.count_tokens
    counted = count(
        model=MODEL,
        system="Be brief.",
        messages=[
            {"role": "user", "content": "add"},
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": "I add."},
                    {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1, "b": 2}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": "3"},
                    {"type": "text", "text": "thanks"},
                ],
            },
        ],
        tools=[CLAUDE_ADD],
    )  # fmt: skip
    assert counted.input_tokens == made.usage.prompt_tokens
    count_items: Any = thinker.responses.input_tokens.count
    items = count_items(
        model=MODEL,
        instructions="Be brief.",
        input=[
            {"role": "user", "content": "add"},
            {"role": "assistant", "content": "I add."},
            {"type": "function_call", "call_id": "c1", "name": "add",
             "arguments": '{"a": 1, "b": 2}'},
            {"type": "function_call_output", "call_id": "c1", "output": "3"},
            {"role": "user", "content": "thanks"},
        ],
        tools=[{"type": "function", **ADD["function"], "strict": False}],
        reasoning={"effort": "none"},
    )  # fmt: skip
    assert items.input_tokens == counted.input_tokens


def test_tool_loop(claude: anthropic.Anthropic) -> None:
    """The content goes back as it came, with a signature or without."""
    first = ask(claude, BOTH, tools=[CLAUDE_ADD], thinking=THINK)
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": f"result {at}"}
        for at, block in enumerate(first.content[2:])
    ]
    results[0]["is_error"] = True
    messages = [
        *user(BOTH),
        {"role": "assistant", "content": [block.model_dump() for block in first.content]},
        {"role": "user", "content": [*results, {"type": "text", "text": "go on"}]},
    ]
    second = ask(claude, "", messages=messages, tools=[CLAUDE_ADD], thinking=THINK)
    assert second.content[-1].text == "go on"


def test_why_it_stopped(claude: anthropic.Anthropic) -> None:
    cut = ask(claude, "one two three four", max_tokens=2)
    assert (cut.stop_reason, cut.content[0].text) == ("max_tokens", "one two")
    stopped = ask(claude, "one two three four", stop_sequences=[" three", "x"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " three")
    assert stopped.content[0].text == "one two"
    # A limit above the context is lowered: agents ask for the most that their model may write.
    events = list(ask(claude, "one two", max_tokens=1_000_000, stream=True))
    assert events[-2].delta.stop_reason == "end_turn"


def test_a_cut_call_keeps_what_there_is(claude: anthropic.Anthropic) -> None:
    said = call("add", a=1, b=2)
    message = ask(claude, said, tools=[CLAUDE_ADD], max_tokens=20)
    assert message.stop_reason == "max_tokens"
    assert [block.type for block in message.content] == ["tool_use"]
    assert message.content[0].input["INVALID_JSON"].startswith("{")


def test_arguments_that_are_no_text_are_given_as_they_were_written(
    claude: anthropic.Anthropic, thinker: openai.OpenAI
) -> None:
    arguments = r'{"a": "\ud83d"}'
    said = f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'
    message = ask(claude, said, tools=[CLAUDE_ADD])
    assert message.content[0].input == {"INVALID_JSON": arguments}
    create: Any = thinker.chat.completions.create
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}
    made = create(
        model=MODEL,
        messages=[
            *user("x"),
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "y"},
        ],
        tools=[ADD],
    )
    assert made.choices[0].message.content == "y"


def test_prefill_is_continued(thinking_stack: GatewayStack, claude: anthropic.Anthropic) -> None:
    prefilled = [*user("say it"), {"role": "assistant", "content": "Well, I"}]
    message = ask(claude, "", messages=prefilled)
    assert message.stop_reason == "end_turn"

    def post(path: str, body: Any) -> Any:
        return httpx.post(thinking_stack.url + path, json=body).json()

    prompt = post("/tokenize", {"messages": prefilled})
    assert prompt["count"] == message.usage.input_tokens
    assert post("/detokenize", {"tokens": prompt["tokens"]})["prompt"].endswith("Well, I")


def test_thinking_that_is_not_shown(claude: anthropic.Anthropic) -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}
    message = ask(claude, BOTH, thinking=thinking, max_tokens=2000, tools=[CLAUDE_ADD])
    assert message.content[0].thinking == ""
    events = list(
        ask(claude, BOTH, thinking=thinking, max_tokens=2000, tools=[CLAUDE_ADD], stream=True)
    )
    assert not [e for e in events if getattr(getattr(e, "delta", None), "thinking", None)]


def test_forced_tools_and_formats(claude: anthropic.Anthropic) -> None:
    for choice in ({"type": "any", "disable_parallel_tool_use": True},
                   {"type": "tool", "name": "add"}):  # fmt: skip
        message = ask(claude, call("add", a=1, b=2), tools=[CLAUDE_ADD], tool_choice=choice)
        assert message.stop_reason == "tool_use"
    parse: Any = claude.messages.parse
    parsed = parse(model=MODEL, max_tokens=99, messages=user('{"a": 5, "b": 6}'), output_format=Sum)
    assert parsed.parsed_output == Sum(a=5, b=6)


def test_models(claude: anthropic.Anthropic) -> None:
    page = claude.models.list()
    assert page.data[0].id == MODEL
    assert page.has_more is False
    found = claude.models.retrieve(MODEL)
    assert (found.type, found.display_name) == ("model", MODEL)
    assert found.created_at.year >= 2025
    with pytest.raises(anthropic.NotFoundError):
        claude.models.retrieve("nope")


def test_bytes_of_a_stream(thinking_stack: GatewayStack) -> None:
    body = {"model": MODEL, "max_tokens": 9, "messages": user("a b"), "stream": True}
    reply = httpx.post(
        f"{thinking_stack.url}/v1/messages?beta=true",
        json=body,
        headers={"anthropic-version": "2023-06-01", "anthropic-beta": "x", "x-api-key": "k"},
    )
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.headers["request-id"]
    records = [record.split("\n") for record in reply.text.strip().split("\n\n")]
    for event, data in records:
        assert event == f"event: {json.loads(data.removeprefix('data: '))['type']}"
    assert records[-1][0] == "event: message_stop"


def test_waiting_is_shown_by_pings(slow_stack: GatewayStack) -> None:
    body = {"model": "gpt-4o", "max_tokens": 9, "messages": user("a b"), "stream": True}
    reply = httpx.post(f"{slow_stack.url}/v1/messages", json=body, timeout=20)
    kinds = [line[7:] for line in reply.text.split("\n") if line.startswith("event: ")]
    assert kinds[:3] == ["message_start", "ping", "ping"]
    assert kinds[-1] == "message_stop"


def test_an_engine_that_dies_ends_the_stream_with_an_error(slow_stack: GatewayStack) -> None:
    with anthropic.Anthropic(base_url=slow_stack.url, api_key="k", max_retries=0) as client:
        create: Any = client.messages.create
        stream = create(
            model="gpt-4o",
            max_tokens=5000,
            messages=user("one two three four five six seven eight nine ten " * 20),
            stream=True,
        )
        is_killed = False
        with pytest.raises(anthropic.APIStatusError) as caught:
            for event in stream:
                if event.type == "content_block_delta" and not is_killed:
                    is_killed = True
                    slow_stack.kill("echo")
        assert caught.value.body["type"] == "error"  # type: ignore[index]  # untyped
