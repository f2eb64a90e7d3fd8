"""The windowed network against transformers: whole, in chunks, in company, verifying and replaying."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from finback.shared.errors import InvalidRequest, InvariantViolated
from finback.shared.kv.state import read_header
from finback.shared.models.loader import load_model
from finback.shared.models.source import open_source
from support.forward_batches import Chunk
from support.tiny_folders import hf_logits, save_hf
from support.windowed import REPLAY, WINDOW, Steps, windowed_model, windowed_oracle

TOKENS = torch.randint(0, 96, (61,), generator=torch.Generator().manual_seed(3)).tolist()
OTHER = torch.randint(0, 96, (37,), generator=torch.Generator().manual_seed(4)).tolist()
BLOCKS = [3, 0, 5, 1, 7, 2, 6, 4]
ATOL = 1e-4
"""Largest logits are about 10; float32 on both sides, summed in other orders."""


@pytest.fixture(scope="module")
def wanted() -> torch.Tensor:
    return hf_logits(windowed_oracle(), TOKENS)


def _chunk(tokens: list[int], start: int, end: int, blocks: list[int] | None = None) -> Chunk:
    return Chunk(token_ids=tokens[start:end], first=start, blocks=blocks or BLOCKS)


def _in_chunks(steps: Steps, ends: list[int]) -> torch.Tensor:
    return torch.cat([steps.run([_chunk(TOKENS, a, b)]) for a, b in pairwise([0, *ends])])


@pytest.mark.parametrize(
    "ends",
    [[61], [7, 8, 29, 31, 61], list(range(1, 62)), [WINDOW - 1, WINDOW, 2 * WINDOW, 61], [40, 61]],
)
@pytest.mark.parametrize("mode", ["fast", "reference", "deterministic"])
def test_chunks_equal_transformers(mode: str, ends: list[int], wanted: torch.Tensor) -> None:
    found = _in_chunks(Steps(windowed_model(mode)), ends)
    torch.testing.assert_close(found, wanted, atol=ATOL, rtol=0)


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 1},
        {"sliding_window": 200},
        {"layer_types": ["full_attention"] * 3 + ["sliding_attention"]},
        {"layer_types": None, "max_window_layers": 2, "tie_word_embeddings": True},
    ],
)
def test_other_shapes(changes: dict[str, Any], tmp_path: Path) -> None:
    oracle = windowed_oracle(**changes)
    model = load_model(open_source(save_hf(oracle, tmp_path)), num_threads=1)
    found = _in_chunks(Steps(model), [7, 20, 61])
    torch.testing.assert_close(found, hf_logits(oracle, TOKENS), atol=ATOL, rtol=0)


def test_unequal_lengths_in_one_step(wanted: torch.Tensor) -> None:
    """Chunks and single rows of two sequences, whose slots are not in order, side by side."""
    steps, others = Steps(windowed_model()), [8, 9, 10, 11, 12]
    of_other = hf_logits(windowed_oracle(), OTHER)
    plan = [(20, 5), (21, 30), (22, 31), (50, 32), (51, 37)]
    found: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    last = (0, 0)
    for end in plan:
        chunks = [_chunk(TOKENS, last[0], end[0]), _chunk(OTHER, last[1], end[1], others)]
        logits = steps.run(chunks, slots=[2, 0])
        found[0].append(logits[: end[0] - last[0]])
        found[1].append(logits[end[0] - last[0] :])
        last = end
    torch.testing.assert_close(torch.cat(found[0]), wanted[:51], atol=ATOL, rtol=0)
    torch.testing.assert_close(torch.cat(found[1]), of_other, atol=ATOL, rtol=0)


def test_refused_drafts_need_no_undo(wanted: torch.Tensor) -> None:
    """Rows of wrong tokens are written over; as many as the ring has room for."""
    steps = Steps(windowed_model(), rollback=5)
    steps.run([_chunk(TOKENS, 0, 19)])
    for position in range(19, 40, 2):  # a right draft, then four wrong ones
        drafts = [TOKENS[position], TOKENS[position + 1], 0, 1, 2]
        rows = steps.run([Chunk(token_ids=drafts, first=position, blocks=BLOCKS)])
        torch.testing.assert_close(rows[:2], wanted[position : position + 2], atol=ATOL, rtol=0)


def test_deterministic_rows_know_no_company() -> None:
    alone = _in_chunks(Steps(windowed_model("deterministic")), list(range(1, 62)))
    chunked = _in_chunks(Steps(windowed_model("deterministic")), [17, 40, 61])
    assert torch.equal(alone, chunked)


@pytest.mark.parametrize("position", [0, 2, WINDOW - 2, 8, 24])
def test_snapshots_go_on_as_if_nothing_had_been(position: int, wanted: torch.Tensor) -> None:
    """Pack in one slot, unpack in another that somebody else has used."""
    steps = Steps(windowed_model(), rollback=5)
    if position:
        steps.run([_chunk(TOKENS, 0, position)])
    payload = steps.state.pack(0, position, 0, position)
    assert read_header(payload, steps.state.spec).position == position
    steps.run([_chunk(OTHER, 0, 37, [8, 9, 10, 11, 12])], slots=[3])
    assert steps.state.unpack(3, payload).floor == 0
    found = steps.run([_chunk(TOKENS, position, 40)], slots=[3])
    torch.testing.assert_close(found, wanted[position:40], atol=ATOL, rtol=0)


def test_a_snapshot_a_few_tokens_late(wanted: torch.Tensor) -> None:
    steps = Steps(windowed_model(), rollback=5)
    steps.run([_chunk(TOKENS, 0, 24)])
    on_time = steps.state.pack(0, 24, 0, 24)
    steps.run([_chunk(TOKENS, 24, 29)])
    assert steps.state.pack(0, 24, 0, 29) == on_time
    with pytest.raises(InvariantViolated, match="the state at 23 is gone"):
        steps.state.pack(0, 23, 0, 29)


def test_payloads_that_do_not_fit() -> None:
    steps = Steps(windowed_model())
    payload = steps.state.pack(0, 0, 0, 0)
    for wrong, message in (
        (payload[:-1], "the state at 0 has [0-9]+ bytes, not"),
        (payload[:3], "24 bytes at least"),
        (b"x" + payload[1:], "no state of version 1"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            steps.state.unpack(0, wrong)


@pytest.mark.parametrize("mode", ["fast", "deterministic"])
def test_exact_replay_is_exact_and_leaves_blocks_alone(mode: str, wanted: torch.Tensor) -> None:
    """From L (W - 1) tokens before the hit, in a slot without any state; one token less shows."""
    steps = Steps(windowed_model(mode))
    hit = 40
    undisturbed = _in_chunks(steps, [hit, 61])
    kept = (steps.pool.k[:, BLOCKS[:5]].clone(), steps.pool.v[:, BLOCKS[:5]].clone())
    errors = []
    for num_replayed in (REPLAY, REPLAY - 4, 1):
        start = hit - num_replayed
        for begin, end in pairwise([start, start + 2, hit + 3]):  # replayed and new in one chunk
            steps.run([_chunk(TOKENS, begin, end)], [1], [start], hit)
        found = steps.run([_chunk(TOKENS, hit + 3, 61)], [1], [start], hit)
        errors.append(float((found - undisturbed[hit + 3 :]).abs().max()))
        assert torch.equal(kept[0], steps.pool.k[:, BLOCKS[:5]])
        assert torch.equal(kept[1], steps.pool.v[:, BLOCKS[:5]])
        if num_replayed == REPLAY and mode == "deterministic":
            assert torch.equal(found, undisturbed[hit + 3 :])
    assert errors[0] < ATOL < errors[2]
    assert float((undisturbed - wanted).abs().max()) < ATOL
