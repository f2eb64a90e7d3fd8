"""The body of `POST /v1/chat/completions`, as OpenAI's clients send it, with our extensions.

What depends on the role of a message or the kind of a tool is checked where it is read
(`chat_turns.py`, `chat_tools.py`): so an error names what is wrong, not which union did not match.
"""

from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, Field

from finback.services.gateway.schema import GenerationRequest, Model, NumTokens

MAX_TOOLS: Final = 128
MAX_DESCRIPTION_CHARS: Final = 64 * 1024
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ContentPart(Model):
    """One piece of a message: text, or a refusal that the assistant gave. Others are refused."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    type: str
    text: str | None = None
    refusal: str | None = None


class CalledFunction(Model):
    """`arguments` is JSON text, as the model wrote it."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: str


class CalledCustom(Model):
    """`input` is free text."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    input: str


class MessageToolCall(Model):
    """A call in an earlier answer; `index` is left over from its stream."""

    id: Annotated[str, Field(min_length=1, max_length=256)]
    type: Literal["function", "custom"] | None = None
    function: CalledFunction | None = None
    custom: CalledCustom | None = None
    index: int | None = None


class ChatMessage(Model):
    """One turn. An answer's message is accepted back as it was given."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: (
        Annotated[list[MessageToolCall], Field(max_length=MAX_TOOLS, fail_fast=True)] | None
    ) = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    audio: dict[str, Any] | None = None
    function_call: dict[str, Any] | None = None
    annotations: list[Any] | None = None
    prefix: bool | None = None


class FunctionDefinition(Model):
    """`parameters` is a JSON Schema of an object. `strict`: arguments follow it exactly."""

    name: str
    description: Annotated[str, Field(max_length=MAX_DESCRIPTION_CHARS)] | None = None
    parameters: Any = None
    strict: bool | None = None


class GrammarDefinition(Model):
    """The language of a custom tool's input."""

    syntax: Literal["lark", "regex"]
    definition: Annotated[str, Field(min_length=1)]


class CustomFormat(Model):
    """Free text, or text of a grammar."""

    type: Literal["text", "grammar"]
    grammar: GrammarDefinition | None = None


class CustomDefinition(Model):
    """A tool that takes text instead of JSON."""

    name: str
    description: Annotated[str, Field(max_length=MAX_DESCRIPTION_CHARS)] | None = None
    format: CustomFormat | None = None


class ToolDefinition(Model):
    """What the model may call; the field of its type is there."""

    type: Literal["function", "custom"]
    function: FunctionDefinition | None = None
    custom: CustomDefinition | None = None


class Thinking(Model):
    """DeepSeek's switch for reasoning."""

    type: Literal["enabled", "disabled", "adaptive"]


class ChatRequest(GenerationRequest):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: NumTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[ToolDefinition], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = (
        None
    )
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    metadata: dict[str, Any] | None = None

    # Extensions
    thinking: Thinking | None = None
    chat_template_kwargs: dict[str, Any] | None = None
