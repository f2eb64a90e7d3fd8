"""What the drafter remembers: bounded, truncated where told, asked back when lost."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from finback.services.drafter.histories import IDLE_S, Histories, HistoryKey
from finback.shared.drafting.suffix_drafts import MatchPolicy, draft
from finback.shared.wire.messages.draft import Draft, DraftRow

POLICY = MatchPolicy(min_match=2, max_match=8)
KEY: HistoryKey = ("decode-a", 1, "r", 0)
LOOP = [1, 2, 3, 4] * 3


def row(position: int, token_ids: list[int], num_draft_tokens: int = 4) -> DraftRow:
    return DraftRow(
        request_id="r",
        choice=0,
        position=position,
        token_ids=np.array(token_ids, "<i4").tobytes(),
        num_draft_tokens=num_draft_tokens,
    )


def guess(found: Draft | None) -> list[int] | None:
    return None if found is None else np.frombuffer(found.token_ids, "<i4").tolist()


def test_a_guess_continues_at_the_end_of_what_was_told() -> None:
    histories = Histories(POLICY)
    assert histories.answer(KEY, row(0, LOOP[:3]), 0.0) is None
    found = histories.answer(KEY, row(3, LOOP[3:]), 0.0)
    assert found is not None and found.position == len(LOOP)
    assert guess(found) == [1, 2, 3, 4]


def test_lost_tokens_are_asked_for() -> None:
    histories = Histories(POLICY)
    found = histories.answer(KEY, row(5, [1]), 0.0)
    assert found is not None and found.need_from == 0 and found.token_ids == b""
    histories.answer(KEY, row(0, [1, 2]), 0.0)
    found = histories.answer(KEY, row(3, [4]), 0.0)
    assert found is not None and found.need_from == 2


def test_tokens_told_again_replace_what_was_known() -> None:
    histories = Histories(POLICY)
    histories.answer(KEY, row(0, [9] * 20), 0.0)
    found = histories.answer(KEY, row(0, LOOP), 0.0)
    assert guess(found) == [1, 2, 3, 4]
    assert guess(histories.answer(KEY, row(4, []), 0.0)) is None


@settings(max_examples=150)
@given(
    st.lists(st.tuples(st.integers(0, 12), st.lists(st.integers(0, 2), max_size=12)), max_size=12)
)
def test_it_remembers_what_a_list_would(told: list[tuple[int, list[int]]]) -> None:
    histories, known = Histories(POLICY), list[int]()
    for position, token_ids in told:
        found = histories.answer(KEY, row(position, token_ids), 0.0)
        if position > len(known):
            assert found is not None and found.need_from == len(known)
            continue
        known = known[:position] + token_ids
        expected = draft(np.array(known, np.int32), 4, POLICY).tolist()
        assert (guess(found) or []) == expected


def test_ended_and_idle_sequences_are_forgotten() -> None:
    histories = Histories(POLICY)
    other: HistoryKey = ("decode-a", 1, "r", 1)
    histories.answer(KEY, row(0, LOOP), 0.0)
    histories.answer(other, row(0, LOOP), 50.0)
    histories.end([KEY, KEY])
    assert len(histories) == 1
    assert histories.expire(50.0 + IDLE_S) == 1
    assert (len(histories), histories.num_tokens) == (0, 0)


def test_room_is_bounded_and_the_least_used_goes_first() -> None:
    histories = Histories(POLICY, max_tokens=1000)
    keys: list[HistoryKey] = [("decode-a", 1, "r", index) for index in range(10)]
    for key in keys:
        histories.answer(key, row(0, LOOP), 0.0)
        histories.answer(keys[0], row(len(LOOP), []), 0.0)
    assert histories.num_tokens <= 1000
    assert guess(histories.answer(keys[0], row(len(LOOP), []), 0.0)) == [1, 2, 3, 4]
    lost = histories.answer(keys[1], row(len(LOOP), []), 0.0)
    assert lost is not None and lost.need_from == 0


def test_callers_are_kept_apart_by_epoch() -> None:
    histories = Histories(POLICY)
    histories.answer(KEY, row(0, LOOP), 0.0)
    found = histories.answer(("decode-a", 2, "r", 0), row(len(LOOP), []), 0.0)
    assert found is not None and found.need_from == 0


def test_nonsense_is_asked_for_again() -> None:
    histories = Histories(POLICY)
    odd = DraftRow(request_id="r", choice=0, position=0, token_ids=b"abc", num_draft_tokens=3)
    for wrong in (odd, row(-1, [1])):
        found = histories.answer(KEY, wrong, 0.0)
        assert found is not None and found.need_from == 0
    assert histories.answer(KEY, row(0, LOOP, num_draft_tokens=-3), 0.0) is None
    huge = histories.answer(KEY, row(0, LOOP, num_draft_tokens=10**9), 0.0)
    assert huge is not None and len(huge.token_ids) == 4 * 64
