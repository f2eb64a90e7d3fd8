"""The whole step, as every thread runs it."""

from finback.kernels.compiled import compiled, device_function, inlined
from finback.kernels.cpu_features import chosen
from finback.kernels.decoder_stack.cpu_phases import (
    BUFFER_AT,
    PANEL_AT,
    attend,
    embed_rows,
    gate_up,
    mark,
    multiply,
    norm_out_rows,
    norm_rows,
    rotate_and_store,
    rows_of_tile,
)
from finback.kernels.decoder_stack.layout import (
    CLOSED,
    EXTRA_PHASES,
    PHASES_PER_LAYER,
    SYNC_CLAIMS,
    SYNC_GATE,
    SYNC_LINE,
    SYNC_SEMAPHORE,
    SYNC_STOP,
    TASK_HEAD,
    TASK_WIDE,
    Job,
    Layer,
)
from finback.kernels.linear.cpu_tiles import TILE_COLUMNS
from finback.kernels.native import (
    atomic_add,
    atomic_load,
    peek_i32,
    peek_i64,
    poke_i64,
    sem_post,
    sem_trywait,
    sem_wait,
    wait_for_equal,
)

# mypy: disable-error-code="no-untyped-def"

if chosen().wide == "amx":
    from finback.kernels.decoder_stack.cpu_wide import run_wide
else:

    @device_function
    def run_wide(thread, num_threads, job):
        """Never called: there are no wide products here."""


@inlined
def _reset(job):
    """Zero the counters; the gate is closed, no other thread is inside."""
    for phase in range(job[Job.NUM_LAYERS] * PHASES_PER_LAYER + EXTRA_PHASES):
        counters = job[Job.SYNC] + SYNC_CLAIMS + phase * SYNC_LINE
        poke_i64(counters, 0)
        poke_i64(counters + 8, 0)


@inlined
def _write_units(job):
    """Split every sequence's rows into tiles; returns how many. Each thread writes the same."""
    num_units = 0
    rows_a_tile = rows_of_tile(job)
    for seq in range(job[Job.NUM_SEQS]):
        first = peek_i32(job[Job.CU_SEQLENS] + seq * 4)
        end = peek_i32(job[Job.CU_SEQLENS] + seq * 4 + 4)
        for row in range(first, end, rows_a_tile):
            unit = job[Job.UNITS] + num_units * 24
            poke_i64(unit, seq)
            poke_i64(unit + 8, row)
            poke_i64(unit + 16, min(rows_a_tile, end - row))
            num_units += 1
    return num_units


@inlined
def _run_layers(thread, num_threads, job):
    scratch = job[Job.SCRATCH] + thread * job[Job.SCRATCH_STEP]
    panel, buffer = scratch + PANEL_AT, scratch + BUFFER_AT
    rows, hidden, inner = job[Job.NUM_ROWS], job[Job.HIDDEN], job[Job.INNER]
    q_size = job[Job.NUM_HEADS] * job[Job.HEAD_DIM]
    qkv_size = q_size + 2 * job[Job.NUM_KV_HEADS] * job[Job.HEAD_DIM]
    hidden_tiles, qkv_tiles = hidden // TILE_COLUMNS, qkv_size // TILE_COLUMNS
    num_units = _write_units(job)
    phase = 0
    if job[Job.FIRST_LAYER] == 0:
        embed_rows(job, phase, num_threads)
    mark(thread, job, phase)
    phase += 1
    for index in range(job[Job.FIRST_LAYER], job[Job.END_LAYER]):
        layer = job[Job.LAYERS] + index * Layer.SIZE * 8
        norm_rows(job, phase, num_threads, peek_i64(layer + Layer.ATTN_NORM * 8), index > 0)
        mark(thread, job, phase)
        phase += 1
        multiply(job, phase, num_threads, peek_i64(layer + Layer.QKV * 8), qkv_tiles, rows,
                 job[Job.NORMED], hidden, job[Job.QKV], qkv_size * 4, panel)  # fmt: skip
        mark(thread, job, phase)
        phase += 1
        rotate_and_store(job, phase, num_threads, index, peek_i64(layer + Layer.Q_NORM * 8),
                         peek_i64(layer + Layer.K_NORM * 8))  # fmt: skip
        mark(thread, job, phase)
        phase += 1
        attend(job, phase, num_threads, index, num_units, scratch)
        mark(thread, job, phase)
        phase += 1
        multiply(job, phase, num_threads, peek_i64(layer + Layer.O * 8), hidden_tiles, rows,
                 job[Job.MIXED], q_size, job[Job.DELTA], hidden * 4, panel)  # fmt: skip
        mark(thread, job, phase)
        phase += 1
        norm_rows(job, phase, num_threads, peek_i64(layer + Layer.MLP_NORM * 8), True)
        mark(thread, job, phase)
        phase += 1
        gate_up(job, phase, num_threads, peek_i64(layer + Layer.GATE_UP * 8), rows, panel, buffer)
        mark(thread, job, phase)
        phase += 1
        multiply(job, phase, num_threads, peek_i64(layer + Layer.DOWN * 8), hidden_tiles, rows,
                 job[Job.ACTIVATED], inner, job[Job.DELTA], hidden * 4, panel)  # fmt: skip
        mark(thread, job, phase)
        phase += 1
    if job[Job.END_LAYER] == job[Job.NUM_LAYERS]:
        norm_out_rows(job, phase, num_threads, job[Job.NUM_LAYERS] > 0)
    mark(thread, job, phase)


