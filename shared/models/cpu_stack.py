"""The network as one compiled function over packed weights: the fast and deterministic path on CPUs.

Weights stay in the file's precision (4-bit ones stay 4-bit), arithmetic is float32, and a row's bits
do not depend on the rows beside it. Fast mode differs in one thing: where the processor has matrix
tiles, chunks of WIDE_ROWS tokens or more are computed in bfloat16 (docs/adr/0006). So rows that decode
have the same bits in both modes, whatever runs beside them.
"""

import math
import threading
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
import torch

from finback.kernels.cpu_features import chosen
from finback.kernels.decoder_stack.cpu_driver import run_stack
from finback.kernels.decoder_stack.cpu_wide import scratch_bytes
from finback.kernels.decoder_stack.layout import (
    CLOSED,
    EXTRA_PHASES,
    PHASES_PER_LAYER,
    ROW_BLOCK,
    SCRATCH_FIXED_BYTES,
    SYNC_CLAIMS,
    SYNC_LINE,
    SYNC_STOP,
    TASK_HEAD,
    TASK_LAYERS,
    TASK_WIDE,
    Job,
    Layer,
)
from finback.kernels.linear.cpu_amx import BLOCK_ROWS, STEP_K
from finback.kernels.linear.cpu_multiply import PANEL_BYTES
from finback.kernels.linear.cpu_packing import PackedMatrix, allocate
from finback.kernels.linear.cpu_tiles import TILE_COLUMNS
from finback.kernels.simd import LANES, MAX_TILE_ROWS
from finback.shared.errors import ConfigError
from finback.shared.models.batch import ForwardBatch
from finback.shared.models.config import ModelConfig
from finback.shared.models.cpu_profile import PhaseProfile
from finback.shared.models.cpu_weights import CpuWeights, load_cpu_weights
from finback.shared.models.kv_pool import KVPool
from finback.shared.models.layer_gate import whole
from finback.shared.models.rope import RotaryTable, inverse_frequencies
from finback.shared.models.row_classes import split_rows
from finback.shared.models.weight_names import ROPE_FACTORS
from finback.shared.models.weights import WeightReader

_KV_KINDS: Final = {"f32": (0, 4), "f16": (1, 2), "bf16": (2, 2)}
"""Kind and item bytes; the kinds are those of packed weights."""

_INITIAL_POSITIONS: Final = 2048

WIDE_ROWS: Final = 16
"""Rows of a chunk from which on fast mode computes it in bfloat16."""

Int64 = npt.NDArray[np.int64]


def unsupported(config: ModelConfig) -> str | None:
    """Why this model cannot run here, or None."""
    if config.attention_bias or config.output_bias or config.mlp_bias:
        return "it has biases"
    for name, value, step in (
        ("hidden_size", config.hidden_size, TILE_COLUMNS),
        ("q size", config.q_size, TILE_COLUMNS),
        ("key/value size", config.kv_size, TILE_COLUMNS),
        ("intermediate_size", config.intermediate_size, LANES),
        ("head_dim", config.head_dim, max(TILE_COLUMNS, 2 * LANES)),
    ):
        if value % step:
            return f"its {name} {value} is not a multiple of {step}"
    return None


