"""Decoding steps as graphs: recorded once a bucket of rows, replayed over fixed buffers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from finback.kernels.decode_attention import DecodeWorkspace
from finback.shared.models.batch import ForwardBatch
from finback.shared.models.kv_pool import KVPool

if TYPE_CHECKING:
    from finback.shared.models.cuda_transformer import CudaTransformer

BUCKETS: Final = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512)


def bucket_of(num_rows: int) -> int | None:
    """The least bucket that holds so many rows; None above all of them."""
    return next((bucket for bucket in BUCKETS if bucket >= num_rows), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recorded:
    """A graph and its buffers. Rows past the batch have context_lens 0, so they touch nothing.

    What a graph was recorded over must outlive it, hence the workspace.
    """

    token_ids: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    workspace: DecodeWorkspace
    replay: Callable[[], None]
    hidden: torch.Tensor


class DecodeGraphs:
    """Graphs of one model over one pool; a new pool drops them."""

    def __init__(self, model: "CudaTransformer") -> None:
        self._model = model
        self._kv: KVPool | None = None
        self._recorded: dict[int, _Recorded] = {}

    def forward(self, batch: ForwardBatch, kv: KVPool) -> torch.Tensor:
        """Hidden states of a batch of single rows; overwritten by the bucket's next replay."""
        num_rows = batch.num_rows
        bucket = bucket_of(num_rows)
        if bucket is None:
            workspace = self._model.workspace(num_rows, batch.max_context)
            return self._model.decode(
                batch.token_ids, batch.context_lens, batch.block_tables, kv, workspace
            )
        graph = self._graph(bucket, kv)
        graph.token_ids[:num_rows].copy_(batch.token_ids)
        graph.context_lens[:num_rows].copy_(batch.context_lens)
        if num_rows < bucket:
            graph.context_lens[num_rows:].zero_()
        graph.block_tables[:num_rows, : batch.block_tables.shape[1]].copy_(batch.block_tables)
        graph.replay()
        return graph.hidden[:num_rows]

    def prepare(self, kv: KVPool, max_rows: int) -> int:
        """Record all buckets up to `max_rows` now, largest first; how many there are."""
        last = bucket_of(max_rows) or BUCKETS[-1]
        wanted = [bucket for bucket in reversed(BUCKETS) if bucket <= last]
        for bucket in wanted:
            self._graph(bucket, kv)
        return len(wanted)

    def _graph(self, bucket: int, kv: KVPool) -> _Recorded:
        if kv is not self._kv:
            self._kv, self._recorded = kv, {}
        if bucket not in self._recorded:
            self._recorded[bucket] = self._record(bucket, kv)
        return self._recorded[bucket]

    def _record(self, bucket: int, kv: KVPool) -> _Recorded:
        # The device's door lies above this folder; it is needed only where there is a device.
        from finback.shared.engine.device import record_graph

        model = self._model
        max_len = min(model.config.max_model_len, kv.num_blocks * kv.block_size)
        width = -(-max_len // kv.block_size)
        token_ids, context_lens, block_tables = (
            torch.zeros(shape, dtype=torch.int32, device=model.device)
            for shape in ((bucket,), (bucket,), (bucket, width))
        )
        workspace = model.workspace(bucket, max_len)

        def launch() -> torch.Tensor:
            return model.decode(token_ids, context_lens, block_tables, kv, workspace)

        replay, hidden = record_graph(launch)
        return _Recorded(
            token_ids=token_ids,
            context_lens=context_lens,
            block_tables=block_tables,
            workspace=workspace,
            replay=replay,
            hidden=hidden,
        )
