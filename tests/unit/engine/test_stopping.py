import hypothesis.strategies as st
import pytest
from hypothesis import given

from finback.shared.engine.stopping import Stop, find_stop, stop_ids
from finback.shared.wire.messages.generate import SamplingSpec


@pytest.mark.parametrize(
    ("tokens", "num_completion", "expected"),
    [
        ([5, 6], 0, Stop(2)),
        ([], 3, Stop(0)),
        ([5, 9, 6], 2, Stop(2, "stop", 9)),
        ([9, 9, 6], 0, Stop(3)),  # both lie before min_tokens
        ([9, 9, 9], 0, Stop(3, "stop", 9)),
        ([5, 6, 7], 3, Stop(2, "length")),
        ([5, 9, 7], 3, Stop(2, "stop", 9)),  # the last token that fits is a stop token
    ],
)
def test_first_stop(tokens: list[int], num_completion: int, expected: Stop) -> None:
    got = find_stop(
        tokens,
        num_completion=num_completion,
        max_completion=5,
        min_tokens=2,
        stops=frozenset({9}),
    )
    assert got == expected


@given(
    tokens=st.lists(st.integers(0, 4), max_size=12),
    cuts=st.lists(st.integers(1, 4), max_size=12),
    limit=st.integers(1, 12),
    min_tokens=st.integers(0, 4),
)
def test_the_same_stop_however_the_tokens_come(
    tokens: list[int], cuts: list[int], limit: int, min_tokens: int
) -> None:
    def run(pieces: list[list[int]]) -> tuple[list[int], str | None]:
        out: list[int] = []
        for piece in pieces:
            stop = find_stop(
                piece,
                num_completion=len(out),
                max_completion=limit,
                min_tokens=min_tokens,
                stops=frozenset({0}),
            )
            out += piece[: stop.num_kept]
            if stop.reason is not None:
                return out, stop.reason
        return out, None

    pieces, rest = [], list(tokens)
    for cut in cuts:
        pieces.append(rest[:cut])
        rest = rest[cut:]
    assert run([*pieces, rest]) == run([[token] for token in tokens])


def test_ignored_eos_leaves_the_asked_for_stops() -> None:
    assert stop_ids(SamplingSpec(stop_token_ids=(3,)), (1, 2)) == {1, 2, 3}
    assert stop_ids(SamplingSpec(stop_token_ids=(3,), ignore_eos=True), (1, 2)) == {3}
