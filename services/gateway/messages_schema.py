"""The bodies of `/v1/messages` and `/v1/messages/count_tokens`, as Anthropic's clients send them.

Blocks are looked into where they are read (`messages_blocks.py`).
"""

from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, Field

from finback.services.gateway.schema import (
    FieldRules,
    Model,
    NumTokens,
    Stop,
    StructuredOutputs,
)

MAX_STOPS: Final = 64
MAX_TOOLS: Final = 512
MAX_DESCRIPTION_CHARS: Final = 64 * 1024
MIN_BUDGET_TOKENS: Final = 1024

Blocks = Annotated[list[dict[str, Any]], Field(fail_fast=True)]

# What agents ask for by default, and what happens here in any case.
_KEEP_THINKING: Final = {"type": "clear_thinking_20251015", "keep": "all"}

RULES: Final = FieldRules(
    no_effect=frozenset(
        {
            "cache_control",
            "diagnostics",
            "inference_geo",
            "speed",
            "user_profile_id",
            "workspace_id",
        }
    ),
    neutral_only={
        "container": ((), "this service runs no code"),
        "mcp_servers": (([],), "this service calls no other servers"),
        "context_management": (
            ({"edits": []}, {"edits": [_KEEP_THINKING]}),
            "nothing is taken out of what a client sends",
        ),
    },
    unknown="{param}: Extra inputs are not permitted",
    missing="{param}: Field required",
)


class MessageParam(Model):
    """One message; messages of one role in a row are one turn."""

    role: Literal["user", "assistant", "system"]
    content: str | Blocks


class MessagesTool(Model):
    """A tool of the client's. Those that Anthropic runs have a dated type and are refused."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    name: str
    type: str | None = None
    description: Annotated[str, Field(max_length=MAX_DESCRIPTION_CHARS)] | None = None
    input_schema: Any = None
    strict: bool | None = None


class MessagesToolChoice(Model):
    """`any`: at least one call; `tool`: of the one named."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class MessagesThinking(Model):
    """Whether the model reasons first. The budget is checked, and no more than a hint."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Field(ge=MIN_BUDGET_TOKENS)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Model):
    """A schema that the answer's text follows exactly."""

    type: Literal["json_schema"]
    json_schema: Any = Field(default=None, alias="schema")


class OutputConfig(Model):
    """How much is thought, and in which form is answered."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Metadata(Model):
    """Who it is for; nothing depends on it."""

    user_id: Annotated[str, Field(max_length=512)] | None = None


class CountTokensRequest(Model):
    """`POST /v1/messages/count_tokens`: what the prompt depends on."""

    model: str
    messages: Annotated[list[MessageParam], Field(min_length=1, fail_fast=True)]
    system: str | Blocks | None = None
    tools: Annotated[list[MessagesTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: MessagesThinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    # Extension
    structured_outputs: StructuredOutputs | None = None


class MessagesRequest(CountTokensRequest):
    """`POST /v1/messages`."""

    max_tokens: NumTokens
    stream: bool | None = None
    stop_sequences: Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    top_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    # Conversations are not kept here: clients that ask are told so in the way that they know.
    thread: dict[str, Any] | None = None
