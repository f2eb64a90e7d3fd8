"""One instance of every wire message, every field filled; and the stored bytes of such."""

import dataclasses
import importlib
import json
import pkgutil
import types
import typing
from pathlib import Path
from typing import Any

from finback.shared.errors import WireError
from finback.shared.wire import codec, messages

GOLDEN = Path(__file__).parents[1] / "contract" / "wire" / "golden.json"
# Where the generated value would not be a legal one.
_SPECIAL: dict[tuple[str, str], Any] = {}


def message_types() -> list[type]:
    """Every declared message, by schema."""
    modules = [
        importlib.import_module(f"{messages.__name__}.{info.name}")
        for info in pkgutil.iter_modules(messages.__path__)
    ]
    modules.append(importlib.import_module("finback.shared.lanes.ticket"))
    found = {
        codec.schema_of(value): value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and dataclasses.is_dataclass(value) and _is_message(value)
    }
    return [found[schema] for schema in sorted(found)]


def sample(message_type: type) -> Any:
    """The same values every time."""
    hints = typing.get_type_hints(message_type)
    name = message_type.__name__
    values = {
        field.name: _SPECIAL.get((name, field.name), _value(hints[field.name]))
        for field in dataclasses.fields(message_type)
    }
    return message_type(**values)


def stored() -> dict[str, list[str]]:
    """Hex of MessagePack by schema, oldest first."""
    text = GOLDEN.read_text(encoding="utf-8") if GOLDEN.exists() else "{}"
    found: dict[str, list[str]] = json.loads(text)
    return found


def add_missing() -> list[str]:
    """Store bytes for new messages and for those with new fields; nothing stored ever changes."""
    golden, added = stored(), []
    for message_type in message_types():
        schema = codec.schema_of(message_type)
        known = golden.setdefault(schema, [])
        now = codec.pack(sample(message_type)).hex()
        if now not in known:
            known.append(now)
            added.append(schema)
    GOLDEN.write_text(json.dumps(golden, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return added


def _is_message(value: type) -> bool:
    try:
        codec.schema_of(value)
    except WireError:
        return False
    return True


def _value(hint: Any) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return _value(next(arg for arg in args if arg is not types.NoneType))
    if origin is tuple:
        inner = args[:1] * 2 if args[-1] is Ellipsis else args
        return tuple(_value(arg) for arg in inner)
    if origin is dict:
        return {_value(args[0]): _value(args[1])}
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return sample(hint)
    plain = {bool: True, int: 7, float: 0.5, str: "x", bytes: b"\x01\xff"}
    return plain[hint]


if __name__ == "__main__":
    add_missing()
