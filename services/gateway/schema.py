"""The public request bodies, as OpenAI's clients send them, with our extensions.

A field is either honoured, or without effect (it cannot change the answer), or refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from finback.services.gateway.caching import CacheKey, CacheSalt, Retention, TrafficClass

MAX_CHOICES: Final = 128
MAX_TOKENS: Final = 2**31 - 1
MAX_STOPS: Final = 16
MAX_STOP_CHARS: Final = 1024
# As many as the sampler takes.
MAX_GRAMMAR_CHOICES: Final = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldRules:
    """What becomes of fields that a request model does not have, and how an API says so.

    `no_effect`: accepted, they name, file or hint, and change nothing about the answer.
    `neutral_only`: refused unless they say what happens anyway, and why: an absent feature is not
    pretended.
    """

    no_effect: frozenset[str]
    neutral_only: Mapping[str, tuple[tuple[Any, ...], str]]
    unknown: str = "Unrecognized request argument supplied: {param}"
    missing: str = "Missing required parameter: '{param}'."


OPENAI_RULES: Final = FieldRules(
    no_effect=frozenset(
        {
            "user",
            "safety_identifier",
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "metadata",
            "store",
            "service_tier",
            "moderation",
        }
    ),
    neutral_only={
        "functions": (([],), "functions were replaced by tools: use 'tools'"),
        "function_call": (("none", "auto"), "functions were replaced by tools: use 'tool_choice'"),
        "modalities": ((["text"],), "this service answers in text only"),
        "audio": ((), "this service answers in text only"),
        "prediction": ((), "predicted outputs are not supported"),
        "web_search_options": ((), "this service does not search the web"),
        "verbosity": (("medium",), "no model served here knows verbosity"),
        "tools": (([],), "tools are for conversations"),
        "tool_choice": (("none", "auto"), "tools are for conversations"),
        "parallel_tool_calls": ((True, False), "tools are for conversations"),
        "reasoning_effort": (("none",), "reasoning is for conversations"),
        "suffix": (("",), "no model served here fills gaps"),
        "best_of": ((1,), "ask for n choices instead"),
        **{
            f"guided_{name}": ((), f"use structured_outputs.{name}")
            for name in ("json", "regex", "choice", "grammar")
        },
    },
)

Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
NumTokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]


# The first wrong item ends the check: a body of a million wrong items is refused as fast as one.
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]


class Model(BaseModel):
    """Strict: a number in quotes is not a number; an unknown field is an error."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StreamOptions(Model):
    """`include_usage` adds a last chunk with the usage. Obfuscation is accepted, not added."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class StructuredOutputs(Model):
    """What an answer's text is kept to: exactly one of these, and how strictly a schema is read.

    `json` and `structural_tag` may be given as JSON text too. `grammar` is Lark. `strictness`: whether
    what of a schema cannot be enforced is refused (`strict`) or let go and told (`lenient`).
    """

    json_: dict[str, Any] | bool | str | None = Field(default=None, alias="json")
    json_object: Literal[True] | None = None
    regex: Annotated[str, Field(min_length=1)] | None = None
    choice: (
        Annotated[
            list[Annotated[str, Field(min_length=1)]],
            Field(min_length=1, max_length=MAX_GRAMMAR_CHOICES, fail_fast=True),
        ]
        | None
    ) = None
    grammar: Annotated[str, Field(min_length=1)] | None = None
    structural_tag: dict[str, Any] | str | None = None
    strictness: Literal["strict", "lenient"] | None = None


class GenerationRequest(Model):
    """What both endpoints share."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: NumTokens | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    # Values are checked one by one afterwards: a huge map must not become a huge list of errors.
    logit_bias: dict[str, Any] | None = None
    prompt_cache_key: CacheKey | None = None
    prompt_cache_retention: Retention | None = None

    # Extensions
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOKENS)] | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0.0, le=10.0)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=256, fail_fast=True)] | None = None
    traffic_class: TrafficClass | None = None
    cache_salt: CacheSalt | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None


class CompletionRequest(GenerationRequest):
    """`POST /v1/completions`. `prompt`: text, a list of texts, ids, or a list of lists of ids."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
    )
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    # Extension
    return_token_ids: bool | None = None
