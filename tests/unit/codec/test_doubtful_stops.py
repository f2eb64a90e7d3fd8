"""Stops in doubt against a slow twin that asks about each match in turn."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finback.shared.codec.doubtful_stops import DoubtfulStops

LETTERS = "ab\n"
TEXT = st.text(LETTERS, max_size=6)
STOPS = st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=4)


def slow_scan(
    text: str, stops: list[str], is_whole: Callable[[str], bool]
) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        for stop in sorted(set(stops), key=len, reverse=True):
            if text[:end].endswith(stop) and is_whole(text[: end - len(stop)]):
                return text[: end - len(stop)], stop
    return text, None


@given(pieces=st.lists(TEXT, max_size=8), stops=STOPS, whole_at=st.sets(st.integers(0, 48)))
def test_matches_are_decided_in_order(
    pieces: list[str], stops: list[str], whole_at: set[int]
) -> None:
    """`whole_at`: the lengths at which the text so far is a whole answer."""
    matcher, shown, seen = DoubtfulStops(stops), "", ""
    for piece in pieces:
        seen += piece
        scan = matcher.push(piece)
        shown += scan.text
        while (doubt := matcher.doubt) is not None:
            assert seen.endswith(doubt)
            scan = matcher.decide(len(seen) - len(doubt) in whole_at)
            shown += scan.text
        if scan.matched is not None:
            break
    else:
        scan = matcher.push("")
        matcher.close()
        shown += matcher.push("").text + matcher.finish()
    expected = slow_scan("".join(pieces), stops, lambda text: len(text) in whole_at)
    assert (shown, scan.matched) == expected


def test_text_waits_behind_a_doubt() -> None:
    matcher = DoubtfulStops(["b"])
    assert matcher.push("ab").text == "" and matcher.doubt == "b"
    assert matcher.push("ab").text == "" and matcher.doubt == "bab"
    scan = matcher.decide(False)
    assert (scan.text, matcher.doubt) == ("", "b")
    assert matcher.decide(False).text == "abab" and matcher.doubt is None
    with pytest.raises(ValueError, match="no stop string"):
        matcher.decide(True)


def test_an_answer_that_ended_has_no_stops() -> None:
    matcher = DoubtfulStops(["end"])
    assert matcher.push("the e").text == "the "
    matcher.close()
    assert matcher.push("nd").text == "end" and matcher.doubt is None
