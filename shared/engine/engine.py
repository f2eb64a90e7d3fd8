"""The engine: the one object of `shared/engine` that a worker service talks to.

All methods are for the event-loop thread and none of them blocks. Lifecycle: `start`, any calls,
`stop`. A failure of the device thread is final: `on_failure` is called, `failed()` raises, and the
process is expected to die and be started again.

The loop plans and commits (`step_loop`), the device thread computes.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from finback.shared.clock import monotonic_s
from finback.shared.engine.block_port import BlockPort
from finback.shared.engine.config import EngineConfig
from finback.shared.engine.device import Device, choose_device
from finback.shared.engine.device_thread import DeviceThread
from finback.shared.engine.mask_shelf import span_of
from finback.shared.engine.output import Admission, EngineLoad, StepOutput
from finback.shared.engine.prefix_hold import PrefixHold
from finback.shared.engine.prefix_port import PrefixPort
from finback.shared.engine.resident_runner import new_runner
from finback.shared.engine.scheduler import Scheduler
from finback.shared.engine.sequence import (
    SequenceCounts,
    SequenceKey,
    SequenceSpec,
    State,
    TokenIds,
)
from finback.shared.engine.sizing import EngineSizes, choose_sizes
from finback.shared.engine.state_port import StatePort
from finback.shared.engine.step_loop import StepLoop
from finback.shared.engine.step_times import StepTime, StepTimes
from finback.shared.errors import InvalidRequest, InvariantViolated, Unavailable
from finback.shared.kv.forget_scope import EVERYTHING, ForgetScope
from finback.shared.wire.messages.control import CacheSpec

if TYPE_CHECKING:
    from finback.shared.models.causal_lm import CausalLM

_WARM_UP_ROWS: Final = 16
_NO_TOKENS: Final = np.empty(0, dtype=np.int32)
# Of a pool on the host, so much lies ready beyond what was ever used.
_TOUCHED_BYTES: Final = 64 * 2**20


class Engine:
    """One model, one KV pool, one scheduler, one device thread."""

    def __init__(
        self,
        model: "CausalLM",
        config: EngineConfig,
        *,
        on_step: Callable[[StepOutput], None],
        on_failure: Callable[[BaseException], None] | None = None,
        owns_model: bool = False,
    ) -> None:
        """Take the memory. Raises `ConfigError` when it does not fit, and says the sum.

        `owns_model`: close the model at `stop`.
        """
        device = Device(choose_device(config.device), config.num_threads)
        self.config = config
        self.sizes: EngineSizes = choose_sizes(model, config, device)
        self._device = device
        self._runner = new_runner(model, self.sizes, config, device)
        self._scheduler = Scheduler(self.sizes.scheduler_config(config))
        table, geometry = self._scheduler.table, self.sizes.geometry
        self._blocks = BlockPort(table, self._runner, geometry)
        self.prefixes = PrefixPort(table, self._runner, geometry, self._copy)
        self.states: StatePort | None = None
        if table.states is not None and self.sizes.state is not None:
            self.states = StatePort(table, table.states, self.sizes.state)
        self._on_failure = on_failure
        self._owns_model = owns_model
        self._num_touched = 0
        self._times = StepTimes()
        self._steps = StepLoop(
            self._scheduler,
            self._runner.execute,
            self._times,
            depth=self._runner.depth,
            overlap_below_ms=config.overlap_below_ms,
            max_stall_ms=config.max_stall_ms,
            on_step=on_step,
            on_error=self._fail,
        )
        self._thread: DeviceThread
        self._failure: asyncio.Future[None]

    # -- facts

    @property
    def cache_spec(self) -> CacheSpec:
        """Whom this engine's blocks fit; `salt` keys the hash chain of its prefixes."""
        return self.sizes.cache_spec

    @property
    def vocab_size(self) -> int:
        """The width of the logits."""
        return self.sizes.vocab_size

    @property
    def num_blocks(self) -> int:
        """Blocks of the KV pool."""
        return self.sizes.memory.num_blocks

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus completion, in tokens."""
        return self.sizes.memory.max_model_len

    @property
    def progress(self) -> int:
        """Rises with every retired step; for ping."""
        return self._steps.progress

    @property
    def row_ms(self) -> float:
        """What a row of a prompt takes, about; 0 while no prompt was computed."""
        return self._times.row_ms

    @property
    def step_times(self) -> tuple[StepTime, ...]:
        """The table of step times by rows."""
        return self._times.table()

    def load(self) -> EngineLoad:
        """How busy the engine is."""
        table = self._scheduler.table
        waiting = sum(s.target - s.num_computed for s in table.waiting)
        chunking = sum(s.target - s.num_computed for s in table.running if not s.is_decoding)
        return EngineLoad(
            num_running=len(table.running),
            num_waiting=len(table.waiting),
            num_blocks=table.pool.num_blocks,
            num_free_blocks=table.pool.num_free,
            num_waiting_tokens=waiting + chunking,
            step_time_ms=self._times.step_time_ms,
            tokens_per_s=self._times.tokens_per_s(monotonic_s()),
            num_preemptions=table.num_preemptions,
        )

    def check_integrity(self) -> None:
        """Raise `InvariantViolated` if the books do not add up; for tests and idle times."""
        self._scheduler.table.check_integrity()

    # -- lifecycle

    async def start(self) -> None:
        """Start the device thread and warm it up; results go to the running event loop."""
        loop = asyncio.get_running_loop()
        self._failure = loop.create_future()
        self._thread = DeviceThread(
            loop,
            prepare=self._device.prepare_thread,
            on_failure=self._fail,
            collects=self._runner.launches,
        )
        self._thread.start()
        try:
            await self._warm_up_or_fail()
        except BaseException:
            await self._thread.stop()
            raise
        self._steps.start(loop, self._thread)

    async def _warm_up_or_fail(self) -> None:
        """Raise what ends the device thread meanwhile; nobody would answer any more."""
        warm_up = asyncio.ensure_future(self._warm_up())
        try:
            await asyncio.wait((warm_up, self._failure), return_when=asyncio.FIRST_COMPLETED)
            if self._failure.done():
                self._failure.result()
            await warm_up
        finally:
            warm_up.cancel()

    async def _warm_up(self) -> None:
        await self._thread.call(self._runner.prepare)
        for num_rows in (1, min(_WARM_UP_ROWS, self.config.block_size)):
            for _ in range(2):  # the first one loads, the second one is the time
                took_ms = await self._thread.call(partial(self._runner.warm_up, num_rows))
            self._times.record(num_rows, took_ms)

    async def stop(self) -> None:
        """Let the running step end, drop all sequences (no ends are told), stop the thread."""
        self._steps.is_running = False
        await self._thread.stop()
        for key in list(self._scheduler.table.by_key):
            self._scheduler.abort(key)
        if self._owns_model:
            self._runner.close()
        if not self._failure.done():
            self._failure.set_result(None)

    async def failed(self) -> None:
        """Wait until the device thread fails, then raise; returns when the engine was stopped."""
        await asyncio.shield(self._failure)

    # -- sequences

    def add(self, spec: SequenceSpec, hold: PrefixHold | None = None) -> Admission:
        """Queue a sequence, or refuse it with a reason. A newer attempt replaces an older one.

        `hold`: on its prefix (`prefixes.hold`); kept until the sequence has its blocks.
        """
        admission = Admission(accepted=False, reason="stopped", message="the engine has stopped")
        if self._steps.is_running:
            admission = self._scheduler.add(spec)
        if hold is not None:
            sequence = self._scheduler.table.by_key.get(spec.key) if admission.accepted else None
            if sequence is None or sequence.block_ids:
                self.prefixes.release(hold)
            else:
                sequence.hold = hold
                sequence.hashes = sequence.hashes or list(hold.hashes)
        self._steps.wake()
        return admission

    def activate(
        self, key: SequenceKey, num_computed_tokens: int, num_cached_tokens: int | None = None
    ) -> bool:
        """Mode decode: the KV of the first tokens was imported; compute the rest here and go on.

        `num_cached_tokens`: what prefill found cached, if that is to be reported.
        """
        done = self._scheduler.activate(key, num_computed_tokens, num_cached_tokens)
        self._steps.wake()
        return done

    def abort(self, key: SequenceKey) -> bool:
        """End a sequence silently; False if it is not known. Its blocks go with the running step."""
        found = self._scheduler.abort(key) is not None
        self._steps.wake()
        return found

    async def abort_and_wait(self, key: SequenceKey) -> bool:
        """`abort`, and return when no running step uses its blocks any more."""
        found = self.abort(key)
        if found and self._steps.is_busy:
            await self._call(lambda: None)
        return found

    def finish(self, key: SequenceKey, num_tokens: int) -> SequenceCounts | None:
        """End a choice (silently) with its first `num_tokens` completion tokens; also an ended one."""
        counts = self._scheduler.finish(key, num_tokens)
        self._steps.wake()
        return counts

    def grant(self, key: SequenceKey, up_to_offset: int) -> None:
        """Let a choice run up to this completion length."""
        if self._scheduler.grant(key, up_to_offset):
            self._steps.wake()

    def release(self, key: SequenceKey) -> None:
        """Mode prefill: the hand-over is done, its blocks may go."""
        self._scheduler.release(key)
        self._steps.wake()

    def provide_mask(
        self,
        key: SequenceKey,
        position: int,
        masks: tuple[bytes, ...],
        token_ids: TokenIds = _NO_TOKENS,
    ) -> None:
        """The tokens allowed at completion index `position` (int32 LE [ceil(vocab / 32)]), `masks[0]`.

        `token_ids`, int32 [len(masks) - 1]: a guess, token by token, that its masks allow; `masks[i]` is
        what may come behind the first `i` of it. Masks may come while the step that needs them runs.
        """
        for bitmask in masks:
            if len(bitmask) != self._runner.bitmask_bytes:
                raise InvalidRequest(
                    f"a bitmask has {self._runner.bitmask_bytes} bytes here, not {len(bitmask)}"
                )
        sequence = self._scheduler.provide_mask(key, position, masks[0])
        if sequence is None:
            return
        if sequence.state is State.RUNNING:
            span = span_of(sequence, masks, token_ids)
            self._runner.slots.offer_masks(sequence.slot, span)
        self._steps.wake()

    def provide_draft(self, key: SequenceKey, position: int, token_ids: TokenIds) -> None:
        """A guess for absolute positions `position`, `position` + 1, ...; may be late or wrong.

        It is looked at when the next step is launched: what disagrees with the tokens sampled
        meanwhile is dropped. A newer guess replaces an older one.
        """
        sequence = self._scheduler.table.by_key.get(key)
        if sequence is None or sequence.state is not State.RUNNING:
            return
        wrong = (token_ids < 0) | (token_ids >= self.sizes.vocab_size)
        if wrong.any():
            token_ids = token_ids[: int(np.argmax(wrong))]
        self._runner.slots.offer_draft(sequence.slot, sequence.incarnation, position, token_ids)

    def tokens(self, key: SequenceKey) -> TokenIds | None:
        """The completion so far; of an ended choice until `forget`."""
        return self._scheduler.tokens(key)

    def forget(self, key: SequenceKey) -> None:
        """An ended choice needs no `tokens` and no `finish` any more."""
        self._scheduler.table.ended.pop(key, None)

    # -- blocks

    def reset_prefix_cache(self, scope: ForgetScope = EVERYTHING) -> None:
        """No new sequence finds what was computed so far; the running ones keep their blocks.

        Snapshots of state tell no owner: they all go, unless the scope names blocks alone.
        """
        self._scheduler.table.holds.forget(scope.covers)
        self._scheduler.table.pool.forget(scope.covers)
        if self.states is not None:
            self.states.forget(scope)

    async def export_block(self, key: SequenceKey, block_index: int, out: memoryview) -> int:
        """Copy a block (host layout) into `out` between steps; returns the tokens it holds.

        A partial last block is written as its computed tokens only. Raises `NotFound` when the
        sequence is gone or the block is not computed.
        """
        self._check_running()
        num_tokens, work = self._blocks.exporting(key, block_index, out)
        await self._call(work)
        return num_tokens

    async def import_block(self, key: SequenceKey, block_index: int, data: memoryview) -> None:
        """Mode decode, before `activate`: copy a block (host layout) into the pool between steps.

        `data` holds a whole number of tokens, at most a block. A block that is a prefix hit here is
        left as it is. Raises `NotFound` when the sequence is gone or active.
        """
        self._check_running()
        work = self._blocks.importing(key, block_index, data)
        if work is not None:
            await self._call(work)

    def touch_ahead(self) -> Callable[[], bool] | None:
        """Memory that blocks will soon be put into should be made ready: how, on any thread."""
        pool = self._scheduler.table.pool
        ahead = max(1, _TOUCHED_BYTES // self.sizes.geometry.block_bytes)
        end = min(pool.num_blocks, pool.num_used + ahead)
        first, self._num_touched = self._num_touched, max(end, self._num_touched)
        if first >= end:
            return None
        return partial(self._runner.touch_blocks, first, end)

    async def _copy(self, work: Callable[[], None]) -> None:
        self._check_running()
        await self._call(work)
        # Steps that nobody had room for may go on now.
        self._steps.wake()

    def _check_running(self) -> None:
        if not self._steps.is_running:
            raise Unavailable("the engine has stopped")

    async def _call(self, work: Callable[[], None]) -> None:
        """Do `work` on the device thread, behind what is queued there."""
        done = asyncio.ensure_future(self._thread.call(work))
        await asyncio.wait((done, self._failure), return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            done.cancel()
            raise Unavailable("the engine has stopped")
        done.result()

    def _fail(self, error: BaseException) -> None:
        self._steps.is_running = False
        if self._failure.done():
            return
        failure = InvariantViolated(f"the engine failed: {type(error).__name__}")
        failure.__cause__ = error
        self._failure.set_exception(failure)
        self._failure.exception()  # retrieved here: nobody has to await `failed`
        if self._on_failure is not None:
            self._on_failure(error)
