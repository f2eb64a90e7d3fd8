"""Structural tags: free text in which a trigger opens an island that is kept to a schema. Pure.

The form that xgrammar and the servers on it know: `{"type": "structural_tag", "structures": [{"begin",
"schema", "end"}], "triggers": [...]}`. Text is free up to a trigger; then comes the rest of one of the
`begin`s that start with it, a value of that structure's schema, its `end`, and free text again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

MAX_STRUCTURES: Final = 128
MAX_TRIGGERS: Final = 64
MAX_MARK_CHARS: Final = 1024
_FIELDS: Final = frozenset({"type", "structures", "triggers"})
_STRUCTURE_FIELDS: Final = ("begin", "schema", "end")


class TagFault(ValueError):
    """What is wrong with a structural tag. `path`: the keys and indices that lead there."""

    def __init__(self, path: Sequence[str | int], wanted: str) -> None:
        super().__init__(wanted)
        self.path = tuple(path)
        self.wanted = wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class TagStructure:
    """One kind of island. `rest`: what of its `begin` follows its trigger."""

    trigger: int
    rest: str
    schema: Any
    end: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuralTag:
    """`structures` in the order given; each belongs to one of the `triggers`."""

    triggers: tuple[str, ...]
    structures: tuple[TagStructure, ...]


def structural_tag_of(value: Any) -> StructuralTag:
    """Check a structural tag; whether its schemas can be enforced is not looked at.

    Raises `TagFault`.
    """
    if not isinstance(value, Mapping):
        raise TagFault((), "an object with structures and triggers")
    if "format" in value:
        raise TagFault(
            ("format",), "left out: only the form with 'structures' and 'triggers' is known here"
        )
    unknown = next((name for name in value if name not in _FIELDS), None)
    if unknown is not None:
        raise TagFault((str(unknown)[:64],), "absent: there are structures and triggers")
    if value.get("type", "structural_tag") != "structural_tag":
        raise TagFault(("type",), "'structural_tag'")
    triggers = _triggers(value.get("triggers"))
    found = value.get("structures")
    if not isinstance(found, list) or not 0 < len(found) <= MAX_STRUCTURES:
        raise TagFault(("structures",), f"a list of 1 to {MAX_STRUCTURES} structures")
    structures = tuple(_structure(item, index, triggers) for index, item in enumerate(found))
    used = {structure.trigger for structure in structures}
    idle = next((index for index in range(len(triggers)) if index not in used), None)
    if idle is not None:
        raise TagFault(("triggers", idle), "what the begin of some structure starts with")
    return StructuralTag(triggers=triggers, structures=structures)


def _triggers(found: Any) -> tuple[str, ...]:
    if not isinstance(found, list) or not 0 < len(found) <= MAX_TRIGGERS:
        raise TagFault(("triggers",), f"a list of 1 to {MAX_TRIGGERS} texts")
    for index, trigger in enumerate(found):
        _check_mark(trigger, ("triggers", index))
    # The shorter one would open an island wherever the longer one is being written.
    for index, trigger in enumerate(found):
        for other, longer in enumerate(found):
            if other != index and trigger in longer:
                raise TagFault(("triggers", other), f"without another trigger, {trigger!r}, in it")
    return tuple(found)


def _structure(found: Any, index: int, triggers: Sequence[str]) -> TagStructure:
    path = ("structures", index)
    if not isinstance(found, Mapping):
        raise TagFault(path, "an object with begin, schema and end")
    unknown = next((name for name in found if name not in _STRUCTURE_FIELDS), None)
    if unknown is not None:
        raise TagFault((*path, str(unknown)[:64]), "absent: there are begin, schema and end")
    begin, end = found.get("begin"), found.get("end")
    _check_mark(begin, (*path, "begin"))
    _check_mark(end, (*path, "end"))
    schema = found.get("schema")
    if not isinstance(schema, dict | bool):
        raise TagFault((*path, "schema"), "a JSON Schema")
    trigger = next((at for at, text in enumerate(triggers) if str(begin).startswith(text)), None)
    if trigger is None:
        raise TagFault((*path, "begin"), "a text that starts with one of the triggers")
    return TagStructure(
        trigger=trigger, rest=str(begin)[len(triggers[trigger]) :], schema=schema, end=str(end)
    )


def _check_mark(text: Any, path: Sequence[str | int]) -> None:
    if not isinstance(text, str) or not 0 < len(text) <= MAX_MARK_CHARS:
        raise TagFault(path, f"a text of 1 to {MAX_MARK_CHARS} characters")
