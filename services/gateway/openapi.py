"""The OpenAPI document, from the same models that check the requests."""

from typing import Any, Final

from pydantic.json_schema import models_json_schema

from finback.services.gateway.chat_schema import ChatRequest
from finback.services.gateway.schema import CompletionRequest, Model
from finback.services.gateway.text_schema import DetokenizeRequest, TokenizeRequest

VERSION: Final = "0.1.0"
_POSTS: Final[tuple[tuple[str, type[Model], str, bool], ...]] = (
    ("/v1/chat/completions", ChatRequest, "Answer a conversation", True),
    ("/v1/completions", CompletionRequest, "Continue a text", True),
    ("/tokenize", TokenizeRequest, "Token ids of a text or conversation", False),
    ("/detokenize", DetokenizeRequest, "Text of token ids", False),
)
_GETS: Final = (
    ("/v1/models", "The served model and its aliases"),
    ("/v1/models/{name}", "One model"),
    ("/v1/usage", "What the key's tenant has used, by the hour"),
    ("/healthz", "The process lives"),
    ("/readyz", "Requests can be answered"),
    ("/metrics", "Prometheus metrics"),
)
_QUERIES: Final = {"/v1/usage": ("tenant", "since")}
_ERROR: Final = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def openapi_document(model_name: str) -> dict[str, Any]:
    """OpenAPI 3.1 of this gateway."""
    _, schemas = models_json_schema(
        [(model, "validation") for _, model, _, _ in _POSTS],
        ref_template="#/components/schemas/{model}",
    )
    paths: dict[str, Any] = {path: {"get": _get(path, text)} for path, text in _GETS}
    for path, model, text, streams in _POSTS:
        paths[path] = {"post": _post(model, text, streams)}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Finback",
            "version": VERSION,
            "description": f"OpenAI-compatible API, serving {model_name}.",
        },
        "paths": paths,
        "components": {
            "schemas": {**schemas["$defs"], "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _get(path: str, text: str) -> dict[str, Any]:
    text_schema = {"type": "string"}
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "query", "schema": text_schema} for name in _QUERIES.get(path, ())
    ]
    if "{name}" in path:
        parameters = [{"name": "name", "in": "path", "required": True, "schema": text_schema}]
    return {"summary": text, "parameters": parameters, "responses": _responses(streams=False)}


def _post(model: type[Model], text: str, streams: bool) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {
        "summary": text,
        "description": model.__doc__,
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": _responses(streams=streams),
    }


def _responses(*, streams: bool) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {}}
    if streams:
        content["text/event-stream"] = {}
    error = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}
    return {
        "200": {"description": "The answer", "content": content},
        "default": {"description": "An error", **error},
    }
