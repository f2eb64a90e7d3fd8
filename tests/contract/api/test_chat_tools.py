"""Tools and reasoning in Chat Completions, through the official client over real HTTP."""

import json
from typing import Any

import openai
import pydantic
import pytest

from support.gateway_stack import GatewayStack
from support.said import ADD, NOTE, NOW, call, thought, user

MODEL = "thinker"
BOTH = thought("two sums") + "Adding.\n" + call("add", a=1, b=2) + "\n" + call("add", a=3, b=4)


class Sum(pydantic.BaseModel):
    """Both numbers."""

    a: int
    b: int


def chat(client: openai.OpenAI, text: str, **fields: Any) -> Any:
    create: Any = client.chat.completions.create
    return create(**{"model": MODEL, "messages": user(text), "tools": [ADD, NOW], **fields})


def test_reasoning_content_and_parallel_calls(thinker: openai.OpenAI) -> None:
    answer = chat(thinker, BOTH)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.reasoning_content == "two sums"
    assert choice.message.content == "Adding."
    calls = choice.message.tool_calls
    assert [json.loads(c.function.arguments) for c in calls] == [{"a": 1, "b": 2}, {"a": 3, "b": 4}]
    assert [c.function.name for c in calls] == ["add", "add"]
    assert len({c.id for c in calls}) == 2
    details = answer.usage.completion_tokens_details
    assert 2 <= details.reasoning_tokens < answer.usage.completion_tokens


def test_a_call_alone_has_no_content(thinker: openai.OpenAI) -> None:
    message = chat(thinker, call("now")).choices[0].message
    assert message.content is None
    assert message.tool_calls[0].function.arguments == "{}"
    assert "reasoning_content" not in message.model_fields_set


def test_deltas_of_calls(thinker: openai.OpenAI) -> None:
    chunks = list(chat(thinker, BOTH, stream=True, stream_options={"include_usage": True}))
    whole = chat(thinker, BOTH)
    deltas = [c.choices[0].delta for c in chunks if c.choices]
    assert deltas[0].role == "assistant"
    reasoning = "".join(getattr(d, "reasoning_content", None) or "" for d in deltas)
    assert reasoning == "two sums"
    assert "".join(d.content or "" for d in deltas) == "Adding."
    begun: dict[int, Any] = {}
    arguments: dict[int, str] = {}
    for delta in deltas:
        for part in delta.tool_calls or []:
            if part.index in begun:
                assert part.id is None
                assert part.function.name is None
            else:
                assert part.id
                assert (part.type, part.function.name) == ("function", "add")
                begun[part.index] = part
            arguments[part.index] = arguments.get(part.index, "") + part.function.arguments
    expected = [c.function.arguments for c in whole.choices[0].message.tool_calls]
    assert [arguments[0], arguments[1]] == expected
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert reasons[-1] == "tool_calls"
    assert set(reasons[:-1]) == {None}
    assert chunks[-1].usage == whole.usage


def test_no_arguments_stream_as_an_object(thinker: openai.OpenAI) -> None:
    parts = [
        part
        for chunk in chat(thinker, call("now"), stream=True)
        for part in chunk.choices[0].delta.tool_calls or []
    ]
    assert "".join(part.function.arguments for part in parts) == "{}"


def test_stream_helper_parses_arguments(thinker: openai.OpenAI) -> None:
    tool = openai.pydantic_function_tool(Sum, name="add")
    stream: Any = thinker.chat.completions.stream
    with stream(model=MODEL, messages=user(BOTH), tools=[tool]) as events:
        kinds = [event.type for event in events]
        final = events.get_final_completion()
    calls = final.choices[0].message.tool_calls
    assert [c.function.parsed_arguments for c in calls] == [Sum(a=1, b=2), Sum(a=3, b=4)]
    assert kinds.count("tool_calls.function.arguments.done") == 2
    assert "content.done" in kinds


def test_parse_with_pydantic(thinker: openai.OpenAI) -> None:
    parse: Any = thinker.chat.completions.parse
    answer = parse(model=MODEL, messages=user('{"a": 5, "b": 6}'), response_format=Sum)
    assert answer.choices[0].message.parsed == Sum(a=5, b=6)
    with thinker.chat.completions.stream(
        model=MODEL, messages=[{"role": "user", "content": '{"a": 5, "b": 6}'}], response_format=Sum
    ) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == Sum(a=5, b=6)


async def test_async_client(thinking_stack: GatewayStack) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{thinking_stack.url}/v1", api_key="none", max_retries=0
    ) as client:
        create: Any = client.chat.completions.create
        stream = await create(model=MODEL, messages=user(BOTH), tools=[ADD], stream=True)
        texts = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(texts) == "Adding."


