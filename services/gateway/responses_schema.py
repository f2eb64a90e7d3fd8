"""The bodies of the Responses API. Items, tools and formats are checked where they are read."""

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from finback.services.gateway.caching import CacheKey, CacheSalt, Retention, TrafficClass
from finback.services.gateway.schema import (
    MAX_TOKENS,
    Model,
    NumTokens,
    StructuredOutputs,
)

# `include` values that ask for parts of tools which are not there: nothing is left out then.
INCLUDABLE: TypeAlias = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
Id = Annotated[str, Field(min_length=1, max_length=128)]
Includes = Annotated[list[INCLUDABLE], Field(max_length=16, fail_fast=True)]
Label = Annotated[str, Field(max_length=512)]


ServiceTier: TypeAlias = Literal[
    "auto", "default", "flex", "scale", "priority", "fast", "ultrafast"
]


class Reasoning(Model):
    """`summary` is accepted: thoughts are given whole, so that nothing is left to sum up."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class TextOptions(Model):
    """`verbosity` is a hint that the served models do not know."""

    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ConversationRef(Model):
    """A conversation by its id."""

    id: Id


class ResponsesStreamOptions(Model):
    """Obfuscation is accepted, not added."""

    include_obfuscation: bool | None = None


class InputRequest(Model):
    """What creating and counting share."""

    model: str | None = None
    input: str | list[Any] | None = None
    instructions: str | None = None
    previous_response_id: Id | None = None
    conversation: str | ConversationRef | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None


class ResponsesRequest(InputRequest):
    """`POST /v1/responses`. `seed`, `top_k`, `ignore_eos` and the like are extensions."""

    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    store: bool | None = None
    background: bool | None = None
    include: Includes | None = None
    max_output_tokens: NumTokens | None = None
    # Limits calls of tools that the server runs; there are none.
    max_tool_calls: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    metadata: dict[str, Any] | None = None
    service_tier: ServiceTier | None = None
    user: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: CacheKey | None = None
    prompt_cache_retention: Retention | None = None

    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOKENS)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    ignore_eos: bool | None = None
    traffic_class: TrafficClass | None = None
    cache_salt: CacheSalt | None = None


class CountRequest(InputRequest):
    """`POST /v1/responses/input_tokens`."""


class RetrieveRequest(Model):
    """`GET /v1/responses/{response_id}`; values of a query are text."""

    response_id: Id
    stream: bool | None = None
    starting_after: Annotated[int, Field(ge=-1, le=2**53)] | None = None
    include: Includes | None = None
    include_obfuscation: bool | None = None


class ResponseRef(Model):
    """A stored response by its id."""

    response_id: Id


class PageRequest(Model):
    """One page of a list."""

    limit: Annotated[int, Field(ge=1, le=100)] | None = None
    order: Literal["asc", "desc"] | None = None
    after: Id | None = None
    include: Includes | None = None


class InputItemsRequest(PageRequest):
    """`GET /v1/responses/{response_id}/input_items`."""

    response_id: Id


class ConversationCreate(Model):
    """`POST /v1/conversations`."""

    items: Annotated[list[Any], Field(max_length=20)] | None = None
    metadata: dict[str, Any] | None = None


class ConversationGet(Model):
    """`GET` and `DELETE /v1/conversations/{conversation_id}`."""

    conversation_id: Id


class ConversationUpdate(ConversationGet):
    """`POST /v1/conversations/{conversation_id}`. Null empties them; nothing does not."""

    metadata: dict[str, Any] | None


class ItemsCreate(ConversationGet):
    """`POST /v1/conversations/{conversation_id}/items`."""

    items: Annotated[list[Any], Field(min_length=1, max_length=20)]
    include: Includes | None = None


class ItemsPage(PageRequest):
    """`GET /v1/conversations/{conversation_id}/items`."""

    conversation_id: Id


class ItemRef(ConversationGet):
    """`GET` and `DELETE /v1/conversations/{conversation_id}/items/{item_id}`."""

    item_id: Id
    include: Includes | None = None
