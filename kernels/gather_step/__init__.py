"""Op `gather_step`: the rows of a decoding step, fetched from what the device knows of every slot.

rows: [B, 2] int32, (slot, context length with the token to be fed); context length 0 is padding, for
which everything but the block table becomes 0. Of a row's block table as many entries are copied as
its context has blocks; the others keep what they held.
"""

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotTensors:
    """State of N slots. `last_token`: known, but its KV is not computed yet.

    last_token, top_k: [N] int32. seed: [N] int64. temperature, top_p, min_p: [N] float32.
    block_tables: [N, width] int32.
    """

    last_token: torch.Tensor
    seed: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    block_tables: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """A step's rows: as `SlotTensors`, and their context lengths; `block_tables` None: not wanted.

    token_ids, context_lens: [B] int32. position: [B] int64, of the tokens to come.
    """

    token_ids: torch.Tensor
    context_lens: torch.Tensor
    position: torch.Tensor
    seed: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    block_tables: torch.Tensor | None

    def first(self, count: int) -> "StepInputs":
        """Views of the first rows."""
        names = (
            "token_ids", "context_lens", "position", "seed", "temperature", "top_k", "top_p",
            "min_p",
        )  # fmt: skip
        tables = None if self.block_tables is None else self.block_tables[:count]
        return replace(
            self, block_tables=tables, **{name: getattr(self, name)[:count] for name in names}
        )


def new_inputs(num_rows: int, width: int, device: str | torch.device) -> StepInputs:
    """Room for so many rows, zeros; `width` 0: without block tables."""

    def zeros(dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(num_rows, dtype=dtype, device=device)

    tables = None
    if width:
        tables = torch.zeros((num_rows, width), dtype=torch.int32, device=device)
    return StepInputs(
        token_ids=zeros(torch.int32),
        context_lens=zeros(torch.int32),
        position=zeros(torch.int64),
        seed=zeros(torch.int64),
        temperature=zeros(torch.float32),
        top_k=zeros(torch.int32),
        top_p=zeros(torch.float32),
        min_p=zeros(torch.float32),
        block_tables=tables,
    )