@inlined
def _run_head(thread, num_threads, job):
    panel = job[Job.SCRATCH] + thread * job[Job.SCRATCH_STEP] + PANEL_AT
    multiply(job, 0, num_threads, job[Job.HEAD], job[Job.NUM_HEAD_TILES], job[Job.HEAD_ROWS],
             job[Job.HEAD_IN], job[Job.HIDDEN], job[Job.LOGITS], job[Job.LOGITS_STEP], panel)  # fmt: skip


@device_function
def _run(thread, num_threads, job):
    if job[Job.TASK] == TASK_HEAD:
        _run_head(thread, num_threads, job)
        mark(thread, job, 0)
    elif job[Job.TASK] == TASK_WIDE:
        run_wide(thread, num_threads, job)
    else:
        _run_layers(thread, num_threads, job)


@inlined
def _lead(num_threads, job):
    """Run a job with the help of the followers that come; returns when all is written.

    A follower that is not scheduled in time is not waited for: phases end when their units are done,
    and the gate (a count of those inside, CLOSED added) keeps late ones out.
    """
    _reset(job)
    sync = job[Job.SYNC]
    while sem_trywait(sync + SYNC_SEMAPHORE) == 0:
        pass  # wake-ups that nobody took last time
    atomic_add(sync + SYNC_GATE, -CLOSED)
    for _ in range(num_threads - 1):
        sem_post(sync + SYNC_SEMAPHORE)
    _run(0, num_threads, job)
    atomic_add(sync + SYNC_GATE, CLOSED)
    wait_for_equal(sync + SYNC_GATE, CLOSED)


@inlined
def _follow(thread, num_threads, job):
    """Help with every job until one says stop."""
    sync = job[Job.SYNC]
    while True:
        sem_wait(sync + SYNC_SEMAPHORE)
        inside = atomic_add(sync + SYNC_GATE, 1)
        if inside < CLOSED:
            _run(thread, num_threads, job)
        # The last word on this job: the leader may change everything now.
        atomic_add(sync + SYNC_GATE, -1)
        if atomic_load(sync + SYNC_STOP) != 0:
            return


@compiled("void(int64, int64, int64[::1])")
def run_stack(thread, num_threads, job):
    """Thread 0 runs the job that is described; others follow until they are told to stop.

    One entry point for all, since each is compiled by itself. Thread -1 only wakes the followers.
    """
    if thread > 0:
        _follow(thread, num_threads, job)
    elif thread == 0:
        _lead(num_threads, job)
    else:
        for _ in range(num_threads - 1):
            sem_post(job[Job.SYNC] + SYNC_SEMAPHORE)


decoder_stack = run_stack
"""The name by which the registry finds it."""
