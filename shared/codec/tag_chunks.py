"""What a structural tag is made of. Every chunk knows the path to it in what the client wrote."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Path: TypeAlias = tuple[str | int, ...]


class TagFault(ValueError):
    """What is wrong with a structural tag. `path`: the keys and indices that lead there."""

    def __init__(self, path: Sequence[str | int], wanted: str) -> None:
        super().__init__(wanted)
        self.path = tuple(path)
        self.wanted = wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Const:
    """This text."""

    path: Path
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """A JSON value."""

    path: Path
    schema: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Regex:
    """Text that an expression matches; before an end, the shortest such text."""

    path: Path
    pattern: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AnyText:
    """Free text, up to what ends it."""

    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One after the other."""

    path: Path
    items: tuple["Chunk", ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Either:
    """One of several."""

    path: Path
    items: tuple["Chunk", ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """From `low` to `high` times; None: any number."""

    path: Path
    item: "Chunk"
    low: int
    high: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tag:
    """`begin`, the content, one of `ends`."""

    path: Path
    begin: str
    content: "Chunk"
    ends: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Triggered:
    """Free text in which a trigger begins one of its tags: `tags[i]` are those of `triggers[i]`.

    `needs_one`: a tag comes first, before any text. `stops_after_one`: nothing comes behind a tag.
    """

    path: Path
    triggers: tuple[str, ...]
    tags: tuple[tuple[Tag, ...], ...]
    needs_one: bool = False
    stops_after_one: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Separated:
    """Tags with a text between two of them, and nothing else."""

    path: Path
    tags: tuple[Tag, ...]
    separator: str
    needs_one: bool = False
    stops_after_one: bool = False


Chunk: TypeAlias = (
    Const | Schema | Regex | AnyText | Row | Either | Repeat | Tag | Triggered | Separated
)
