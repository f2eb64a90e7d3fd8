"""Faults that other engines had with DeepSeek V4, each as small as it goes (docs/deepseek-v4.md)."""

from typing import Final

import torch

from finback.shared.models.deepseek_v4.memory import V4Memory
from finback.shared.models.deepseek_v4.network import V4Network
from support.v4_steps import prompt, step

TOLERANCE: Final = 2e-5
FIRST: Final = [7, 2, 9]
SECOND: Final = [4, 1, 5]


def halves(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    middle = rows.shape[0] // 2
    return rows[:middle], rows[middle:]


def test_later_tokens_change_no_earlier_logits(network: V4Network, memory: V4Memory) -> None:
    """In one chunk, from the middle of a compressed window on."""
    ids, num_kept = prompt(200, seed=1), 141
    other = torch.cat((ids[:num_kept], prompt(200, seed=2)[num_kept:]))
    batch = step((ids, 0, 1, FIRST), (other, 0, 2, SECOND))
    one, two = halves(network.logits(network.forward(batch, memory)))
    torch.testing.assert_close(one[:num_kept], two[:num_kept], atol=TOLERANCE, rtol=0)
    assert (one[num_kept:] - two[num_kept:]).abs().max() > 0.01


def test_equal_prompts_at_once_are_answered_alike(network: V4Network, memory: V4Memory) -> None:
    ids, start = prompt(150, seed=3), 120
    for begin, end in [(0, start), *((at, at + 1) for at in range(start, 150))]:
        chunk = ids[begin:end]
        batch = step((chunk, begin, 1, FIRST), (chunk, begin, 2, SECOND))
        one, two = halves(network.logits(network.forward(batch, memory)))
        torch.testing.assert_close(one, two, atol=TOLERANCE, rtol=0)


def test_hundreds_of_steps_stay_right(network: V4Network, memory: V4Memory) -> None:
    """Rings go round many times in single steps; one chunk from a clean start says the same."""
    ids = prompt(384, seed=4)
    steps = [
        network.logits(network.forward(step((ids[at : at + 1], at, 1, FIRST)), memory))
        for at in range(384)
    ]
    whole = network.logits(network.forward(step((ids, 0, 2, SECOND)), memory))
    torch.testing.assert_close(torch.cat(steps), whole, atol=TOLERANCE, rtol=0)
