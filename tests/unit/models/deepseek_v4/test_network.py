"""The network against transformers: whole, in chunks, in steps, in mixed batches."""

from collections.abc import Sequence
from typing import Final

import pytest
import torch
from transformers import DeepseekV4ForCausalLM

from finback.shared.models.deepseek_v4.memory import V4Memory
from finback.shared.models.deepseek_v4.network import V4Network
from support.v4_steps import prompt, step
from support.v4_tiny import oracle_logits, oracle_state

TOLERANCE: Final = 2e-5
BLOCKS: Final = [7, 2, 9]


def run(
    network: V4Network, memory: V4Memory, ids: torch.Tensor, chunks: Sequence[int], slot: int = 1
) -> torch.Tensor:
    found, start = [], 0
    for size in chunks:
        batch = step((ids[start : start + size], start, slot, BLOCKS))
        found.append(network.logits(network.forward(batch, memory)))
        start += size
    assert start == ids.numel()
    return torch.cat(found)


def cut(total: int, sizes: Sequence[int]) -> list[int]:
    plan: list[int] = []
    while total:
        plan.append(min(sizes[len(plan) % len(sizes)], total))
        total -= plan[-1]
    return plan


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 8, 41, 127, 128, 131, 280])
@pytest.mark.parametrize(
    "sizes", [(1000,), (7, 1, 64, 130, 3), (128,)], ids=["whole", "odd", "128"]
)
def test_a_prompt(
    network: V4Network,
    memory: V4Memory,
    oracle: DeepseekV4ForCausalLM,
    num_tokens: int,
    sizes: tuple[int, ...],
) -> None:
    ids = prompt(num_tokens)
    found = run(network, memory, ids, cut(num_tokens, sizes))
    torch.testing.assert_close(found, oracle_logits(oracle, ids), atol=TOLERANCE, rtol=0)


def test_token_by_token(
    network: V4Network, memory: V4Memory, oracle: DeepseekV4ForCausalLM
) -> None:
    ids = prompt(140)
    found = run(network, memory, ids, [1] * 140)
    torch.testing.assert_close(found, oracle_logits(oracle, ids), atol=TOLERANCE, rtol=0)


def test_a_batch_of_chunks_and_steps(
    network: V4Network, memory: V4Memory, oracle: DeepseekV4ForCausalLM
) -> None:
    """Three sequences of unequal lengths; each step takes another mix of them."""
    prompts = [prompt(150, seed=1), prompt(37, seed=2), prompt(131, seed=3)]
    blocks = [[3, 8], [5, 6], [10, 1]]
    at = [0, 0, 0]
    logits: list[list[torch.Tensor]] = [[], [], []]
    generator = torch.Generator().manual_seed(5)
    while any(start < ids.numel() for start, ids in zip(at, prompts, strict=True)):
        parts, whose = [], []
        for index, ids in enumerate(prompts):
            size = int(torch.randint(0, 60, (1,), generator=generator))
            piece = ids[at[index] : at[index] + size]
            if piece.numel():
                parts.append((piece, at[index], index, blocks[index]))
                whose.append(index)
                at[index] += piece.numel()
        if not parts:
            continue
        found = network.logits(network.forward(step(*parts), memory))
        for index, piece in zip(
            whose, torch.split(found, [ids.numel() for ids, *_ in parts]), strict=True
        ):
            logits[index].append(piece)
    for ids, pieces in zip(prompts, logits, strict=True):
        expected = oracle_logits(oracle, ids)
        torch.testing.assert_close(torch.cat(pieces), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("start", [30, 122, 126, 127, 128, 255])
def test_rejected_drafts_leave_nothing(
    network: V4Network, memory: V4Memory, oracle: DeepseekV4ForCausalLM, start: int
) -> None:
    """Four wrong drafts a step, of which none is accepted; then right ones, all accepted."""
    ids = prompt(start + 24, seed=4)
    wrong = prompt(start + 24, seed=5)
    expected = oracle_logits(oracle, ids)
    run(network, memory, ids[:start], [start])
    for at in range(start, start + 9):
        drafts = torch.cat((ids[at : at + 1], wrong[at + 1 : at + 5]))
        found = network.logits(network.forward(step((drafts, at, 1, BLOCKS)), memory))
        torch.testing.assert_close(found[0], expected[at], atol=TOLERANCE, rtol=0)
    for at in range(start + 9, start + 24, 5):
        found = network.logits(network.forward(step((ids[at : at + 5], at, 1, BLOCKS)), memory))
        torch.testing.assert_close(found, expected[at : at + 5], atol=TOLERANCE, rtol=0)


def test_what_is_kept_is_what_transformers_keeps(
    network: V4Network, memory: V4Memory, oracle: DeepseekV4ForCausalLM
) -> None:
    ids = prompt(270, seed=6)
    run(network, memory, ids, [100, 170])
    cache = oracle_state(oracle, ids)
    for ratio, ours, theirs in zip(network.config.ratios, memory.layers, cache.layers, strict=True):
        positions = torch.arange(270 - network.config.window + 1, 270)
        rows = ours.ring[ours.ring_rows + positions % ours.ring_rows]
        torch.testing.assert_close(rows, theirs.keys[0, 0], atol=TOLERANCE, rtol=0)
        if not ratio:
            continue
        index = torch.arange(270 // ratio)
        places = torch.tensor(BLOCKS)[index // ours.per_block] * ours.per_block
        places = places + index % ours.per_block
        assert ours.entries is not None
        expected = theirs.compressed_kv["compressor"][0]
        torch.testing.assert_close(ours.entries[places], expected, atol=TOLERANCE, rtol=0)
        if ours.index_keys is not None:
            expected = theirs.compressed_kv["indexer"][0]
            torch.testing.assert_close(ours.index_keys[places], expected, atol=TOLERANCE, rtol=0)
