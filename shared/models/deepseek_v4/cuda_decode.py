"""One decoding step of a V4 model on an NVIDIA device: one token a sequence, fixed shapes, no sync.

All of it depends on the values of tensors only, so a step can be captured in a graph and replayed with
other tokens and positions. Contexts are below the indexer's selection (4 * index_top_k tokens): there
every entry is attended to, and index keys are only written.
"""

from dataclasses import dataclass
from typing import Final

import torch

from finback.kernels.expert_mlp.cuda_triton import clamped_gate
from finback.kernels.expert_mlp_w4a8.cuda_triton import expert_mlp_w4a8
from finback.kernels.hyper_mix.cuda_triton import hyper_mix, hyper_spread
from finback.kernels.hyper_mix.reference import Mix, hyper_collapse
from finback.kernels.latent_attention.cuda_triton import latent_attention
from finback.kernels.norm_rotary_pairs.cuda_triton import norm_rotary_pairs
from finback.kernels.route_experts.cuda_triton import route_experts
from finback.kernels.store_entries.cuda_triton import store_entries
from finback.kernels.store_tail.cuda_triton import store_tail
from finback.shared.models.deepseek_v4.config import BLOCK_TOKENS, V4Config
from finback.shared.models.deepseek_v4.cuda_weights import CudaLayerWeights, PackedCompressor
from finback.shared.models.deepseek_v4.memory import LayerMemory, Tail
from finback.shared.models.deepseek_v4.memory_shape import has_overlap
from finback.shared.models.deepseek_v4.rope import Angles, Rotation
from finback.shared.models.deepseek_v4.weights import HyperWeights

_NONE: Final = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioTables:
    """Rows of one kind of compressed layer, for N tokens: `tail` int64 [N] where projected rows go,
    `sources` int32 [N, R] the rows of an entry that closes, `targets` int32 [N] its place or -1, `places`
    int32 [N, L] the entries that a token attends to, `angles` those of entries' first tokens.
    """

    tail: torch.Tensor
    sources: torch.Tensor
    targets: torch.Tensor
    places: torch.Tensor
    angles: Angles


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTables:
    """Rows of a step at `positions` int64 [N]: `ring` int64 [N] where window rows go, `window` int32 [N, W] those attended to."""

    positions: torch.Tensor
    ring: torch.Tensor
    window: torch.Tensor
    plain: Angles
    scaled: Angles
    by_ratio: dict[int, RatioTables]


