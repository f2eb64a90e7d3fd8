"""One step of a V4 model as flattened rows, and the tables of rows that its layers read and write."""

from dataclasses import dataclass, field
from functools import cached_property

import torch

from finback.shared.models.deepseek_v4.config import BLOCK_TOKENS
from finback.shared.models.deepseek_v4.memory_shape import has_overlap, num_tail_rows


@dataclass(frozen=True, kw_only=True)
class V4Batch:
    """S sequences, N tokens: a chunk of a prompt, a decoded token, or drafts to be verified each.

    `token_ids` int64 [N]; `starts`, `lengths`, `slots` int64 [S]: first absolute position, tokens in
    this step, state slot; `block_tables` int32 [S, B]. `logit_rows` int64 [R]: rows of N.

    A replay of lost state starts at `replay_starts` [S]: no window reaches before it (0: none did).
    `entries_from` [S]: entries that end at or before this position are cached, perhaps shared, and
    more exact than a replay would make them: they are not written.
    """

    token_ids: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    slots: torch.Tensor
    block_tables: torch.Tensor
    logit_rows: torch.Tensor
    replay_starts: torch.Tensor
    entries_from: torch.Tensor
    _memo: dict[int, "EntryTables"] = field(default_factory=dict, repr=False)

    @property
    def num_tokens(self) -> int:
        """N."""
        return int(self.token_ids.numel())

    @cached_property
    def sequence(self) -> torch.Tensor:
        """int64 [N]: whose token a row is."""
        return torch.repeat_interleave(torch.arange(self.starts.numel()), self.lengths)

    @cached_property
    def firsts(self) -> torch.Tensor:
        """int64 [S]: the row of a sequence's first token."""
        return self.lengths.cumsum(0) - self.lengths

    @cached_property
    def positions(self) -> torch.Tensor:
        """int64 [N]: absolute positions."""
        within = torch.arange(self.num_tokens) - self.firsts[self.sequence]
        return self.starts[self.sequence] + within

    def history(self, num_rows: int, ring_rows: int) -> torch.Tensor:
        """int64 [S * num_rows]: state rows of the `num_rows` positions before each start, in order.

        Positions below 0 name some row all the same; tables never refer to them.
        """
        before = self.starts[:, None] + torch.arange(-num_rows, 0)
        return (self.slots[:, None] * ring_rows + before % ring_rows).flatten()

    def row_of(self, sequence: torch.Tensor, position: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Rows of (history, then this step's tokens), int64; no check of bounds."""
        behind = position - self.starts[sequence]
        old = sequence * num_rows + num_rows + behind
        new = self.starts.numel() * num_rows + self.firsts[sequence] + behind
        return torch.where(behind < 0, old, new)

    def window_rows(self, window: int) -> torch.Tensor:
        """int32 [N, window]: rows of (history of window - 1, tokens) that a token attends to."""
        at = self.positions[:, None] + torch.arange(1 - window, 1)
        rows = self.row_of(self.sequence[:, None].expand_as(at), at, window - 1)
        return rows.masked_fill(at < self.replay_starts[self.sequence, None], -1).to(torch.int32)

    def kept(self, ring_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens of the step, state rows): what is stored of a step, its last `ring_rows` rows."""
        ends = (self.starts + self.lengths)[self.sequence]
        tokens = (self.positions >= ends - ring_rows).nonzero().flatten()
        rows = self.slots[self.sequence] * ring_rows + self.positions % ring_rows
        return tokens, rows[tokens]

    def entries(self, ratio: int) -> "EntryTables":
        """The tables of one kind of compressed layer, made once a step."""
        if ratio not in self._memo:
            self._memo[ratio] = EntryTables.of(self, ratio)
        return self._memo[ratio]


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryTables:
    """Entries of one ratio. E close in this step: `sources` int32 [E, R] are their rows of (history,
    tokens), `positions` [E] their first tokens, `targets` [E] their places. L is the longest context
    in entries: `places` int32 [N, L] is where entry i of a token's sequence lies, `num_visible` [N]
    how many of them it may see.
    """

    sources: torch.Tensor
    positions: torch.Tensor
    targets: torch.Tensor
    places: torch.Tensor
    num_visible: torch.Tensor

    @classmethod
    def of(cls, batch: V4Batch, ratio: int) -> "EntryTables":
        """Make them. An entry is visible to the token that closes it: i < (t + 1) // ratio."""
        per_block = BLOCK_TOKENS // ratio
        ends = batch.starts + batch.lengths
        first_new = torch.maximum(batch.starts, batch.entries_from) // ratio
        counts = (ends // ratio - first_new).clamp(min=0)
        sequence = torch.repeat_interleave(torch.arange(counts.numel()), counts)
        within = torch.arange(sequence.numel()) - (counts.cumsum(0) - counts)[sequence]
        index = first_new[sequence] + within
        span = 2 * ratio if has_overlap(ratio) else ratio
        at = ratio * (index[:, None] + 1) + torch.arange(-span, 0)
        rows = batch.row_of(sequence[:, None].expand_as(at), at, num_tail_rows(ratio))
        visible = (batch.positions + 1) // ratio
        most = int(visible.max()) if visible.numel() else 0
        each = torch.arange(most)
        places = _places(batch.block_tables, per_block, each)[batch.sequence]
        return cls(
            sources=rows.masked_fill(at < 0, -1).to(torch.int32),
            positions=ratio * index,
            targets=_places_at(batch.block_tables, per_block, sequence, index),
            places=places.masked_fill(each >= visible[:, None], -1).to(torch.int32),
            num_visible=visible,
        )


def _places(block_tables: torch.Tensor, per_block: int, index: torch.Tensor) -> torch.Tensor:
    blocks = block_tables.long()[:, index // per_block]
    return blocks * per_block + index % per_block


def _places_at(
    block_tables: torch.Tensor, per_block: int, sequence: torch.Tensor, index: torch.Tensor
) -> torch.Tensor:
    return block_tables.long()[sequence, index // per_block] * per_block + index % per_block
