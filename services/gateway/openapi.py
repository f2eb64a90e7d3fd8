"""The OpenAPI document, from the table of endpoints and the models that check their requests.

A field of a request is a parameter of the path where the path names it, else a part of the body,
or of the query where there is no body.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from pydantic.json_schema import models_json_schema

from finback.services.gateway.endpoints import Endpoint
from finback.services.gateway.error_envelope import Dialect
from finback.services.gateway.grammar_verdict import WIDENED_HEADER

VERSION: Final = "0.1.0"
_OWN: Final = (
    ("/healthz", "The process lives", "application/json"),
    ("/readyz", "Requests can be answered", "application/json"),
    ("/metrics", "Prometheus metrics", "text/plain"),
    ("/openapi.json", "This document", "application/json"),
    ("/docs", "This document, to be read", "text/html"),
)
_PLACE: Final = re.compile(r"\{(\w+)(?::\w+)?\}")
_REF: Final = "#/components/schemas/"
_TEXT: Final = {"type": "string"}
_HEADERS: Final = {
    WIDENED_HEADER: {
        "description": "Keywords of a schema that the answer is not kept to, as JSON pointers",
        "required": False,
        "schema": _TEXT,
    }
}
_ERROR: Final = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": _TEXT,
                "type": _TEXT,
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_MESSAGES_ERROR: Final = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": _TEXT, "message": _TEXT},
        },
        "request_id": _TEXT,
    },
}


def openapi_document(model_name: str, endpoints: Iterable[Endpoint]) -> dict[str, Any]:
    """OpenAPI 3.1 of this gateway."""
    table = list(endpoints)
    requests = dict.fromkeys(e.request for e in table if e.request is not None)
    _, schemas = models_json_schema(
        [(request, "validation") for request in requests], ref_template=_REF + "{model}"
    )
    defs: dict[str, Any] = schemas.get("$defs", {})
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in table:
        path = _PLACE.sub(r"{\1}", endpoint.path)
        operation = _operation(endpoint, _PLACE.findall(endpoint.path), defs)
        paths.setdefault(path, {})[endpoint.method.lower()] = operation
    for path, text, kind in _OWN:
        paths[path] = {"get": {"summary": text, "responses": _responses([kind], "openai")}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Finback",
            "version": VERSION,
            "description": f"OpenAI's and Anthropic's APIs, serving {model_name}.",
        },
        "paths": paths,
        "components": {
            "schemas": {**defs, "Error": _ERROR, "MessagesError": _MESSAGES_ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(endpoint: Endpoint, places: list[str], defs: Mapping[str, Any]) -> dict[str, Any]:
    request = endpoint.request
    schema = dict(defs[request.__name__]) if request is not None else {}
    fields: dict[str, Any] = schema.get("properties", {})
    required = schema.get("required", [])
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": fields.get(name, _TEXT)}
        for name in places
    ]
    found: dict[str, Any] = {"operationId": endpoint.name, "summary": endpoint.summary}
    kinds = ["application/json"]
    if endpoint.method == "POST":
        if request is not None:
            found["requestBody"] = _body(request.__name__, schema, places)
        if endpoint.operation:
            kinds.append("text/event-stream")
    else:
        parameters += [
            {"name": name, "in": "query", "required": name in required, "schema": field}
            for name, field in fields.items()
            if name not in places
        ]
        if "stream" in fields:
            kinds.append("text/event-stream")
    responses = _responses(kinds, endpoint.dialect)
    if "structured_outputs" in fields and endpoint.operation:
        responses["200"]["headers"] = _HEADERS
    return {**found, "parameters": parameters, "responses": responses}


def _body(name: str, schema: dict[str, Any], places: list[str]) -> dict[str, Any]:
    """The whole model, or what is left of it beside the path's parameters."""
    content: dict[str, Any] = {"$ref": _REF + name}
    if places:
        fields = {key: value for key, value in schema["properties"].items() if key not in places}
        required = [key for key in schema.get("required", []) if key not in places]
        content = {**schema, "properties": fields, "required": required}
    return {
        "required": bool(content.get("required", True)),
        "content": {"application/json": {"schema": content}},
    }


def _responses(kinds: Iterable[str], dialect: Dialect) -> dict[str, Any]:
    name = "MessagesError" if dialect == "anthropic" else "Error"
    error = {"application/json": {"schema": {"$ref": _REF + name}}}
    return {
        "200": {"description": "The answer", "content": {kind: {} for kind in kinds}},
        "default": {"description": "An error", "content": error},
    }
