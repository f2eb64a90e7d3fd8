"""Prompts and steps of a tiny V4 model. Without transformers, which takes seconds to import."""

import torch

from finback.shared.models.deepseek_v4.batch import V4Batch


def prompt(num_tokens: int, seed: int = 0) -> torch.Tensor:
    """Random ids that are no special tokens."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(2, 160, (num_tokens,), generator=generator)


def step(
    *parts: tuple[torch.Tensor, int, int, list[int]],
    replay_starts: list[int] | None = None,
    entries_from: list[int] | None = None,
) -> V4Batch:
    """One step of sequences (ids of the step, start, slot, blocks); logits of all tokens."""
    width = max(len(blocks) for *_, blocks in parts)
    tables = [blocks + [0] * (width - len(blocks)) for *_, blocks in parts]
    ids = torch.cat([ids for ids, *_ in parts])
    zeros = [0] * len(parts)
    return V4Batch(
        token_ids=ids,
        starts=torch.tensor([start for _, start, _, _ in parts]),
        lengths=torch.tensor([ids.numel() for ids, *_ in parts]),
        slots=torch.tensor([slot for _, _, slot, _ in parts]),
        block_tables=torch.tensor(tables, dtype=torch.int32),
        logit_rows=torch.arange(ids.numel()),
        replay_starts=torch.tensor(replay_starts or zeros),
        entries_from=torch.tensor(entries_from or zeros),
    )
