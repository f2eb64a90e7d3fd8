"""Tools through a real model: what a small one cannot do by itself, the grammar makes it do."""

import json
from typing import Any

import anthropic
import openai
import pydantic
import pytest

from support.said import ADD, CLAUDE_ADD, PARAMETERS, user
from support.stack import Stack

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

MODEL = "SmolLM2-135M-Instruct"
ASKED = user("What is 17 plus 25? Use the tool.")


class City(pydantic.BaseModel):
    """A city and its country."""

    city: str
    country: str


def is_sum(arguments: Any) -> bool:
    return set(arguments) == set(PARAMETERS["required"]) and all(
        isinstance(value, int) for value in arguments.values()
    )


def test_a_required_call_over_chat(stack: Stack) -> None:
    strict = {"type": "function", "function": {**ADD["function"], "strict": True}}
    fields: dict[str, Any] = {
        "model": MODEL,
        "messages": ASKED,
        "tools": [strict],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_completion_tokens": 200,
        "temperature": 0,
    }
    with openai.OpenAI(base_url=f"{stack.http}/v1", api_key="none", max_retries=0) as api:
        create: Any = api.chat.completions.create
        whole = create(**fields).choices[0]
        assert whole.finish_reason == "tool_calls"
        assert len(whole.message.tool_calls) == 1
        assert is_sum(json.loads(whole.message.tool_calls[0].function.arguments))
        parts = [
            part.function.arguments
            for chunk in create(**fields, stream=True)
            for part in chunk.choices[0].delta.tool_calls or []
        ]
        assert "".join(parts) == whole.message.tool_calls[0].function.arguments
        back = [
            *ASKED,
            whole.message.model_dump(),
            {"role": "tool", "tool_call_id": whole.message.tool_calls[0].id, "content": "42"},
        ]
        done = create(**{**fields, "messages": back, "tool_choice": "none"}).choices[0]
        assert done.message.content
        assert done.message.tool_calls is None


def test_a_named_call_over_messages(stack: Stack) -> None:
    with anthropic.Anthropic(base_url=stack.http, api_key="none", max_retries=0) as api:
        create: Any = api.messages.create
        message = create(
            model=MODEL,
            max_tokens=200,
            messages=ASKED,
            tools=[{**CLAUDE_ADD, "strict": True}],
            tool_choice={"type": "tool", "name": "add"},
            extra_body={"temperature": 0},
        )
        assert message.stop_reason == "tool_use"
        calls = [block for block in message.content if block.type == "tool_use"]
        assert calls
        assert all(is_sum(block.input) for block in calls)
        with api.messages.stream(
            model=MODEL, max_tokens=20, messages=[{"role": "user", "content": "Say hello."}]
        ) as events:
            said = events.get_final_message()
        assert said.content[0].type == "text"
        counted = api.messages.count_tokens(
            model=MODEL, messages=[{"role": "user", "content": "Say hello."}]
        )
        usage = said.usage
        assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_parsed_answers(stack: Stack) -> None:
    with openai.OpenAI(base_url=f"{stack.http}/v1", api_key="none", max_retries=0) as api:
        parsed = api.chat.completions.parse(
            model=MODEL,
            messages=[{"role": "user", "content": "Name a city. Answer in JSON."}],
            response_format=City,
            max_completion_tokens=300,
            temperature=0,
        )
    choice = parsed.choices[0]
    assert isinstance(choice.message.parsed, City)
