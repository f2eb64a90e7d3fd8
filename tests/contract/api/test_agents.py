"""Agents that users run: the OpenAI Agents SDK, and Anthropic's tool runner, through real tools.

The model says what the last message says, so the user's message holds the first call and each
tool's result holds what comes next.
"""

import re
import warnings
from typing import Any

import anthropic
import openai
import pytest
from anthropic import beta_tool

from support.gateway_stack import GatewayStack
from support.said import call, thought

MODEL = "thinker"


def next_step(total: int) -> str:
    """What a tool gives back: the sum, and (as it is echoed) what the model does with it."""
    if total < 10:
        return f"total {total}\n" + call("add", a=total, b=4)
    return f"The total is {total}."


async def run_agent(url: str, kind: str, *, is_streamed: bool) -> tuple[str, list[tuple[int, int]]]:
    """(final output, the arguments of the tool's runs)."""
    with warnings.catch_warnings():
        # The SDK's dependencies announce their own changes.
        warnings.simplefilter("ignore")
        import agents

    runs: list[tuple[int, int]] = []

    def add(a: int, b: int) -> str:
        """Add two numbers.

        Args:
            a: The first.
            b: The second.
        """
        runs.append((a, b))
        return next_step(a + b)

    agents.set_tracing_disabled(True)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        model: Any = agents.OpenAIChatCompletionsModel(model=MODEL, openai_client=client)
        if kind == "responses":
            model = agents.OpenAIResponsesModel(model=MODEL, openai_client=client)
        agent: Any = agents.Agent(
            name="calculator",
            instructions="Add numbers.",
            model=model,
            tools=[agents.function_tool(add, strict_mode=False)],
        )
        said = thought("start") + call("add", a=1, b=4)
        if is_streamed:
            streamed = agents.Runner.run_streamed(agent, said)
            async for _ in streamed.stream_events():
                continue
            return str(streamed.final_output), runs
        result = await agents.Runner.run(agent, said)
        return str(result.final_output), runs


@pytest.mark.parametrize("kind", ["chat", "responses"])
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_openai_agents(thinking_stack: GatewayStack, kind: str, is_streamed: bool) -> None:
    output, runs = await run_agent(thinking_stack.url, kind, is_streamed=is_streamed)
    assert runs == [(1, 4), (5, 4), (9, 4)]
    assert "The total is 13." in output


@pytest.mark.parametrize("is_streamed", [False, True])
def test_anthropics_tool_runner(claude: anthropic.Anthropic, is_streamed: bool) -> None:
    runs: list[tuple[int, int]] = []

    @beta_tool
    def add(a: int, b: int) -> str:
        """Add two numbers.

        Args:
            a: The first.
            b: The second.
        """
        runs.append((a, b))
        return next_step(a + b)

    make: Any = claude.beta.messages.tool_runner
    runner = make(
        model=MODEL,
        max_tokens=500,
        tools=[add],
        messages=[{"role": "user", "content": call("add", a=1, b=4)}],
        stream=is_streamed,
    )
    last: Any = None
    for message in runner:
        last = message.get_final_message() if is_streamed else message
    assert runs == [(1, 4), (5, 4), (9, 4)]
    assert re.search("The total is 13", last.content[-1].text)
