"""What is no JSON Schema is refused at its first fault; what is one never is."""

from typing import Any

import pytest

from finback.services.gateway.tool_schema import schema_fault


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"type": ["string", "null"], "format": "date", "x-anything": {"at": "all"}},
        {"type": "object", "properties": {"type": {"type": "string"}}, "required": ["type"],
         "additionalProperties": False},
        {"type": "object", "properties": {"required": {"enum": [None, 1, {"a": []}]}}},
        {"$defs": {"a": {"$ref": "#/$defs/a"}}, "anyOf": [{"$ref": "#/$defs/a"}, False]},
        {"items": [{"type": "string"}], "prefixItems": [True], "minItems": 0, "maxItems": 2.0},
        {"patternProperties": {"^x": {}}, "propertyNames": {"pattern": "a"}, "const": None},
        {"if": {}, "then": True, "else": {"not": {}}, "default": {"type": 5}, "examples": [1]},
    ],
)  # fmt: skip
def test_schemas(schema: Any) -> None:
    assert schema_fault(schema, "p") is None


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        (None, "p"),
        ("object", "p"),
        ([], "p"),
        ({"type": "text"}, "p.type"),
        ({"type": []}, "p.type"),
        ({"type": ["string", 5]}, "p.type"),
        ({"properties": []}, "p.properties"),
        ({"properties": {"a": 5}}, "p.properties.a"),
        ({"properties": {"a": {"items": {"type": "x"}}}}, "p.properties.a.items.type"),
        ({"required": True}, "p.required"),
        ({"required": [1]}, "p.required"),
        ({"enum": "a"}, "p.enum"),
        ({"enum": []}, "p.enum"),
        ({"anyOf": []}, "p.anyOf"),
        ({"allOf": [{}, 5]}, "p.allOf.1"),
        ({"oneOf": {}}, "p.oneOf"),
        ({"minLength": -1}, "p.minLength"),
        ({"maxItems": True}, "p.maxItems"),
        ({"description": 5}, "p.description"),
        ({"$ref": {}}, "p.$ref"),
        ({"$defs": {"a": {"additionalProperties": "no"}}}, "p.$defs.a.additionalProperties"),
    ],
)
def test_faults(schema: Any, path: str) -> None:
    found = schema_fault(schema, "p")
    assert found is not None
    assert found[0] == path
    assert found[1]
