"""V4's attention: a window of latent rows, and compressed entries, all of them or the best."""

import torch

from finback.kernels.latent_attention.reference import latent_attention
from finback.kernels.rms_norm.reference import rms_norm
from finback.kernels.rotary_pairs.reference import rotary_pairs
from finback.kernels.select_entries.reference import select_entries
from finback.shared.models.deepseek_v4.batch import V4Batch
from finback.shared.models.deepseek_v4.compressor import write_entries
from finback.shared.models.deepseek_v4.config import V4Config
from finback.shared.models.deepseek_v4.memory import LayerMemory
from finback.shared.models.deepseek_v4.rope import Angles, Rotation
from finback.shared.models.deepseek_v4.weights import AttentionWeights, IndexerWeights


class Attention:
    """One layer's attention over its memory."""

    def __init__(
        self, config: V4Config, ratio: int, weights: AttentionWeights, rotation: Rotation
    ) -> None:
        self._config = config
        self._ratio = ratio
        self._weights = weights
        self._rotation = rotation

    def __call__(self, batch: V4Batch, hidden: torch.Tensor, memory: LayerMemory) -> torch.Tensor:
        """hidden [N, d], normed -> [N, d]. Writes this step's window rows, entries and state."""
        config, weights = self._config, self._weights
        angles = self._rotation.at(batch.positions)
        low = rms_norm(hidden @ weights.query_a.t(), weights.query_norm, config.norm_eps)
        queries = (low @ weights.query_b.t()).view(-1, config.num_heads, config.head_dim)
        queries = rotary_pairs(_unit(queries, config.norm_eps), angles.cos, angles.sin)
        rows = rms_norm(hidden @ weights.latent.t(), weights.latent_norm, config.norm_eps)
        rows = rotary_pairs(rows, angles.cos, angles.sin)
        entry_rows, entries = self._entries(batch, hidden, low, angles, memory)
        # The ring is read before it is written: a long chunk overwrites what its first rows need.
        history = batch.history(config.window - 1, memory.ring_rows)
        mixed = latent_attention(
            queries,
            torch.cat((memory.ring[history], rows.to(memory.ring.dtype))),
            batch.window_rows(config.window),
            entries,
            entry_rows,
            weights.sinks,
            config.head_dim**-0.5,
        )
        tokens, kept = batch.kept(memory.ring_rows)
        memory.ring[kept] = rows[tokens].to(memory.ring.dtype)
        return self._output(rotary_pairs(mixed, angles.cos, angles.sin, inverse=True))

    def _entries(
        self,
        batch: V4Batch,
        hidden: torch.Tensor,
        low: torch.Tensor,
        angles: Angles,
        memory: LayerMemory,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows int32 [N, K] of the entries to attend to, their table)."""
        weights = self._weights
        if weights.compressor is None or memory.entries is None or memory.tail is None:
            none = torch.empty((batch.num_tokens, 0), dtype=torch.int32, device=hidden.device)
            return none, memory.ring[:0]
        write_entries(
            batch,
            hidden,
            weights.compressor,
            memory.tail,
            memory.entries,
            ratio=self._ratio,
            rotation=self._rotation,
            norm_eps=self._config.norm_eps,
        )
        places = batch.entries(self._ratio).places
        if weights.indexer is not None:
            chosen = self._chosen(batch, hidden, low, angles, memory, weights.indexer)
            if chosen is not None:
                return _taken(places, chosen), memory.entries
        return places, memory.entries

    def _chosen(
        self,
        batch: V4Batch,
        hidden: torch.Tensor,
        low: torch.Tensor,
        angles: Angles,
        memory: LayerMemory,
        weights: IndexerWeights,
    ) -> torch.Tensor | None:
        """Indexes of the best entries, int32 [N, top_k]; None where all of them are kept."""
        config = self._config
        if memory.index_keys is None or memory.index_tail is None:
            raise ValueError("a layer with an indexer needs index keys in its memory")
        write_entries(
            batch,
            hidden,
            weights.compressor,
            memory.index_tail,
            memory.index_keys,
            ratio=self._ratio,
            rotation=self._rotation,
            norm_eps=config.norm_eps,
        )
        tables = batch.entries(self._ratio)
        if tables.places.shape[1] <= config.index_top_k:
            return None  # the keys are written all the same: later tokens score them
        queries = (low @ weights.query.t()).view(-1, config.index_num_heads, config.index_head_dim)
        scale = (config.index_head_dim * config.index_num_heads) ** -0.5
        return select_entries(
            rotary_pairs(queries, angles.cos, angles.sin),
            (hidden @ weights.head_weights.t()).float() * scale,
            memory.index_keys,
            tables.places,
            tables.num_visible,
            config.index_top_k,
        )

    def _output(self, mixed: torch.Tensor) -> torch.Tensor:
        """Grouped projection: each group of heads to its own rank, then all of them to d."""
        num_groups, weights = self._config.num_output_groups, self._weights
        first = weights.output_a.view(num_groups, self._config.output_rank, -1)
        grouped = mixed.reshape(mixed.shape[0], num_groups, first.shape[2])
        inner = torch.einsum("ngi,goi->ngo", grouped, first)
        return inner.flatten(1) @ weights.output_b.t()


def _unit(queries: torch.Tensor, eps: float) -> torch.Tensor:
    """Each head divided by its root mean square; there is no weight."""
    wide = queries.float()
    return (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)).to(queries.dtype)


def _taken(places: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Rows of chosen entries; -1 stays -1."""
    found = places.gather(1, chosen.clamp(min=0).long())
    return found.masked_fill(chosen < 0, -1)
