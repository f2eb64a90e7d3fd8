"""One `structured_outputs` of every kind, and what an answer that was kept to it must be."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import jsonschema

PLACE: Final = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "string", "maxLength": 5}},
    "required": ["a"],
    "additionalProperties": False,
}
TAG: Final[dict[str, Any]] = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<f=foo>", "schema": PLACE, "end": "</f>"},
        {"begin": "<f=bar>\n", "schema": {"type": "string", "maxLength": 4}, "end": "\n</f>"},
        {"begin": "[ask]", "schema": {"enum": ["yes", "no"]}, "end": "."},
    ],
    "triggers": ["<f=", "[ask"],
}
REGEX: Final = r"[0-9]{3}-[a-f]{1,8}(\.[x-z])?"
CHOICES: Final = ("red", "green", 'a "quoted" one')
LARK: Final = 'start: sum\nsum: NUM ("+" NUM){0,3}\nNUM: /[0-9]{1,3}/'
KINDS: Final[Mapping[str, Any]] = {
    "json": PLACE,
    "json_object": True,
    "regex": REGEX,
    "choice": list(CHOICES),
    "grammar": LARK,
    "structural_tag": TAG,
}


def islands(text: str, tag: Mapping[str, Any] = TAG) -> list[Any]:
    """Values of the islands of a whole answer, found without the engine; raises for a broken one."""
    found = _islands(text, 0, tag)
    assert found is not None, text
    return found


def _islands(text: str, at: int, tag: Mapping[str, Any]) -> list[Any] | None:
    """Those from `at` on; None: they cannot be read."""
    ends = [(text.find(t, at) + len(t), t) for t in tag["triggers"] if text.find(t, at) >= 0]
    if not ends:
        return []
    end, trigger = min(ends)
    for structure in tag["structures"]:
        begin = structure["begin"]
        if begin.startswith(trigger) and text.startswith(begin, end - len(trigger)):
            read = _value(text, end - len(trigger) + len(begin), structure["schema"])
            behind = [] if read is None else _places(text, read[1], structure["end"])
            for place in behind:
                rest = _islands(text, place, tag)
                if read is not None and rest is not None:
                    return [read[0], *rest]
    return None


def _value(text: str, at: int, schema: Any) -> tuple[Any, int] | None:
    """A value that is right by its schema, perhaps behind blanks, and where it ends."""
    at += len(text[at:]) - len(text[at:].lstrip(" \t\r\n"))
    try:
        value, used = json.JSONDecoder().raw_decode(text[at:])
        jsonschema.validate(value, schema)
    except (ValueError, jsonschema.ValidationError):
        return None
    return value, at + used


def _places(text: str, at: int, end: str) -> list[int]:
    """Behind `end` at `at`, or with blanks before it."""
    blanks = len(text[at:]) - len(text[at:].lstrip(" \t\r\n"))
    return [at + n + len(end) for n in range(blanks + 1) if text.startswith(end, at + n)]


def _check_json(text: str) -> None:
    jsonschema.validate(json.loads(text), PLACE)


def _check_object(text: str) -> None:
    assert isinstance(json.loads(text), dict)


def _check_regex(text: str) -> None:
    assert re.fullmatch(REGEX, text), text


def _check_choice(text: str) -> None:
    assert text in CHOICES


def _check_lark(text: str) -> None:
    assert re.fullmatch(r"[0-9]{1,3}(\+[0-9]{1,3}){0,3}", text), text


def _check_tag(text: str) -> None:
    islands(text)


CHECKS: Final[Mapping[str, Callable[[str], None]]] = {
    "json": _check_json,
    "json_object": _check_object,
    "regex": _check_regex,
    "choice": _check_choice,
    "grammar": _check_lark,
    "structural_tag": _check_tag,
}
