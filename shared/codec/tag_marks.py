"""Rules about the texts of structural tags: begins, ends, triggers, and which belong together."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from finback.shared.codec.tag_chunks import Tag, TagFault

MAX_TRIGGERS: Final = 64
MAX_MARK_CHARS: Final = 1024
_MAX_SHOWN_CHARS: Final = 64


def check_fields(given: Mapping[str, Any], known: Iterable[str], path: Sequence[str | int]) -> None:
    """Refuse the first field that is not `known`."""
    wanted = tuple(known)
    unknown = next((name for name in given if name not in wanted), None)
    if unknown is not None:
        where = (*path, str(unknown)[:_MAX_SHOWN_CHARS])
        raise TagFault(where, f"absent: there are {', '.join(wanted)}")


def check_mark(text: Any, path: Sequence[str | int]) -> None:
    """What begins something, or opens it."""
    if not isinstance(text, str) or not 0 < len(text) <= MAX_MARK_CHARS:
        raise TagFault(path, f"a text of 1 to {MAX_MARK_CHARS} characters")


def check_end(text: Any, path: Sequence[str | int]) -> None:
    """What ends something that may end by itself."""
    if not isinstance(text, str) or len(text) > MAX_MARK_CHARS:
        raise TagFault(path, f"a text of at most {MAX_MARK_CHARS} characters")


def tags_by_trigger(
    found: Any, tags: Sequence[Tag], path: Sequence[str | int]
) -> tuple[tuple[str, ...], tuple[tuple[Tag, ...], ...]]:
    """The triggers, and each one's tags. Every tag has one, and every trigger a tag."""
    triggers = _triggers(found, path)
    grouped: list[list[Tag]] = [[] for _ in triggers]
    for tag in tags:
        at = next((at for at, text in enumerate(triggers) if tag.begin.startswith(text)), None)
        if at is None:
            where = (*tag.path, "begin")
            raise TagFault(where, "a text that starts with one of the triggers")
        grouped[at].append(tag)
    idle = next((at for at, own in enumerate(grouped) if not own), None)
    if idle is not None:
        raise TagFault((*path, "triggers", idle), "what the begin of some structure starts with")
    return triggers, tuple(map(tuple, grouped))


def _triggers(found: Any, path: Sequence[str | int]) -> tuple[str, ...]:
    if not isinstance(found, list) or not 0 < len(found) <= MAX_TRIGGERS:
        raise TagFault((*path, "triggers"), f"a list of 1 to {MAX_TRIGGERS} texts")
    for index, trigger in enumerate(found):
        check_mark(trigger, (*path, "triggers", index))
    # The shorter one would open an island wherever the longer one is being written.
    for index, trigger in enumerate(found):
        for other, longer in enumerate(found):
            if other != index and trigger in longer:
                where = (*path, "triggers", other)
                raise TagFault(where, f"without another trigger, {trigger!r}, in it")
    return tuple(found)