class CpuStack:
    """A `CausalLM`; `forward` and `logits` return buffers that the next call overwrites."""

    waits_for_layers: ClassVar[bool] = True

    def __init__(
        self,
        config: ModelConfig,
        reader: WeightReader,
        *,
        mode: str,
        num_threads: int,
        weights: CpuWeights | None = None,
    ) -> None:
        """`weights`: packed already, else they are read here."""
        self.config = config
        self.device = "cpu"
        self.mode = mode
        self.default_kv_dtype = "f16"
        self.num_threads = num_threads
        self._weights: CpuWeights = weights or load_cpu_weights(config, reader)
        self.weights_bytes = self._weights.num_bytes
        self.is_wide = mode == "fast" and chosen().wide == "amx" and _fits_tiles(config)
        self.numerics = f"cpu-f32-{LANES}" + ("-amx" if self.is_wide else "")
        factors = reader.optional(ROPE_FACTORS, torch.float32)
        self._rope = RotaryTable(
            inverse_frequencies(config, factors),
            "cpu",
            min(config.max_model_len, _INITIAL_POSITIONS),
        )
        self._job: Int64 = np.zeros(Job.SIZE, np.int64)
        self._buffers: dict[str, torch.Tensor] = {}
        self._scratch = np.zeros(0, np.uint8)
        self._profile: PhaseProfile | None = None
        self._fill_constants()
        self._followers = [self._start_follower(index) for index in range(1, num_threads)]

    def _fill_constants(self) -> None:
        config, job = self.config, self._job
        num_phases = config.num_layers * PHASES_PER_LAYER + EXTRA_PHASES
        self._sync = allocate(SYNC_CLAIMS + num_phases * SYNC_LINE)
        self._sync[:] = 0
        self._sync[:8].view(np.int64)[0] = CLOSED
        job[Job.SYNC] = self._sync.ctypes.data
        job[Job.NUM_LAYERS] = config.num_layers
        job[Job.HIDDEN] = config.hidden_size
        job[Job.INNER] = config.intermediate_size
        job[Job.NUM_HEADS] = config.num_heads
        job[Job.NUM_KV_HEADS] = config.num_kv_heads
        job[Job.HEAD_DIM] = config.head_dim
        job[Job.EPS] = _bits(config.rms_norm_eps)
        job[Job.SCALE] = _bits(config.head_dim**-0.5)
        job[Job.SCALE_LOG2] = _bits(config.head_dim**-0.5 / math.log(2))
        job[Job.EMBEDDING] = self._weights.embedding.tiles.ctypes.data
        job[Job.HEAD] = self._weights.head.tiles.ctypes.data
        job[Job.NUM_HEAD_TILES] = len(self._weights.head.tiles)
        job[Job.FINAL_NORM] = self._weights.final_norm.data_ptr()
        self._layers: Int64 = np.zeros((config.num_layers, Layer.SIZE), np.int64)
        for row, layer in zip(self._layers, self._weights.layers, strict=True):
            for column, item in layer.items():
                row[column] = (
                    item.tiles.ctypes.data if isinstance(item, PackedMatrix) else item.data_ptr()
                )
        job[Job.LAYERS] = self._layers.ctypes.data

    def _start_follower(self, index: int) -> threading.Thread:
        run_stack.compile()
        thread = threading.Thread(
            target=run_stack,
            args=(index, self.num_threads, self._job),
            name=f"finback-kernel-{index}",
            daemon=True,
        )
        thread.start()
        return thread

    def new_pool(self, num_blocks: int, block_size: int, kv_dtype: str = "auto") -> KVPool:
        """See `CausalLM`."""
        if block_size % TILE_COLUMNS:
            raise ConfigError(f"block_size is {block_size}; use a multiple of {TILE_COLUMNS}")
        return KVPool(
            num_blocks=num_blocks,
            block_size=block_size,
            num_layers=self.config.num_layers,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            kv_dtype=self.default_kv_dtype if kv_dtype == "auto" else kv_dtype,
            layout="head_major",
        )

    def _buffer(self, name: str, rows: int, columns: int) -> torch.Tensor:
        """A float32 buffer that grows and stays."""
        found = self._buffers.get(name)
        if found is None or found.shape[0] < rows:
            found = torch.from_numpy(allocate(rows * columns * 4).view(np.float32)).view(
                rows, columns
            )
            self._buffers[name] = found
        return found[:rows]

    def _ensure_scratch(self, max_context: int) -> None:
        """A thread's scratch: panel and gate/up buffer, or queries, mix and scores; they alternate."""
        padded = -(-max_context // TILE_COLUMNS) * TILE_COLUMNS
        attention = SCRATCH_FIXED_BYTES + MAX_TILE_ROWS * 4 * (2 * self.config.head_dim + padded)
        needed = max(attention, PANEL_BYTES + ROW_BLOCK * 2 * TILE_COLUMNS * 4)
        if self.is_wide:
            largest_k = max(
                self.config.hidden_size, self.config.q_size, self.config.intermediate_size
            )
            needed = max(needed, scratch_bytes(self.config.head_dim, largest_k))
        step = -(-needed // 4096) * 4096
        if self._scratch.nbytes < step * self.num_threads:
            self._scratch = allocate(step * self.num_threads)
        self._job[Job.SCRATCH] = self._scratch.ctypes.data
        self._job[Job.SCRATCH_STEP] = step
        self._job[Job.SCORES_STEP] = padded * 4

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: KVPool) -> torch.Tensor:
        """See `CausalLM`."""
        out = self._buffer("out", batch.logit_rows.shape[0], self.config.hidden_size)
        if not self.is_wide:
            self._run(batch, kv, TASK_LAYERS, out)
            return out
        for part in split_rows(batch, WIDE_ROWS):
            task = TASK_WIDE if part.is_wide else TASK_LAYERS
            if part.outputs is None:
                self._run(part.batch, kv, task, out)
            elif len(part.outputs):
                found = self._buffer("part", len(part.outputs), self.config.hidden_size)
                self._run(part.batch, kv, task, found)
                out[part.outputs] = found
            else:
                self._run(part.batch, kv, task, out[:0])
        return out

    def _run(self, batch: ForwardBatch, kv: KVPool, task: int, out: torch.Tensor) -> None:
        """All layers over one kind of rows; `out` takes the rows that leave."""
        config, job = self.config, self._job
        rows = batch.num_rows
        token_ids = batch.token_ids.numpy()
        if token_ids.dtype != np.int32:
            token_ids = token_ids.astype(np.int32)
        if rows and not 0 <= token_ids.min() <= token_ids.max() < config.vocab_size:
            raise ValueError(f"token ids must be within 0 to {config.vocab_size - 1}")
        self._rope.grow(batch.max_context)
        self._ensure_scratch(batch.max_context)
        units = self._buffer("units", rows, 6)  # three int64
        job[Job.NUM_ROWS] = rows
        job[Job.NUM_SEQS] = batch.num_seqs
        job[Job.NUM_OUT] = out.shape[0]
        job[Job.TOKEN_IDS] = token_ids.ctypes.data
        job[Job.POSITIONS] = batch.positions.data_ptr()
        job[Job.SLOTS] = batch.slot_mapping.data_ptr()
        job[Job.TABLES] = batch.block_tables.data_ptr()
        job[Job.TABLE_STEP] = batch.block_tables.stride(0) * 4
        job[Job.CU_SEQLENS] = batch.cu_seqlens.data_ptr()
        job[Job.CONTEXT_LENS] = batch.context_lens.data_ptr()
        job[Job.OUT_ROWS] = batch.logit_rows.data_ptr()
        job[Job.OUT] = out.data_ptr()
        job[Job.UNITS] = units.data_ptr()
        self._place_pool(kv)
        if task == TASK_WIDE:
            self._place_panels(batch, kv)
        qkv = config.q_size + 2 * config.kv_size
        for name, columns in (
            (Job.X, config.hidden_size),
            (Job.NORMED, config.hidden_size),
            (Job.QKV, qkv),
            (Job.MIXED, config.q_size),
            (Job.DELTA, config.hidden_size),
            (Job.ACTIVATED, config.intermediate_size),
        ):
            job[name] = self._buffer(name.name, _whole_blocks(rows), columns).data_ptr()
        job[Job.COS], job[Job.SIN] = self._rope.cos.data_ptr(), self._rope.sin.data_ptr()
        job[Job.TASK] = task
        gate, num_layers = batch.gate, config.num_layers
        for first, end in whole(num_layers) if gate is None else gate.ranges(num_layers):
            if gate is not None:
                gate.wait(end)
            job[Job.FIRST_LAYER], job[Job.END_LAYER] = first, end
            run_stack(0, self.num_threads, job)
        if self._profile is not None:
            self._profile.add(task)

    def _place_panels(self, batch: ForwardBatch, kv: KVPool) -> None:
        """Room for keys and values of all sequences as bfloat16 panels, and the list of their blocks."""
        lengths = batch.context_lens.numpy()
        tokens = int(_whole_blocks(lengths).sum())
        panels = self._buffer("panels", tokens, self.config.kv_size)
        blocks = int((-(-lengths // kv.block_size)).sum())
        self._job[Job.KV_PANELS] = panels.data_ptr()
        self._job[Job.KV_UNITS] = self._buffer("kv_units", blocks, 6).data_ptr()

    def _place_pool(self, kv: KVPool) -> None:
        job = self._job
        if kv.layout != "head_major":
            raise ValueError("this pool was made for another model")
        kind, item = _KV_KINDS[kv.kv_dtype]
        job[Job.KEYS], job[Job.VALUES] = kv.k.data_ptr(), kv.v.data_ptr()
        job[Job.KV_LAYER_STEP] = kv.k.stride(0) * item
        job[Job.KV_BLOCK_BYTES] = kv.k.stride(1) * item
        job[Job.KV_KIND], job[Job.KV_ITEM_BYTES] = kind, item
        job[Job.BLOCK_SIZE] = kv.block_size

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `CausalLM`."""
        job, rows = self._job, hidden.shape[0]
        columns = len(self._weights.head.tiles) * TILE_COLUMNS
        out = self._buffer("logits", rows, columns)
        self._ensure_scratch(1)
        hidden = hidden.contiguous()
        job[Job.HEAD_ROWS] = rows
        job[Job.HEAD_IN] = hidden.data_ptr()
        job[Job.LOGITS] = out.data_ptr()
        job[Job.LOGITS_STEP] = columns * 4
        job[Job.TASK] = TASK_HEAD
        run_stack(0, self.num_threads, job)
        return out[:, : self.config.vocab_size]

    def profile(self) -> PhaseProfile:
        """Measure the phases of all steps from now on."""
        self._profile = PhaseProfile(self.config.num_layers)
        self._job[Job.CLOCK] = self._profile.clock.ctypes.data
        return self._profile

    def close(self) -> None:
        """Stop the helper threads."""
        if not self._followers:
            return
        self._sync[SYNC_STOP : SYNC_STOP + 8].view(np.int64)[0] = 1
        run_stack(-1, self.num_threads, self._job)
        for thread in self._followers:
            thread.join()
        self._followers = []


def _whole_blocks(rows: Any) -> Any:
    """Rounded up to blocks of rows."""
    return -(-rows // BLOCK_ROWS) * BLOCK_ROWS


def _fits_tiles(config: ModelConfig) -> bool:
    """Can products of bfloat16 tiles compute this model? They want steps of STEP_K."""
    sizes = (config.hidden_size, config.q_size, config.kv_size, config.intermediate_size)
    return not any(size % STEP_K for size in (*sizes, config.head_dim))


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.uint32))
