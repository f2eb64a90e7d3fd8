"""Random trees of structural tags, and each as an expression of Python's, made without the engine.

Expressions in the trees are over digits and marks over other characters, so that the shortest text
before an end is the only one.
"""

import re
from collections.abc import Sequence
from typing import Any, Final

from hypothesis import strategies as st

_MARKS: Final = st.text(st.sampled_from('<>ab[]/"\\\n'), min_size=1, max_size=3)
_ENDS: Final = st.one_of(_MARKS, st.lists(_MARKS, min_size=1, max_size=2))
_LEAVES: Final = st.one_of(
    _MARKS.map(lambda text: {"type": "const_string", "value": text}),
    st.sampled_from(["[0-9]{1,2}", "0|12", "7+"]).map(lambda p: {"type": "regex", "pattern": p}),
    st.just({"type": "any_text"}),
)


def trees() -> st.SearchStrategy[Any]:
    """Of up to a dozen chunks; many are refused, because nothing ends their free text."""
    return st.recursive(_LEAVES, _around, max_leaves=6)


def _around(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    tags = st.builds(_tag, _MARKS, inner, _ENDS)
    flags = {"at_least_one": st.booleans(), "stop_after_first": st.booleans()}
    return st.one_of(
        st.builds(
            _list, st.sampled_from(["sequence", "or"]), st.lists(inner, min_size=1, max_size=3)
        ),
        st.builds(_times, st.sampled_from(["optional", "star", "plus"]), inner),
        tags,
        st.builds(_triggered, st.lists(tags, min_size=1, max_size=2), **flags),
        st.builds(_separated, st.lists(tags, min_size=1, max_size=2), _MARKS, **flags),
    )


def _tag(begin: str, content: Any, end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _list(kind: str, elements: list[Any]) -> dict[str, Any]:
    return {"type": kind, "elements": elements}


def _times(kind: str, content: Any) -> dict[str, Any]:
    return {"type": kind, "content": content}


def _triggered(tags: list[Any], **flags: bool) -> dict[str, Any]:
    triggers = sorted({tag["begin"][:1] for tag in tags})
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags, **flags}


def _separated(tags: list[Any], separator: str, **flags: bool) -> dict[str, Any]:
    return {"type": "tags_with_separator", "tags": tags, "separator": separator, **flags}


def expression(tree: Any) -> "re.Pattern[str]":
    """What whole answers match."""
    return re.compile(_of(tree, None), re.DOTALL)


def _any(texts: Sequence[str]) -> str:
    return f"(?:{'|'.join(map(re.escape, texts))})"


def _of(tree: Any, ends: Sequence[str] | None) -> str:
    """With what ends it; `ends` None: nothing does, or something else follows."""
    kind, tail = tree["type"], "" if ends is None else _any(ends)
    if kind == "any_text":
        return _free([], ends) + tail
    if kind == "sequence":
        return _row(tree["elements"], ends)
    if kind == "or":
        return f"(?:{'|'.join(_of(item, ends) for item in tree['elements'])})"
    if kind == "triggered_tags":
        return _islands(tree, ends)
    if kind == "const_string":
        return re.escape(str(tree["value"])) + tail
    if kind == "regex":
        return f"(?:{tree['pattern']}){tail}"
    if kind == "tag":
        return _wrapped(tree) + tail
    if kind == "tags_with_separator":
        one = f"(?:{'|'.join(map(_wrapped, tree['tags']))})"
        more = "" if tree["stop_after_first"] else f"(?:{re.escape(tree['separator'])}{one})*"
        return f"(?:{one}{more}){'' if tree['at_least_one'] else '?'}{tail}"
    times = {"optional": "?", "star": "*", "plus": "+"}[kind]
    return f"(?:{_of(tree['content'], None)}){times}{tail}"


def _row(items: list[Any], ends: Sequence[str] | None) -> str:
    """Free text is ended by a text behind it."""
    if len(items) == 1:
        return _of(items[0], ends)
    first, following = items[0], items[1]
    if first["type"] == "any_text" and following["type"] == "const_string":
        ended = _of(first, [following["value"]])
        rest = items[2:]
        return ended + (_row(rest, ends) if rest else "" if ends is None else _any(ends))
    return _of(first, None) + _row(items[1:], ends)


def _wrapped(tag: Any) -> str:
    ends = tag["end"] if isinstance(tag["end"], list) else [tag["end"]]
    return re.escape(str(tag["begin"])) + _of(tag["content"], ends)


def _free(triggers: Sequence[str], ends: Sequence[str] | None) -> str:
    """Text in which none of these begins."""
    stops = [*triggers, *(ends or ())]
    return f"(?:(?!{_any(stops)}).)*" if stops else ".*"


def _islands(tree: Any, ends: Sequence[str] | None) -> str:
    tail = "" if ends is None else _any(ends)
    one = f"(?:{'|'.join(map(_wrapped, tree['tags']))})"
    free = _free(tree["triggers"], ends)
    if tree["stop_after_first"]:
        return one + tail if tree["at_least_one"] else f"(?:{free}{one}{tail}|{free}{tail})"
    return f"{one if tree['at_least_one'] else ''}(?:{free}{one})*{free}{tail}"
