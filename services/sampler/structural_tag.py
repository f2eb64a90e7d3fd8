"""Structural tags to the engine's grammars: a lazy lexeme up to each trigger or end, parts between.

The engine ends a lazy lexeme as soon as it matches, so that free text can never run over a trigger:
what opens an island has to go on as one. Free text ends with the first of its ends, or with the answer.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from finback.services.sampler.schema_fault import SchemaFault, child
from finback.shared.codec.structural_tags import structural_tag_of
from finback.shared.codec.tag_chunks import (
    AnyText,
    Chunk,
    Const,
    Either,
    Path,
    Regex,
    Repeat,
    Row,
    Schema,
    Separated,
    Tag,
    TagFault,
    Triggered,
)

# As in the answers of `codec.formats.surface`: a marker may have a token of its own.
_OPTIONS: Final = '%llguidance {"no_forcing": true}'
_TEXT: Final = "TEXT: /(.|\\n)*/"
# Texts of which one follows; None: nothing does, the answer is over; empty: something else follows.
Ends: TypeAlias = Sequence[str] | None
# (schema, pointer to it) -> the schema with the options that the engine is given.
ReadSchema = Callable[[Any, str], dict[str, Any]]
# (expression, pointer to it) -> the expression as the engine's Lark has it, between slashes.
ReadRegex = Callable[[str, str], str]


def tag_grammars(
    name: str, text: str, read: ReadSchema, read_regex: ReadRegex
) -> list[dict[str, Any]]:
    """The engine's grammars of the structural tag in `text`; the one called `name` is the whole.

    Raises `SchemaFault`, with a pointer into the tag.
    """
    try:
        chunk = structural_tag_of(json.loads(text))
        lark = _Lark(name, read, read_regex)
        return lark.grammars(chunk)
    except TagFault as fault:
        raise SchemaFault(
            f"it must be {fault.wanted}", pointer=child("#", *fault.path), reason="structural_tag"
        ) from None
    except (ValueError, RecursionError) as error:
        raise SchemaFault(f"this is no JSON: {error}", pointer="#", reason="json") from None


class _Lark:
    """Collects rules and schemas. Expressions of chunks include what ends them."""

    def __init__(self, name: str, read: ReadSchema, read_regex: ReadRegex) -> None:
        self._name = name
        self._read = read
        self._read_regex = read_regex
        self._rules: list[str] = []
        self._schemas: list[dict[str, Any]] = []
        self._names: dict[Path, str] = {}

    def grammars(self, chunk: Chunk) -> list[dict[str, Any]]:
        """The whole, then its schemas."""
        start = self._put(chunk, None)
        lark = "\n".join([_OPTIONS, f"start: {start}", _TEXT, *self._rules])
        return [{"name": self._name, "lark_grammar": lark}, *self._schemas]

    def _put(self, chunk: Chunk, ends: Ends) -> str:
        if isinstance(chunk, Row):
            return self._row(chunk, ends)
        if isinstance(chunk, Either):
            return f"({' | '.join(self._put(item, ends) for item in chunk.items)})"
        if isinstance(chunk, AnyText):
            return self._text(chunk.path, ends)
        if isinstance(chunk, Triggered):
            return self._triggered(chunk, ends)
        if isinstance(chunk, Regex):
            return self._regex(chunk, ends)
        return f"{self._bounded(chunk)} {_one_of(ends)}"

    def _bounded(self, chunk: Const | Schema | Repeat | Tag | Separated) -> str:
        """Of what ends by itself."""
        if isinstance(chunk, Const):
            return _quoted(chunk.text)
        if isinstance(chunk, Schema):
            return self._schema(chunk)
        if isinstance(chunk, Tag):
            return self._tag(chunk, chunk.begin)
        if isinstance(chunk, Separated):
            return self._separated(chunk)
        high = "" if chunk.high is None else chunk.high
        return f"({self._put(chunk.item, ())}){{{chunk.low},{high}}}"

    def _schema(self, chunk: Schema) -> str:
        """Read once, wherever it is used."""
        if chunk.path not in self._names:
            name = self._names[chunk.path] = f"{self._name}_s{len(self._schemas)}"
            schema = self._read(chunk.schema, child("#", *chunk.path))
            self._schemas.append({"name": name, "json_schema": schema})
        return f"@{self._names[chunk.path]}"

    def _regex(self, chunk: Regex, ends: Ends) -> str:
        pattern = self._read_regex(chunk.pattern, child("#", *chunk.path))
        if not ends or not all(ends):
            return f"{pattern} {_one_of(ends)}"
        return self._rule(f"{pattern} {_one_of(ends)}", is_lazy=True)

    def _row(self, chunk: Row, ends: Ends) -> str:
        """Free text may be ended by a text that follows."""
        out, items = [], list(chunk.items)
        while items:
            item = items.pop(0)
            following = items[0] if items else None
            if isinstance(item, AnyText | Regex) and isinstance(following, Const):
                items.pop(0)
                out.append(self._put(item, (following.text,)))
                out += [] if items else [_one_of(ends)]
            else:
                out.append(self._put(item, () if items else ends))
        return " ".join(out)

    def _tag(self, tag: Tag, begin: str) -> str:
        """`begin`: what of its own is still to come."""
        return f"{_quoted(begin)} {self._put(tag.content, tag.ends)}"

    def _triggered(self, chunk: Triggered, ends: Ends) -> str:
        _check_apart(chunk, ends)
        first = " | ".join(self._tag(tag, tag.begin) for own in chunk.tags for tag in own)
        if chunk.needs_one and chunk.stops_after_one:
            return f"({first}) {_one_of(ends)}"
        islands = []
        for trigger, own in zip(chunk.triggers, chunk.tags, strict=True):
            head = self._rule(f"TEXT {_quoted(trigger)}", is_lazy=True)
            bodies = (self._tag(tag, tag.begin[len(trigger) :]) for tag in own)
            islands.append(self._rule(f"{head} ({' | '.join(bodies)})"))
        island, tail = " | ".join(islands), self._text(chunk.path, ends)
        if chunk.stops_after_one:
            return f"(({island}) {_one_of(ends)} | {tail})"
        return f"{f'({first}) ' if chunk.needs_one else ''}({island})* {tail}"

    def _separated(self, chunk: Separated) -> str:
        one = self._rule(" | ".join(self._tag(tag, tag.begin) for tag in chunk.tags))
        more = "" if chunk.stops_after_one else f" ({_quoted(chunk.separator)} {one})*"
        return f"({one}{more}){'' if chunk.needs_one else '?'}"

    def _text(self, path: Path, ends: Ends) -> str:
        if ends is None:
            return "TEXT"
        if not ends or not all(ends):
            raise TagFault(path, "before something that ends it: free text would have no end here")
        return self._rule(f"TEXT {_one_of(ends)}", is_lazy=True)

    def _rule(self, body: str, *, is_lazy: bool = False) -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{'[lazy]' if is_lazy else ''}: {body}")
        return name


def _check_apart(chunk: Triggered, ends: Ends) -> None:
    """A trigger in an end, or an end in a trigger: the other one could never come."""
    for index, trigger in enumerate(chunk.triggers):
        if any(end and (end in trigger or trigger in end) for end in ends or ()):
            raise TagFault(
                (*chunk.path, "triggers", index), "apart from the end of the tag around it"
            )


def _one_of(ends: Ends) -> str:
    texts = [_quoted(end) for end in ends or () if end]
    is_optional = len(texts) < len(ends or ())
    return f"({' | '.join(texts)}){'?' if is_optional else ''}" if texts else ""


def _quoted(text: str) -> str:
    """A Lark string, which no DEL may stand in as it is; nothing for nothing."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f") if text else ""