def test_a_whole_loop(thinker: openai.OpenAI) -> None:
    """The answer's message goes back as it came, with the results of its calls."""
    messages: list[Any] = user(BOTH)
    message = chat(thinker, BOTH).choices[0].message
    messages.append(message.model_dump())
    for at, made in enumerate(message.tool_calls):
        messages.append({"role": "tool", "tool_call_id": made.id, "content": f"result {at}"})
    answer = chat(thinker, "", messages=messages)
    assert "result 1" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    parts = [{"type": "text", "text": "result 0"}]
    messages[-2] = {"role": "tool", "tool_call_id": messages[-2]["tool_call_id"], "content": parts}
    assert chat(thinker, "", messages=messages).usage == answer.usage


def test_custom_tools(thinker: openai.OpenAI) -> None:
    said = '<tool_call>\n{"name": "note", "arguments": {"input": "a\\nb"}}\n</tool_call>'
    answer = chat(thinker, said, tools=[NOTE])
    made = answer.choices[0].message.tool_calls[0]
    assert made.type == "custom"
    assert (made.custom.name, made.custom.input) == ("note", "a\nb")
    back = [
        *user(said),
        answer.choices[0].message.model_dump(),
        {"role": "tool", "tool_call_id": made.id, "content": "kept"},
    ]
    again = chat(thinker, "", messages=back, tools=[NOTE])
    assert "kept" in again.choices[0].message.content


def test_several_choices_have_calls_of_their_own(thinker: openai.OpenAI) -> None:
    choices = chat(thinker, BOTH, n=3).choices
    assert len({made.id for c in choices for made in c.message.tool_calls}) == 6
    chunks = list(chat(thinker, BOTH, n=2, stream=True))
    for index in range(2):
        own = [c.choices[0] for c in chunks if c.choices[0].index == index]
        parts = [part for c in own for part in c.delta.tool_calls or []]
        assert [part.index for part in parts if part.id] == [0, 1]
        assert [c.finish_reason for c in own if c.finish_reason] == ["tool_calls"]


def test_logprobs_are_those_of_content(thinker: openai.OpenAI) -> None:
    said = thought("hm") + "Grüße 👍🏽.\n" + call("now")
    answer = chat(thinker, said, logprobs=True, top_logprobs=2)
    choice = answer.choices[0]
    told = b"".join(bytes(entry.bytes) for entry in choice.logprobs.content)
    assert told.decode().strip() == choice.message.content
    chunks = chat(thinker, said, logprobs=True, stream=True)
    streamed = [
        entry
        for c in chunks
        if c.choices[0].logprobs
        for entry in c.choices[0].logprobs.content or []
    ]
    assert [entry.bytes for entry in streamed] == [entry.bytes for entry in choice.logprobs.content]


def test_stop_strings_end_content_only(thinker: openai.OpenAI) -> None:
    said = thought("STOP is a word") + call("add", a=1, b=2) + "\nnow STOP here"
    choice = chat(thinker, said, stop=["STOP"]).choices[0]
    assert choice.message.reasoning_content == "STOP is a word"
    assert len(choice.message.tool_calls) == 1
    assert "STOP" not in (choice.message.content or "")


def test_a_cut_call_is_not_told_as_a_finished_one(thinker: openai.OpenAI) -> None:
    choice = chat(thinker, call("add", a=1, b=2), max_tokens=14).choices[0]
    assert choice.finish_reason == "length"


def test_what_is_no_call_is_text(thinker: openai.OpenAI) -> None:
    for said in ("<tool_call>\nno json\n</tool_call>", "<tool_call", '<tool_call>{"a": 1'):
        choice = chat(thinker, said).choices[0]
        assert choice.message.content == said
        assert choice.finish_reason == "stop"
    without = chat(thinker, call("add", a=1, b=2), tools=[]).choices[0]
    assert without.message.tool_calls is None
    assert without.message.content == call("add", a=1, b=2)


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "medium", "high", "xhigh", "max"])
def test_efforts(thinker: openai.OpenAI, effort: str) -> None:
    assert chat(thinker, "hello", reasoning_effort=effort).choices[0].message.content == "hello"


def test_what_is_said_back(thinker: openai.OpenAI) -> None:
    answer = chat(thinker, "x", service_tier="auto", metadata={"k": "v"}, store=False, user="me")
    assert answer.service_tier == "default"
    assert answer.metadata == {"k": "v"}
    assert "service_tier" not in chat(thinker, "x").model_fields_set