class CudaDecoder:
    """The layers and the head."""

    def __init__(
        self,
        config: V4Config,
        layers: tuple[CudaLayerWeights, ...],
        *,
        embedding: torch.Tensor,
        head_mix: HyperWeights,
        norm: torch.Tensor,
        head: torch.Tensor,
        max_context: int,
    ) -> None:
        """`max_context`: the longest context of a step, in tokens."""
        if max_context > 4 * config.index_top_k:
            raise ValueError(f"contexts above {4 * config.index_top_k} tokens need the indexer")
        self.config = config
        self._layers = layers
        self._embedding, self._head_mix = embedding, head_mix
        self._norm, self._head = norm, head
        self._max_context = max_context
        self._device = str(embedding.device)
        self._rotations = {
            ratio: Rotation(config, ratio, self._device) for ratio in {0, *config.ratios}
        }
        self._scaled = max(config.ratios)

    def tables(
        self,
        positions: torch.Tensor,
        slots: torch.Tensor,
        block_tables: torch.Tensor,
        memory: tuple[LayerMemory, ...],
    ) -> DecodeTables:
        """positions, slots int64 [N]; block_tables int64 [N, B], of the longest context's blocks."""
        if block_tables.shape[1] * BLOCK_TOKENS < self._max_context:
            raise ValueError(f"block tables must hold {self._max_context} tokens")
        window, ring_rows = self.config.window, memory[0].ring_rows
        at = positions[:, None] + self._range(1 - window, 1)
        rows = slots[:, None] * ring_rows + at % ring_rows
        by_ratio = {}
        for ratio, own in zip(self.config.ratios, memory, strict=True):
            if ratio and ratio not in by_ratio and own.tail is not None:
                by_ratio[ratio] = self._ratio_tables(
                    ratio, own.tail.num_rows, positions, slots, block_tables
                )
        return DecodeTables(
            positions=positions,
            ring=slots * ring_rows + positions % ring_rows,
            window=rows.masked_fill(at < 0, _NONE).to(torch.int32),
            plain=self._rotations[0].at(positions),
            scaled=self._rotations[self._scaled].at(positions),
            by_ratio=by_ratio,
        )

    def _ratio_tables(
        self,
        ratio: int,
        num_rows: int,
        positions: torch.Tensor,
        slots: torch.Tensor,
        block_tables: torch.Tensor,
    ) -> RatioTables:
        span = 2 * ratio if has_overlap(ratio) else ratio
        at = positions[:, None] + self._range(1 - span, 1)
        sources = slots[:, None] * num_rows + at % num_rows
        per_block, visible = BLOCK_TOKENS // ratio, (positions + 1) // ratio
        entry = (visible - 1).clamp(min=0)
        block = block_tables.gather(1, (entry // per_block)[:, None])[:, 0]
        closes = (positions + 1) % ratio == 0
        each = self._range(0, self._max_context // ratio)
        places = block_tables[:, each // per_block] * per_block + each % per_block
        return RatioTables(
            tail=slots * num_rows + positions % num_rows,
            sources=sources.masked_fill(at < 0, _NONE).to(torch.int32),
            targets=torch.where(closes, block * per_block + entry % per_block, _NONE).to(
                torch.int32
            ),
            places=places.masked_fill(each >= visible[:, None], _NONE).to(torch.int32),
            angles=self._rotations[ratio].at(ratio * entry),
        )

    def step(
        self, token_ids: torch.Tensor, tables: DecodeTables, memory: tuple[LayerMemory, ...]
    ) -> torch.Tensor:
        """float32 logits [N, vocab] of token_ids int64 [N]; writes window rows, state and entries."""
        config = self.config
        embedded = self._embedding[token_ids]
        streams = embedded[:, None, :].expand(-1, config.num_streams, -1).contiguous()
        for ratio, weights, own in zip(config.ratios, self._layers, memory, strict=True):
            mix = self._mix(streams, weights.attention_mix, weights.attention_norm)
            streams = hyper_spread(streams, self._attend(ratio, weights, own, mix, tables), mix)
            mix = self._mix(streams, weights.mixture_mix, weights.mixture_norm)
            streams = hyper_spread(streams, self._mixture(weights, token_ids, mix.hidden), mix)
        head = self._head_mix
        collapsed = hyper_collapse(
            streams, head.fn, head.base, head.scale, norm_eps=config.norm_eps, eps=config.hyper_eps
        )
        size = (config.hidden_size,)
        hidden = torch.nn.functional.rms_norm(collapsed, size, self._norm, config.norm_eps)
        return torch.mm(hidden, self._head.t(), out_dtype=torch.float32)

    def _mix(self, streams: torch.Tensor, weights: HyperWeights, norm: torch.Tensor) -> Mix:
        config = self.config
        return hyper_mix(
            streams,
            weights.fn,
            weights.base,
            weights.scale,
            norm_eps=config.norm_eps,
            eps=config.hyper_eps,
            num_iterations=config.sinkhorn_iterations,
            norm_weight=norm,
        )

    def _attend(
        self,
        ratio: int,
        weights: CudaLayerWeights,
        memory: LayerMemory,
        mix: Mix,
        tables: DecodeTables,
    ) -> torch.Tensor:
        config = self.config
        angles = tables.scaled if ratio else tables.plain
        projected = mix.hidden @ weights.project.t()
        rank, size = config.q_rank, config.head_dim
        low = torch.nn.functional.rms_norm(
            projected[:, :rank], (rank,), weights.query_norm, config.norm_eps
        )
        queries = (low @ weights.query_b.t()).view(-1, config.num_heads, size)
        queries = norm_rotary_pairs(queries, *angles, eps=config.norm_eps)
        latent = projected[:, None, rank : rank + size]
        rows = norm_rotary_pairs(latent, *angles, eps=config.norm_eps, weight=weights.latent_norm)
        memory.ring.index_copy_(0, tables.ring, rows[:, 0])
        entries, places = memory.ring, tables.window[:, :0]
        if weights.compressor is not None and memory.entries is not None:
            own = tables.by_ratio[ratio]
            self._compress(
                weights.compressor, memory.tail, memory.entries, projected, ratio, tables
            )
            entries, places = memory.entries, own.places
            if weights.indexer is not None and memory.index_keys is not None:
                self._compress(
                    weights.indexer, memory.index_tail, memory.index_keys, projected, ratio, tables
                )
        mixed = latent_attention(
            queries, memory.ring, tables.window, entries, places, weights.sinks, size**-0.5
        )
        mixed = norm_rotary_pairs(mixed, *angles, inverse=True)
        grouped = mixed.view(mixed.shape[0], config.num_output_groups, -1).transpose(0, 1)
        inner = torch.bmm(grouped, weights.output_a).transpose(0, 1).flatten(1)
        return inner @ weights.output_b.t()

    def _compress(
        self,
        weights: PackedCompressor,
        tail: Tail | None,
        table: torch.Tensor,
        projected: torch.Tensor,
        ratio: int,
        tables: DecodeTables,
    ) -> None:
        if tail is None:
            raise ValueError("a compressed layer has a tail")
        own = tables.by_ratio[ratio]
        store_tail(
            projected[:, weights.columns],
            weights.position_bias,
            tables.positions,
            own.tail,
            tail.contents,
            tail.gates,
        )
        store_entries(
            tail.contents,
            tail.gates,
            own.sources,
            own.targets,
            table,
            weights.norm,
            *own.angles,
            eps=self.config.norm_eps,
            overlap=has_overlap(ratio),
        )

    def _mixture(
        self, weights: CudaLayerWeights, token_ids: torch.Tensor, hidden: torch.Tensor
    ) -> torch.Tensor:
        config = self.config
        experts, shares = route_experts(
            torch.mm(hidden, weights.gate.t(), out_dtype=torch.float32),
            top_k=config.num_experts_per_token,
            scaling=config.routed_scaling,
            bias=weights.bias,
            experts=None if weights.table is None else weights.table[token_ids],
        )
        routed = expert_mlp_w4a8(
            hidden, weights.gate_up, weights.down, experts, shares, limit=config.swiglu_limit
        )
        inner = clamped_gate(hidden @ weights.shared_gate_up.t(), config.swiglu_limit)
        return routed.add_(inner @ weights.shared_down.t())

    def _range(self, start: int, end: int) -> torch.Tensor:
        return torch.arange(start, end, device=self._device)
