"""State that was lost while block KV was kept: restored, replayed exactly, replayed in part."""

from typing import Final

import pytest
import torch
from transformers import DeepseekV4ForCausalLM
from unit.models.deepseek_v4.conftest import spoil

from finback.shared.models.deepseek_v4.memory import V4Memory
from finback.shared.models.deepseek_v4.network import V4Network
from finback.shared.models.deepseek_v4.snapshot import (
    restore_snapshot,
    snapshot_bytes,
    take_snapshot,
)
from support.v4_steps import prompt, step
from support.v4_tiny import oracle_logits

HIT: Final = 256
BLOCKS: Final = [4, 11, 3]
TOLERANCE: Final = 2e-5


@pytest.fixture
def ids() -> torch.Tensor:
    return prompt(HIT + 70, seed=9)


@pytest.fixture
def expected(oracle: DeepseekV4ForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    return oracle_logits(oracle, ids)[HIT:]


def go(
    network: V4Network, memory: V4Memory, ids: torch.Tensor, start: int, end: int, **how: int
) -> torch.Tensor:
    part = (ids[start:end], start, 2, BLOCKS)
    batch = step(part, **{name: [value] for name, value in how.items()})
    return network.logits(network.forward(batch, memory))


def entries(memory: V4Memory) -> list[torch.Tensor]:
    tables = [(layer.entries, layer.index_keys) for layer in memory.layers]
    held = [table for pair in tables for table in pair if table is not None]
    return [table.nan_to_num(nan=12345.0) for table in held]


def test_a_snapshot_brings_a_sequence_back_into_another_slot(
    network: V4Network, memory: V4Memory, ids: torch.Tensor, expected: torch.Tensor
) -> None:
    go(network, memory, ids, 0, HIT)
    data = take_snapshot(memory, 2, HIT)
    assert data.numel() == snapshot_bytes(network.config, 4)
    spoil(memory, blocks=False)
    restore_snapshot(memory, 0, HIT, data)
    batch = step((ids[HIT:], HIT, 0, BLOCKS))
    found = network.logits(network.forward(batch, memory))
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


def test_the_rows_that_the_next_entry_overlaps_belong_to_the_state(
    network: V4Network, memory: V4Memory, ids: torch.Tensor, expected: torch.Tensor
) -> None:
    """Without them the first three tokens are right, and then an entry is wrong."""
    go(network, memory, ids, 0, HIT)
    for layer in memory.layers:
        if layer.tail is not None:
            layer.tail.contents.zero_()
    found = go(network, memory, ids, HIT, ids.numel())
    torch.testing.assert_close(found[:3], expected[:3], atol=TOLERANCE, rtol=0)
    assert (found - expected).abs().max() > 0.1


def test_a_snapshot_of_another_size_or_place_is_refused(memory: V4Memory) -> None:
    data = take_snapshot(memory, 0, 128)
    for wrong in (data[:-1], torch.cat((data, data[:1]))):
        with pytest.raises(ValueError, match="a snapshot of this model has"):
            restore_snapshot(memory, 0, 128, wrong)
    for position in (0, 100, 130):
        with pytest.raises(ValueError, match="multiples of 128"):
            take_snapshot(memory, 0, position)


def test_an_exact_replay(
    network: V4Network, memory: V4Memory, ids: torch.Tensor, expected: torch.Tensor
) -> None:
    """num_layers * (window - 1) tokens bring every window row back; no cached entry is written."""
    go(network, memory, ids, 0, HIT)
    cached = entries(memory)
    spoil(memory, blocks=False)
    start = HIT - network.config.num_layers * (network.config.window - 1)
    go(network, memory, ids, start, HIT, replay_starts=start, entries_from=HIT)
    assert all(map(torch.equal, entries(memory), cached))
    found = go(network, memory, ids, HIT, ids.numel(), replay_starts=start, entries_from=HIT)
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


def test_the_error_of_a_bounded_replay_falls_with_its_length(
    network: V4Network, memory: V4Memory, ids: torch.Tensor, expected: torch.Tensor
) -> None:
    """As the digest's table, section 3.3: many argmax changes at one window, fewer at each more."""
    changes, errors = [], []
    for num_windows in (0, 1, 2, 3):
        spoil(memory)
        go(network, memory, ids, 0, HIT)
        spoil(memory, blocks=False)
        start = HIT - num_windows * network.config.window
        if num_windows:
            go(network, memory, ids, start, HIT, replay_starts=start, entries_from=HIT)
        else:
            _forget_tails(memory)
        found = go(network, memory, ids, HIT, ids.numel(), replay_starts=start, entries_from=HIT)
        changes.append(int((found.argmax(-1) != expected.argmax(-1)).sum()))
        errors.append(float((found - expected).abs().mean()))
    assert changes == sorted(changes, reverse=True)
    assert errors == sorted(errors, reverse=True)
    assert changes[0] > 0
    assert errors[3] < errors[1] / 10


def _forget_tails(memory: V4Memory) -> None:
    for layer in memory.layers:
        for tail in (layer.tail, layer.index_tail):
            if tail is not None:
                tail.contents.zero_()
                tail.gates.fill_(-1e4)


def test_a_replay_does_not_reach_before_its_start(
    network: V4Network, memory: V4Memory, ids: torch.Tensor
) -> None:
    """What lies in the ring from before is of no influence."""
    go(network, memory, ids, 0, HIT)
    start = HIT - 24
    first = go(network, memory, ids, start, HIT, replay_starts=start, entries_from=HIT)
    spoil(memory, blocks=False)
    again = go(network, memory, ids, start, HIT, replay_starts=start, entries_from=HIT)
    assert torch.equal(first, again)
