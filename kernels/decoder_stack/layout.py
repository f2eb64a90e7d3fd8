"""The numbers that Python hands to the compiled stack: one int64 array, one place for each name."""

from enum import IntEnum, auto
from typing import Final


class Job(IntEnum):
    """Indices into the job array. Sizes are elements, steps are bytes, others addresses."""

    TASK = 0
    # the step
    NUM_ROWS = auto()
    NUM_SEQS = auto()
    NUM_OUT = auto()
    TOKEN_IDS = auto()  # int32 [T]
    POSITIONS = auto()  # int32 [T]
    SLOTS = auto()  # int32 [T]
    TABLES = auto()  # int32 [S, table_step / 4]
    TABLE_STEP = auto()
    CU_SEQLENS = auto()  # int32 [S + 1]
    CONTEXT_LENS = auto()  # int32 [S]
    OUT_ROWS = auto()  # int64 [R]
    OUT = auto()  # float32 [R, hidden]
    # the KV pool
    KEYS = auto()
    VALUES = auto()
    KV_LAYER_STEP = auto()
    KV_BLOCK_BYTES = auto()  # of one layer's keys (or values)
    KV_KIND = auto()
    KV_ITEM_BYTES = auto()
    BLOCK_SIZE = auto()
    # activations, float32
    X = auto()  # [T, hidden]
    NORMED = auto()  # [T, hidden]
    QKV = auto()  # [T, q + 2 kv]
    MIXED = auto()  # [T, q]
    DELTA = auto()  # [T, hidden]
    ACTIVATED = auto()  # [T, intermediate]
    UNITS = auto()  # int64 [units, 3]: sequence, first row, rows; wide: [units, 4], its panels
    KV_UNITS = auto()  # wide: int64 [blocks, 3]: sequence, first token, the sequence's panels
    KV_PANELS = auto()  # wide: keys and values of all sequences as bfloat16 panels
    SCRATCH = auto()  # of thread 0
    SCRATCH_STEP = auto()
    SCORES_STEP = auto()  # bytes of a row of scores
    # tables and constants
    COS = auto()  # float32 [positions, head_dim / 2]
    SIN = auto()
    LAYERS = auto()  # int64 [layers, len(Layer)]
    SYNC = auto()
    EPS = auto()  # bits of float32
    SCALE = auto()  # bits of float32
    SCALE_LOG2 = auto()  # wide: the same times log2(e), bits of float32
    NUM_LAYERS = auto()
    HIDDEN = auto()
    INNER = auto()
    NUM_HEADS = auto()
    NUM_KV_HEADS = auto()
    HEAD_DIM = auto()
    EMBEDDING = auto()  # tiles of the table [vocab, hidden]
    FINAL_NORM = auto()
    # the head
    HEAD = auto()  # tiles
    NUM_HEAD_TILES = auto()
    HEAD_ROWS = auto()
    HEAD_IN = auto()  # float32 [R, hidden]
    LOGITS = auto()  # float32 [R, logits_step / 4]
    LOGITS_STEP = auto()
    # the layers of this call; a step may come in several
    FIRST_LAYER = auto()
    END_LAYER = auto()
    # int64 [phases]: processor cycles when thread 0 ended each phase of the job; 0: not wanted
    CLOCK = auto()
    SIZE = auto()


class Layer(IntEnum):
    """Columns of the layer table: tile tables (int64 [tiles, 2]) and norm weights; 0 = absent."""

    ATTN_NORM = 0
    QKV = auto()
    Q_NORM = auto()
    K_NORM = auto()
    O = auto()  # the projection's name in the literature
    MLP_NORM = auto()
    GATE_UP = auto()
    DOWN = auto()
    SIZE = auto()


TASK_LAYERS: Final = 0
TASK_HEAD: Final = 1
TASK_WIDE: Final = 2

SYNC_LINE: Final = 64
"""Bytes between counters, so that threads do not share a cache line by accident."""

SYNC_GATE: Final = 0
SYNC_SEMAPHORE: Final = 64
SYNC_STOP: Final = 128
SYNC_CLAIMS: Final = 192  # a line a phase: units claimed, units done

CLOSED: Final = 1 << 32

PHASES_PER_LAYER: Final = 9
"""Of the longer one: eight of exact layers, nine of wide ones."""
EXTRA_PHASES: Final = 4

ROW_BLOCK: Final = 96
"""Rows that pass a weight tile at once: their activations stay in the second-level cache."""

CACHED_K: Final = 65536
"""Activations of a row block, elements: 256 KB, half of a second-level cache."""

SCRATCH_FIXED_BYTES: Final = 256
"""Room for a few scalars (sums of a softmax) at the start of a thread's scratch."""
