"""Where a V4 model keeps what it remembers: block KV in pages, and state in one slot a sequence.

Block KV (paged, content addressed) holds compressed entries: a logical block is 128 tokens, that is
32 main and 32 index entries of a CSA layer and one entry of an HCA layer. The place of an entry is a
function of its index. State (one slot a running sequence, short lived) is rows by absolute position:
window rows of every layer, and for the compressors the projected rows whose entry is not closed, or
that the next entry overlaps. There are `num_spare` rows more than a step of one token needs, so that
rejected drafts overwrite nothing that is needed again.
"""

from dataclasses import dataclass

import torch

from finback.shared.models.deepseek_v4.config import BLOCK_TOKENS, V4Config
from finback.shared.models.deepseek_v4.memory_shape import has_indexer, has_overlap, num_tail_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """A compressor's state: float32 [num_slots * num_rows, channels] twice, gates biased already."""

    num_rows: int
    contents: torch.Tensor
    gates: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMemory:
    """One layer's rows. Flat tables: row of slot s and position p is s * num_rows + p % num_rows.

    `entries` [num_blocks * per_block, head_dim], `index_keys` [same, index_head_dim].
    """

    ring_rows: int
    ring: torch.Tensor
    per_block: int = 0
    entries: torch.Tensor | None = None
    tail: Tail | None = None
    index_keys: torch.Tensor | None = None
    index_tail: Tail | None = None


class V4Memory:
    """Block KV of `num_blocks` blocks and state of `num_slots` sequences, zeroed."""

    def __init__(
        self,
        config: V4Config,
        *,
        num_blocks: int,
        num_slots: int,
        num_spare: int = 1,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        if num_spare < 1:
            raise ValueError(f"num_spare must be at least 1, not {num_spare}")
        self.config = config
        self.num_blocks = num_blocks
        self.num_slots = num_slots
        self.num_spare = num_spare
        self._dtype = dtype
        self._device = device
        self.layers = tuple(self._layer(ratio) for ratio in config.ratios)

    def _layer(self, ratio: int) -> LayerMemory:
        config = self.config
        ring_rows = config.window + self.num_spare
        ring = self._zeros(self.num_slots * ring_rows, config.head_dim)
        if not ratio:
            return LayerMemory(ring_rows=ring_rows, ring=ring)
        per_block = BLOCK_TOKENS // ratio
        entries = self._zeros(self.num_blocks * per_block, config.head_dim)
        tail = self._tail(ratio, config.head_dim)
        if not has_indexer(ratio):
            return LayerMemory(
                ring_rows=ring_rows, ring=ring, per_block=per_block, entries=entries, tail=tail
            )
        return LayerMemory(
            ring_rows=ring_rows,
            ring=ring,
            per_block=per_block,
            entries=entries,
            tail=tail,
            index_keys=self._zeros(self.num_blocks * per_block, config.index_head_dim),
            index_tail=self._tail(ratio, config.index_head_dim),
        )

    def _tail(self, ratio: int, width: int) -> Tail:
        num_rows = num_tail_rows(ratio) + self.num_spare
        channels = width * (2 if has_overlap(ratio) else 1)
        shape = (self.num_slots * num_rows, channels)
        return Tail(
            num_rows=num_rows,
            contents=torch.zeros(shape, device=self._device),
            gates=torch.zeros(shape, device=self._device),
        )

    def _zeros(self, num_rows: int, width: int) -> torch.Tensor:
        return torch.zeros((num_rows, width), dtype=self._dtype, device=self._device)
