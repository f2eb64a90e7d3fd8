"""Prompt lookup in the process: what it knows, what it guesses, and when it leaves off."""

import numpy as np

from finback.shared.engine.output import SequenceOutput
from finback.shared.offline.drafter import LocalDrafter

KEY = ("r", 0)


def _row(*token_ids: int, num_drafted: int = 0, num_accepted: int = 0) -> SequenceOutput:
    return SequenceOutput(
        key=KEY,
        attempt=1,
        offset=0,
        token_ids=np.array(token_ids, dtype=np.int32),
        num_drafted=num_drafted,
        num_accepted=num_accepted,
    )


def _guess(drafter: LocalDrafter) -> tuple[int, list[int]] | None:
    found = list(drafter.drafts([KEY], 1, ()))
    return (found[0][1], found[0][2].tolist()) if found else None


def test_it_guesses_from_prompt_and_completion() -> None:
    drafter = LocalDrafter(2)
    drafter.add(KEY, np.array([1, 2, 3, 4, 5, 6], dtype=np.int32))
    assert _guess(drafter) is None
    for token_id in (1, 2, 3):
        drafter.step(_row(token_id))
    assert _guess(drafter) == (9, [4, 5, 6, 1, 2])
    drafter.end(KEY)
    assert len(drafter) == 0
    assert _guess(drafter) is None
    drafter.step(_row(4))  # what ended is not known any more


def test_it_leaves_off_where_guesses_are_wrong() -> None:
    drafter = LocalDrafter(2)
    drafter.add(KEY, np.array([7, 7, 7, 7, 7, 7], dtype=np.int32))
    asked = 0
    for _ in range(40):
        asked += _guess(drafter) is not None
        drafter.step(_row(7, num_drafted=2, num_accepted=0))
    assert 0 < asked < 20
