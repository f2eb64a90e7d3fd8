"""Forward batches for tests: chunks of sequences, with block tables of one's own choice."""

from dataclasses import dataclass, field

import torch

from finback.shared.models.batch import ForwardBatch
from finback.shared.models.causal_lm import CausalLM
from finback.shared.models.kv_pool import KVPool


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Some tokens of a sequence from position `first` on; `blocks` is its block table."""

    token_ids: list[int]
    first: int = 0
    blocks: list[int] = field(default_factory=lambda: [0, 1, 2, 3])


def flat_batch(chunks: list[Chunk], block_size: int) -> ForwardBatch:
    """All chunks in one step; every row leaves the model."""
    tokens, positions, slots, cu, lens = [], [], [], [0], []
    for chunk in chunks:
        for offset, token_id in enumerate(chunk.token_ids):
            position = chunk.first + offset
            tokens.append(token_id)
            positions.append(position)
            block = chunk.blocks[position // block_size]
            slots.append(block * block_size + position % block_size)
        cu.append(len(tokens))
        lens.append(chunk.first + len(chunk.token_ids))
    widest = max(len(chunk.blocks) for chunk in chunks)
    tables = [chunk.blocks + [0] * (widest - len(chunk.blocks)) for chunk in chunks]
    return ForwardBatch(
        token_ids=torch.tensor(tokens, dtype=torch.int32),
        positions=torch.tensor(positions, dtype=torch.int32),
        slot_mapping=torch.tensor(slots, dtype=torch.int32),
        block_tables=torch.tensor(tables, dtype=torch.int32),
        cu_seqlens=torch.tensor(cu, dtype=torch.int32),
        context_lens=torch.tensor(lens, dtype=torch.int32),
        max_q=max(len(chunk.token_ids) for chunk in chunks),
        max_context=max(lens),
        logit_rows=torch.arange(len(tokens)),
    )


def logits_of(model: CausalLM, pool: KVPool, chunks: list[Chunk]) -> torch.Tensor:
    """One step; float32 [all rows, vocab_size], a copy."""
    batch = flat_batch(chunks, pool.block_size)
    return model.logits(model.forward(batch, pool)).clone()


def logits_in_chunks(
    model: CausalLM, pool: KVPool, token_ids: list[int], blocks: list[int], size: int = 15
) -> torch.Tensor:
    """One sequence in chunks of at most `size` tokens; 15 keep fast mode to its exact kernels."""
    parts = [
        logits_of(model, pool, [Chunk(token_ids=token_ids[i : i + size], first=i, blocks=blocks)])
        for i in range(0, len(token_ids), size)
    ]
    return torch.cat(parts)
