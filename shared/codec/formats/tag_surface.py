"""Grammars of calls that are written as tags: one element a parameter, in the schema's order."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from finback.shared.codec.dialogue import Tool
from finback.shared.codec.formats.surface import Surface, object_schema, quote
from finback.shared.codec.formats.tag_values import takes_text
from finback.shared.codec.formats.toolbox import CUSTOM_INPUT
from finback.shared.errors import InvalidRequest

# What a schema of an object may say that elements can follow.
_FOLLOWED: Final = frozenset(
    {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema"}
    | {"title", "description", "examples", "default", "$comment", "$id"}
)
_LINE: Final = quote("\n")
_UNBOUNDED: Final = frozenset({"type", "title", "description", "examples", "default", "$comment"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TagSpelling:
    """Tags with `{}` for a name. `text` opens a value that is text, `json` one that is JSON.

    `end` closes either; `line_end` stands between a value and that,.
    """

    invoke: str
    invoke_end: str
    text: str
    json: str
    end: str
    line_end: str = ""
    tells_kind: bool = True

    def after(self, value: str) -> str:
        """A value and its closing tag."""
        return f"{value} {quote(self.line_end + self.end)} {_LINE}"

    def any_text(self, surface: Surface, name: str) -> str:
        """Free text and its closing tag."""
        return f"{surface.until(name, self.end)} {_LINE}"


def invoke_rule(surface: Surface, spelling: TagSpelling, tool: Tool, index: int) -> str:
    """The rule of one whole invocation of a tool."""
    name = f"call{index}"
    opening = quote(spelling.invoke.format(tool.name))
    body = _custom(surface, spelling, tool, name) if tool.kind == "custom" else ""
    if tool.kind == "function":
        body = _function(surface, spelling, tool, name)
    return surface.rule(name, f"{opening} {body} {quote(spelling.invoke_end)}")


def _custom(surface: Surface, spelling: TagSpelling, tool: Tool, name: str) -> str:
    opening = quote(spelling.text.format(CUSTOM_INPUT))
    if tool.grammar is not None:
        return f"{opening} {spelling.after(surface.custom_text(tool))}"
    return f"{opening} {spelling.any_text(surface, f'{name}_text')}"


def _function(surface: Surface, spelling: TagSpelling, tool: Tool, name: str) -> str:
    schema = object_schema(tool)
    properties = schema.get("properties")
    further = schema.keys() - _FOLLOWED
    if tool.strict and further:
        raise InvalidRequest(
            f"the tool '{tool.name}' is strict, but this model's calls cannot be kept to "
            f"'{min(further)}' at the top of its parameters",
            param=tool.param or "tools",
        )
    required = set(schema.get("required") or ())
    known = properties if isinstance(properties, dict) else {}
    if tool.strict and required - known.keys():
        raise InvalidRequest(
            f"the tool '{tool.name}' requires a parameter that has no schema",
            param=tool.param or "tools",
        )
    if not known:
        takes_none = tool.strict or tool.parameters is None or properties is not None
        return "" if takes_none else _anything(surface, spelling, tool, name)
    elements = []
    for at, (key, value) in enumerate(known.items()):
        one = _element(surface, spelling, tool, schema, key, value, f"{name}_{at}")
        elements.append(one if key in required else f"{one}?")
    return " ".join(elements)


def _element(
    surface: Surface,
    spelling: TagSpelling,
    tool: Tool,
    root: Mapping[str, Any],
    key: str,
    schema: Any,
    name: str,
) -> str:
    """One parameter: as text where it is a string that text can be kept to, else as JSON."""
    as_text = _text(surface, spelling, schema, f"{name}_text") if takes_text(tool, key) else None
    if takes_text(tool, key) and not spelling.tells_kind:
        if as_text is None and tool.strict:
            raise InvalidRequest(
                f"the tool '{tool.name}' is strict, but this model's calls cannot be kept to the "
                f"schema of the text '{key}'",
                param=tool.param or "tools",
            )
        text = as_text or spelling.any_text(surface, f"{name}_text")
        return surface.rule(name, f"{quote(spelling.text.format(key))} {text}")
    choices = []
    if as_text is not None:
        choices.append(f"{quote(spelling.text.format(key))} {as_text}")
    if as_text is None or not _is_free(schema):
        value = surface.schema(_rooted(schema, root, tool), tool, at=_pointer(key))
        choices.append(f"{quote(spelling.json.format(key))} {spelling.after(value)}")
    return surface.rule(name, " | ".join(choices))


def _text(surface: Surface, spelling: TagSpelling, schema: Any, name: str) -> str | None:
    """A string's own text and the closing tag; None: its schema asks for more than can be kept to."""
    if not isinstance(schema, dict) or _is_free(schema):
        return spelling.any_text(surface, name)
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        usable = [value for value in values if value and spelling.end not in value]
        options = " | ".join(quote(value) for value in usable)
        return spelling.after(f"({options})") if len(usable) == len(values) else None
    if schema.keys() - _UNBOUNDED <= {"minLength", "maxLength"}:
        low, high = schema.get("minLength", 0), schema.get("maxLength", "")
        # One lexeme with its end, which the text would otherwise take the beginning of.
        close = quote(spelling.line_end + spelling.end)
        return f"{surface.rule(name, f'/[^<]{{{low},{high}}}/ {close}', '[lazy]')} {_LINE}"
    return None


def _is_free(schema: Any) -> bool:
    return isinstance(schema, dict) and schema.keys() <= _UNBOUNDED


def _rooted(schema: Any, root: Mapping[str, Any], tool: Tool) -> dict[str, Any]:
    """A parameter's schema on its own, with the definitions that it may refer to."""
    found = schema if isinstance(schema, dict) else {}
    defined = {key: root[key] for key in ("$defs", "definitions") if key in root}
    if tool.strict and (schema is False or _refers_elsewhere(found)):
        raise InvalidRequest(
            f"the tool '{tool.name}' is strict, but its parameters refer to more than $defs",
            param=tool.param or "tools",
        )
    return {**found, **defined}


def _pointer(key: str) -> str:
    spelled = key.replace("~", "~0").replace("/", "~1")
    return f"#/properties/{spelled}"


def _refers_elsewhere(schema: Mapping[str, Any]) -> bool:
    text = json.dumps(schema)
    return text.count('"$ref": "') != sum(
        text.count(f'"$ref": "#/{key}/') for key in ("$defs", "definitions")
    )


def _anything(surface: Surface, spelling: TagSpelling, tool: Tool, name: str) -> str:
    """Any parameters at all."""
    any_name = "/[A-Za-z0-9_.-]{1,64}/"
    head, tail = spelling.text.split("{}")
    _, json_tail = spelling.json.split("{}")
    as_text = f"{quote(tail)} {spelling.any_text(surface, f'{name}_text')}"
    if not spelling.tells_kind:
        return surface.rule(f"{name}_any", f"{quote(head)} {any_name} {as_text}") + "*"
    value = surface.schema({}, tool)
    as_value = f"{quote(json_tail)} {spelling.after(value)}"
    element = f"{quote(head)} {any_name} ({as_text} | {as_value})"
    return surface.rule(f"{name}_any", element) + "*"
