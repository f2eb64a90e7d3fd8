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
    found: list[Any] = []
    at = 0
    while True:
        hits = [(text.find(t, at), t) for t in tag["triggers"] if text.find(t, at) >= 0]
        if not hits:
            return found
        start, trigger = min(hits)
        fits = [
            s
            for s in tag["structures"]
            if s["begin"].startswith(trigger) and text.startswith(s["begin"], start)
        ]
        assert len(fits) == 1, text
        inside = start + len(fits[0]["begin"])
        value, used = json.JSONDecoder().raw_decode(text[inside:])
        jsonschema.validate(value, fits[0]["schema"])
        at = inside + used
        assert text.startswith(fits[0]["end"], at), text
        at += len(fits[0]["end"])
        found.append(value)


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
