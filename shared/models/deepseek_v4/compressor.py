"""A compressed layer's entries: projected rows pooled over a window, normed, turned, and stored."""

import torch

from finback.kernels.compress_entries.reference import compress_entries
from finback.kernels.rms_norm.reference import rms_norm
from finback.kernels.rotary_pairs.reference import rotary_pairs
from finback.shared.models.deepseek_v4.batch import V4Batch
from finback.shared.models.deepseek_v4.memory import Tail
from finback.shared.models.deepseek_v4.memory_shape import has_overlap, num_tail_rows
from finback.shared.models.deepseek_v4.rope import Rotation
from finback.shared.models.deepseek_v4.weights import CompressorWeights


def write_entries(
    batch: V4Batch,
    hidden: torch.Tensor,
    weights: CompressorWeights,
    tail: Tail,
    table: torch.Tensor,
    *,
    ratio: int,
    rotation: Rotation,
    norm_eps: float,
) -> None:
    """Store into `table` the entries that close in this step, and into `tail` its rows.

    hidden [N, d], normed. The position bias belongs to the absolute phase of a token and is part of
    the gates that are kept. An entry is turned at its first token.
    """
    tables = batch.entries(ratio)
    contents = (hidden @ weights.content.t()).float()
    gates = (hidden @ weights.gate.t()).float()
    gates = gates + weights.position_bias[batch.positions % ratio]
    history = batch.history(num_tail_rows(ratio), tail.num_rows)
    if tables.positions.numel():
        pooled = compress_entries(
            torch.cat((tail.contents[history], contents)),
            torch.cat((tail.gates[history], gates)),
            tables.sources,
            overlap=has_overlap(ratio),
        )
        normed = rms_norm(pooled.to(table.dtype), weights.norm, norm_eps)
        angles = rotation.at(tables.positions)
        table[tables.targets] = rotary_pairs(normed, angles.cos, angles.sin).to(table.dtype)
    tokens, rows = batch.kept(tail.num_rows)
    tail.contents[rows] = contents[tokens]
    tail.gates[rows] = gates[tokens]
