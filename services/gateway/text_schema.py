"""The bodies of `/tokenize` and `/detokenize`."""

from typing import Annotated, Any

from pydantic import Field

from finback.services.gateway.chat_schema import (
    MAX_TOOLS,
    ChatMessage,
    ToolDefinition,
)
from finback.services.gateway.schema import Model, TokenId


class TokenizeRequest(Model):
    """`POST /tokenize`: `prompt` as plain text, or `messages` as a chat request has them."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)] | None = None
    tools: Annotated[list[ToolDefinition], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = (
        None
    )
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Model):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(max_length=2**20, fail_fast=True)]
