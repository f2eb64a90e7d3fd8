"""The requests in hand: attempts, ends, and resuming from any offset."""

import numpy as np
import pytest

from finback.services.decode.table import Choice, ChoiceState, Request, RequestTable
from finback.shared.wire.messages.generate import (
    ChoiceSpec,
    EndInfo,
    GenerationSpec,
    SamplingSpec,
)


def request(attempt: int = 1, num_choices: int = 1, gateway: str = "gateway-1") -> Request:
    spec = GenerationSpec(
        request_id="r",
        attempt=attempt,
        model="m",
        token_ids=b"\0" * 8,
        sampling=SamplingSpec(),
        choices=tuple(ChoiceSpec(index=i, seed=i) for i in range(num_choices)),
        gateway=gateway,
    )
    return Request(
        spec=spec,
        prompt=spec.token_ids,
        parent=None,
        heard_s=0.0,
        deadline_s=1.0,
        prefill_instance="prefill-1",
    )


def ids(*values: int) -> bytes:
    return np.array(values, dtype="<i4").tobytes()


def test_attempts_are_told_apart() -> None:
    table = RequestTable()
    table.add(request(attempt=2))
    assert table.get("r", 1) is None
    assert table.choice(("r", 0), 2) is not None
    assert table.choice(("r", 0)) is not None
    assert table.choice(("r", 1)) is None


def test_fence_holds_older_attempts_only() -> None:
    table = RequestTable()
    table.fence("r", 2)
    assert table.is_fenced("r", 1) and table.is_fenced("r", 2) and not table.is_fenced("r", 3)
    table.fence("r", 1)
    assert table.is_fenced("r", 2)


def test_fences_are_bounded() -> None:
    table = RequestTable()
    for i in range(9000):
        table.fence(f"r{i}", 1)
    assert not table.is_fenced("r0", 1) and table.is_fenced("r8999", 1)


def test_who_waits_for_whom() -> None:
    table = RequestTable()
    added = request(num_choices=2)
    table.add(added)
    assert table.live_gateways() == {"gateway-1"}
    assert table.awaiting("prefill-1") == [added] and table.by_gateway("gateway-1") == [added]
    added.is_activated = True
    assert table.awaiting("prefill-1") == []
    for choice in added.choices.values():
        choice.state = ChoiceState.ENDED
    assert table.live_gateways() == set() and added.is_ended


def test_resume_from_any_offset() -> None:
    choice = Choice(request_id="r", index=0, attempt=1)
    choice.append(0, ids(5, 6), ())
    choice.append(2, ids(7), ())
    choice.end = EndInfo(finish_reason="stop")
    assert choice.row_from(1).token_ids == ids(6, 7)
    assert choice.row_from(1).offset == 1
    past = choice.row_from(9)
    assert (past.offset, past.token_ids, past.end) == (3, b"", choice.end)


def test_a_gap_is_refused() -> None:
    choice = Choice(request_id="r", index=0, attempt=1)
    with pytest.raises(ValueError, match="do not continue"):
        choice.append(1, ids(1), ())
