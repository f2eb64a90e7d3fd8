"""Grammars that are meant to hurt: wide, deep, ambiguous, endless. Seeded, any number of them."""

import json
import random
from collections.abc import Callable, Iterator
from typing import Any, Final

from finback.shared.wire.messages.generate import GrammarSpec


def hostile_grammars(count: int, seed: int = 1) -> Iterator[tuple[str, GrammarSpec]]:
    """(name of its kind, grammar), the kinds in turns, each time of another size."""
    for index in range(count):
        name = tuple(KINDS)[index % len(KINDS)]
        draw = random.Random(f"{seed} {index}")
        kind, text = KINDS[name](draw)
        yield name, GrammarSpec(kind=kind, text=text if isinstance(text, str) else json.dumps(text))


Made = tuple[str, Any]


def _word(draw: random.Random, low: int = 3, high: int = 12) -> str:
    return "".join(draw.choices("abcdefghij", k=draw.randint(low, high)))


def _wide_enum(draw: random.Random) -> Made:
    return "json_schema", {
        "enum": [f"v{draw.random():.6f}" for _ in range(draw.choice([200, 2000, 20_000]))]
    }


def _alike_choices(draw: random.Random) -> Made:
    stem = _word(draw, 200, 400)
    return "choice", json.dumps([stem[: draw.randint(1, 400)] + str(i) for i in range(400)])


def _deep_objects(draw: random.Random) -> Made:
    depth = draw.choice([20, 60, 500])
    inner = '{"type": "string"}'
    for _ in range(depth):
        inner = f'{{"type": "object", "properties": {{"a": {inner}}}, "required": ["a"]}}'
    return "json_schema", inner


def _bounds(draw: random.Random) -> Made:
    low = draw.choice([10, 1_000, 50_000, 10**7])
    inner: Any = {"type": "string", "minLength": low, "maxLength": low * 2}
    for _ in range(draw.randint(0, 3)):
        inner = {"type": "array", "minItems": draw.choice([2, 500, 9_000]), "items": inner}
    return "json_schema", inner


def _repetitions(draw: random.Random) -> Made:
    text = draw.choice("ab")
    for _ in range(draw.randint(1, 5)):
        text = f"({text}{{1,{draw.choice([9, 100, 1000])}}}{draw.choice('abc')}?)"
    return "regex", text


def _states(draw: random.Random) -> Made:
    count = draw.choice([10, 20, 300, 3000])
    return "regex", draw.choice(
        [
            rf"(a|b)*a(a|b){{{count}}}",
            rf"(.*{_word(draw)}.*){{1,{count}}}x",
            rf"(a+)+b(a*)*c{{{count}}}",
            "|".join(f".*{_word(draw)}.*{_word(draw)}" for _ in range(min(count, 100))),
            rf"[^x]*x.{{{count}}}y",
        ]
    )


def _patterns(draw: random.Random) -> Made:
    parts = [
        {"pattern": f"{_word(draw, 1, 2)}.*{_word(draw, 1, 2)}"} for _ in range(draw.randint(2, 12))
    ]
    return "json_schema", {"type": "string", "maxLength": draw.choice([20, 2000]), "allOf": parts}


def _ambiguous(draw: random.Random) -> Made:
    count = draw.choice([5, 100, 5_000])
    return "lark", draw.choice(
        [
            'start: s\ns: s s s | "a" | "a" "a" | ""',
            'start: e\ne: e e | e "+" e | /[a-z]+/ | /[a-z]*/ | '
            + " | ".join(f'"{_word(draw)}"' for _ in range(count)),
            'start: (("a"?)~1..400)~1..400 "b"',
            "start: "
            + " | ".join(f"/{_word(draw)}.*/ /.*{_word(draw)}/" for _ in range(min(count, 200))),
            "start: start",
            'start: a\na: b "x" | "y"\nb: a',
            "start: " + " ".join(["(/.*/)?"] * min(count, 300)),
        ]
    )


def _endless(draw: random.Random) -> Made:
    names = [f"n{i}" for i in range(draw.randint(1, 30))]
    defs = {
        name: {
            "type": "object",
            "properties": {"x": {"$ref": f"#/$defs/{draw.choice(names)}"}},
            "required": ["x"],
        }
        for name in names
    }
    return "json_schema", {"$ref": f"#/$defs/{names[0]}", "$defs": defs}


def _doubling(draw: random.Random) -> Made:
    """References that double at each step."""
    depth, keyword = draw.choice([8, 16, 40]), draw.choice(["allOf", "anyOf", "oneOf"])
    defs: dict[str, Any] = {
        f"d{i}": {keyword: [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]}
        for i in range(depth)
    }
    defs[f"d{depth}"] = {"type": "object", "properties": {"v": {"type": "integer"}}}
    return "json_schema", {"$ref": "#/$defs/d0", "$defs": defs}


def _conditions(draw: random.Random) -> Made:
    names = [f"p{i}" for i in range(draw.choice([4, 12, 60]))]
    return "json_schema", {
        "type": "object",
        "properties": {name: {"type": "integer"} for name in names},
        "dependentRequired": {name: draw.sample(names, 2) for name in names},
        "not": {"required": names[:3]},
    }


def _numbers(draw: random.Random) -> Made:
    high = 10.0 ** draw.randint(1, 15)
    part = {"type": "number", "minimum": -high * draw.random(), "maximum": high * draw.random()}
    step = draw.choice([0.1, 0.001, 7, 1234567])
    return "json_schema", {"anyOf": [part, {"type": "integer", "multipleOf": step, **part}]}


def _members(draw: random.Random) -> Made:
    count = draw.choice([100, 1_000, 6_000])
    return "json_schema", {
        "type": "object",
        "properties": {f"{_word(draw)}{i}": {"type": "integer"} for i in range(count)},
        "patternProperties": {
            f"^{_word(draw)}": {"type": "string"} for _ in range(draw.randint(0, 40))
        },
    }


def _any_of(draw: random.Random) -> Made:
    count = draw.choice([20, 300, 3_000])
    return "json_schema", {
        draw.choice(["anyOf", "oneOf"]): [
            {
                "type": "object",
                "properties": {"kind": {"const": f"k{i}"}, _word(draw): {}},
                "required": ["kind"],
            }
            for i in range(count)
        ]
    }


def _garbage(draw: random.Random) -> Made:
    kind = draw.choice(["regex", "lark", "json_schema", "choice", "structural", "pigeon"])
    return kind, "".join(draw.choices('(){}[]|*+?\\^$".:,aé\n', k=draw.randint(1, 400)))


KINDS: Final[dict[str, Callable[[random.Random], Made]]] = {
    "enum": _wide_enum,
    "choices": _alike_choices,
    "depth": _deep_objects,
    "bounds": _bounds,
    "repetitions": _repetitions,
    "states": _states,
    "patterns": _patterns,
    "ambiguous": _ambiguous,
    "endless": _endless,
    "doubling": _doubling,
    "conditions": _conditions,
    "numbers": _numbers,
    "members": _members,
    "branches": _any_of,
    "garbage": _garbage,
}
