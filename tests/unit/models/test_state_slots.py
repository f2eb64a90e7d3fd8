"""Slots of any parts against a list of rows: windows, what waits for an entry to close, what overlaps."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from finback.shared.kv.state import StatePart, StateSpec
from finback.shared.models.state_slots import StateSlots

PARTS = (
    StatePart(name="ring", num_layers=3, lookback_tokens=6, shape=(2, 4), dtype="bf16"),
    StatePart(
        name="overlap", num_layers=2, lookback_tokens=4, period_tokens=4, shape=(5,), dtype="f32"
    ),
    StatePart(
        name="open", num_layers=1, lookback_tokens=0, period_tokens=16, shape=(3,), dtype="f32"
    ),
)
SPEC = StateSpec(parts=PARTS, replay_tokens=18, window_tokens=7)


def _write(slots: StateSlots, slot: int, history: dict[str, torch.Tensor], at: int) -> None:
    for name, rows in slots.rows.items():
        rows[:, slot, at % rows.shape[2]] = history[name][:, at]


@settings(deadline=None, max_examples=60)
@given(
    position=st.integers(0, 50),
    late=st.integers(0, 3),
    rollback=st.integers(3, 5),
    floor=st.integers(0, 60),
)
def test_a_state_moves_whole(position: int, late: int, rollback: int, floor: int) -> None:
    """Whatever a token at `position` may look at is there after pack and unpack, at any position."""
    floor = min(floor, position)
    torch.manual_seed(position)
    slots = StateSlots(SPEC, num_slots=3, rollback_tokens=rollback)
    history = {
        p.name: torch.randn(p.num_layers, 64, *p.shape).to(slots.rows[p.name].dtype) for p in PARTS
    }
    for at in range(floor, position + late):
        _write(slots, 1, history, at)
    payload = slots.pack(1, position, floor, position + late)
    assert len(payload) == SPEC.payload_bytes_at(position) <= SPEC.most_payload_bytes
    for rows in slots.rows.values():
        rows[:, 2] = 7.0
    header = slots.unpack(2, payload)
    assert (header.position, header.floor) == (position, floor)
    for part in PARTS:
        rows = slots.rows[part.name]
        for at in range(max(floor, position - part.rows_at(position)), position):
            assert torch.equal(rows[:, 2, at % rows.shape[2]], history[part.name][:, at])
    assert slots.pack(2, position, floor, position) == payload
    assert slots.num_bytes == 3 * SPEC.slot_bytes(rollback)
