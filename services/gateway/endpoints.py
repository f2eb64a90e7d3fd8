"""The public endpoints: one table, read by both doors.

A handler gets one JSON object, whichever door it came through, and answers into a sink. Over HTTP
the parameters of a path and of its query are fields of that object (the path's win).
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from finback.services.gateway.body import parse_object
from finback.services.gateway.caller import Caller
from finback.services.gateway.chat_schema import ChatRequest
from finback.services.gateway.chat_work import answer_chat
from finback.services.gateway.completion_work import answer_completion
from finback.services.gateway.error_envelope import Dialect
from finback.services.gateway.exchange import Exchange
from finback.services.gateway.models_list import ModelsList
from finback.services.gateway.openai_format import to_json
from finback.services.gateway.schema import CompletionRequest, Model
from finback.services.gateway.sink import Sink
from finback.services.gateway.text_schema import DetokenizeRequest, TokenizeRequest
from finback.services.gateway.text_tools import TextTools
from finback.services.gateway.usage_api import UsageApi, UsageRequest

Handler = Callable[[bytes, Caller, Sink], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """`name`: of the NATS subject below `api.`, of metrics and spans.

    `path`: of HTTP, in Starlette's form. `operation`: OpenTelemetry's name of what is generated;
    empty: nothing is, so the request is no trace of its own. `names_events`: its streams name the
    type of each record. `summary` and `request`, which checks what is asked, are for the OpenAPI
    document.
    """

    name: str
    path: str
    handler: Handler
    method: str = "POST"
    dialect: Dialect = "openai"
    names_events: bool = False
    operation: str = ""
    summary: str = ""
    request: type[Model] | None = None


EndpointTable = Mapping[str, Endpoint]


def core_endpoints(exchange: Exchange, text_tools: TextTools) -> Iterable[Endpoint]:
    """Completions of both kinds, models, and the tools around text."""
    models = ModelsList(exchange.model)
    yield Endpoint(
        name="chat.completions",
        path="/v1/chat/completions",
        handler=partial(answer_chat, exchange),
        operation="chat",
        summary="Answer a conversation",
        request=ChatRequest,
    )
    yield Endpoint(
        name="completions",
        path="/v1/completions",
        handler=partial(answer_completion, exchange),
        operation="text_completion",
        summary="Continue a text",
        request=CompletionRequest,
    )
    yield Endpoint(
        name="models",
        path="/v1/models",
        handler=models.all,
        method="GET",
        summary="The served model and its aliases",
    )
    yield Endpoint(
        name="models.retrieve",
        path="/v1/models/{model:path}",
        handler=models.one,
        method="GET",
        summary="One model",
    )
    yield Endpoint(
        name="tokenize",
        path="/tokenize",
        handler=text_tools.tokenize,
        summary="Token ids of a text or conversation",
        request=TokenizeRequest,
    )
    yield Endpoint(
        name="detokenize",
        path="/detokenize",
        handler=text_tools.detokenize,
        summary="Text of token ids",
        request=DetokenizeRequest,
    )


def usage_endpoints(api: UsageApi) -> Iterable[Endpoint]:
    """What tenants have used."""
    yield Endpoint(
        name="usage",
        path="/v1/usage",
        handler=api.usage,
        method="GET",
        summary="What the key's tenant has used, by the hour",
        request=UsageRequest,
    )


def endpoint_table(*parts: Iterable[Endpoint]) -> EndpointTable:
    """The endpoints by name; two of one name are a bug."""
    found = [endpoint for part in parts for endpoint in part]
    table = {endpoint.name: endpoint for endpoint in found}
    if len(table) != len(found):
        raise ValueError("two endpoints have one name")
    return table


def with_parameters(body: bytes, parameters: Mapping[str, Any]) -> bytes:
    """A body with the parameters of path and query among its fields."""
    if not parameters:
        return body
    return to_json({**(parse_object(body) if body else {}), **parameters})
