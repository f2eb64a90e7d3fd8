"""The matcher against a slow twin that looks at one character at a time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finback.shared.codec.stop_strings import StopMatcher

LETTERS = "ab\n"


def slow_scan(text: str, stops: list[str]) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


def scan(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    shown = ""
    for piece in pieces:
        result = matcher.push(piece)
        shown += result.text
        if result.matched is not None:
            return shown, result.matched
    return shown + matcher.finish(), None


@given(
    pieces=st.lists(st.text(LETTERS, max_size=6), max_size=8),
    stops=st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=4),
)
def test_any_chunking_equals_the_slow_scan(pieces: list[str], stops: list[str]) -> None:
    assert scan(pieces, stops) == slow_scan("".join(pieces), stops)


@given(
    pieces=st.lists(st.text(LETTERS, min_size=1, max_size=3), min_size=1, max_size=6),
    stops=st.lists(st.text(LETTERS, min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_holds_back_no_more_than_needed(pieces: list[str], stops: list[str]) -> None:
    matcher, shown, seen = StopMatcher(stops), "", ""
    for piece in pieces:
        seen += piece
        result = matcher.push(piece)
        shown += result.text
        if result.matched is not None:
            return
        held = seen[len(shown) :]
        could_match = {stop[:end] for stop in stops for end in range(1, len(stop))}
        assert held == max((p for p in could_match if seen.endswith(p)), key=len, default="")


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])
