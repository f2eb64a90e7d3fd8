"""Asks the sampler service for masks: one message for all sequences that wait, a few under way.

A sampler that is away is asked again until the patience of the sequences runs out; it rebuilds what
it lost from the tokens it is told. The batch goes on meanwhile, only these sequences wait.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from finback.services.decode.fair_parent import FairParent
from finback.services.decode.mask_book import Key, MaskBook, Masked, TokensFrom
from finback.shared.clock import monotonic_s
from finback.shared.engine.sequence import TokenIds
from finback.shared.engine.worker_host import WorkerHost
from finback.shared.errors import InvalidRequest, ServingError
from finback.shared.lanes.byte_ring import RingReader
from finback.shared.lanes.mask_ring import mask_folder, take_masks
from finback.shared.telemetry import tracing
from finback.shared.wire.messages.generate import GrammarSpec
from finback.shared.wire.messages.sampler import Mask, MaskReply, MaskRequest, MaskRow
from finback.shared.wire.packed_masks import unpack_masks

# A healthy sampler answers in about a millisecond; a new grammar may have to be compiled.
_TIMEOUT_S: Final = 5.0
_RETRY_S: Final = 0.1
_MAX_RETRY_S: Final = 1.0
_MAX_ASKING: Final = 4
PATIENCE_S: Final = 30.0

# (key, error code, text): the choice ends with this error.
OnBroken = Callable[[Key, str, str], None]


class MaskPump:
    """Keeps the engine in masks. `run` is its loop; the other methods only take notes."""

    def __init__(
        self,
        host: WorkerHost,
        tokens_from: TokensFrom,
        parent_of: Callable[[Key], Any],
        broken: OnBroken,
    ) -> None:
        self._host = host
        self._book = MaskBook()
        self._tokens_from = tokens_from
        self._parents = FairParent(parent_of)
        self._broken = broken
        self._rings = RingReader(mask_folder(host.config.shm_dir, host.config.stack_id))
        self._waiting_since: dict[Key, float] = {}
        self._wake = asyncio.Event()
        self._asking: set[asyncio.Task[None]] = set()
        self._fault: BaseException | None = None
        self._delay_s = self._quiet_until_s = 0.0

    def add(self, key: Key, grammar: GrammarSpec) -> None:
        """Constrain a sequence from its first token on."""
        self._book.add(key, grammar)

    def end(self, key: Key) -> None:
        """The sequence is over."""
        self._waiting_since.pop(key, None)
        self._parents.forget(key)
        self._book.end(key)
        self._wake.set()

    def want(self, wanted: tuple[tuple[Key, int], ...]) -> None:
        """The engine waits for these masks (key, completion index)."""
        now = monotonic_s()
        for key, position in wanted:
            if key in self._book:
                self._book.want(key, position)
                self._waiting_since.setdefault(key, now)
        if wanted:
            self._wake.set()

    def guess(self, key: Key, position: int, token_ids: TokenIds) -> bool:
        """A drafter's guess from a completion index on, for the grammar to cut; False if it has none."""
        if key not in self._book:
            return False
        self._book.guess(key, position, token_ids.astype("<i4").tobytes())
        self._wake.set()
        return True

    async def run(self) -> None:
        """Answer wants for ever, in a few messages at a time: a slow sequence holds up no other."""
        try:
            while True:
                self._wake.clear()
                if self._fault is not None:
                    raise self._fault
                now = monotonic_s()
                if now >= self._quiet_until_s and len(self._asking) < _MAX_ASKING:
                    self._begin(now)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), self._patience_s(now))
        finally:
            for task in self._asking:
                task.cancel()
            self._rings.close()

    def _patience_s(self, now: float) -> float | None:
        """When to look again although nothing happened."""
        if self._quiet_until_s > now:
            return self._quiet_until_s - now
        retry_s = self._book.retry_s()
        return retry_s - now if retry_s is not None and retry_s > now else None

    def _begin(self, now: float) -> None:
        rows, ended = self._book.take_rows(self._tokens_from, now), self._book.take_ended()
        if not rows and not ended:
            return
        task = asyncio.get_running_loop().create_task(self._ask(rows, ended))
        self._asking.add(task)
        task.add_done_callback(self._asked)

    def _asked(self, task: "asyncio.Task[None]") -> None:
        self._asking.discard(task)
        self._wake.set()
        if not task.cancelled() and task.exception() is not None:
            self._fault = task.exception()

    async def _ask(self, rows: tuple[MaskRow, ...], ended: tuple[Key, ...]) -> None:
        try:
            await self._exchange(rows, ended)
            self._delay_s = 0.0
            self._give_up(None)
        except ServingError as error:
            self._host.metrics.count("finback.decode.mask_failures", code=error.code)
            if error.reason == "vocabulary_mismatch":
                for row in rows:
                    self._broken((row.request_id, row.choice), "internal", error.public_message)
            self._give_up(error)
            self._delay_s = min(_MAX_RETRY_S, self._delay_s * 2 or _RETRY_S)
            self._quiet_until_s = monotonic_s() + self._delay_s
        finally:
            self._book.forget_asked(rows)

    async def _exchange(self, rows: tuple[MaskRow, ...], ended: tuple[Key, ...]) -> None:
        request = MaskRequest(
            instance=self._host.instance,
            epoch=self._host.epoch,
            model=self._host.config.model_name,
            rows=rows,
            ended=ended,
            vocab_size=self._host.engine.vocab_size,
            rings=self._rings.names,
        )
        subject = self._host.subjects.service("sampler", "mask")
        if not rows:
            # Told for tidiness: a sampler that does not hear it forgets them by itself.
            await self._host.client.publish(subject, request)
            return
        parent = self._parents.choose([(row.request_id, row.choice) for row in rows])
        with tracing.span("mask", {"finback.num_rows": len(rows)}, parent=parent):
            reply = await self._host.client.call(
                subject, request, MaskReply, timeout_s=_TIMEOUT_S, request_id=rows[0].request_id
            )
        answers = self._book.apply(rows, self._taken(reply), monotonic_s())
        for mask in answers.masks:
            self._waiting_since.pop(mask.key, None)
            self._provide(mask)
        for key, text in answers.broken:
            # All tokens came through its masks: it is the grammar that cannot be followed further.
            self._broken(key, "invalid_argument", f"the grammar cannot be used: {text}")

    def _taken(self, reply: MaskReply) -> tuple[Mask, ...]:
        """The masks, out of shared memory where they were left there; those that are lost are asked for again."""
        masks = take_masks(self._rings, reply)
        num_left = sum(1 for mask in reply.masks if mask.ring_at)
        num_lost = len(reply.masks) - len(masks)
        for lane, count in (
            ("shm", num_left - num_lost),
            ("lost", num_lost),
            ("message", len(reply.masks) - num_left),
        ):
            if count:
                self._host.metrics.count("finback.decode.masks", count, lane=lane)
        if reply.ring and self._host.config.mask_lane != "message":
            self._rings.meet(reply.ring)
        return masks

    def _provide(self, mask: Masked) -> None:
        token_ids = np.frombuffer(mask.ahead_ids, dtype="<i4").astype(np.int32)
        try:
            ahead = unpack_masks(mask.ahead_masks, token_ids.size, len(mask.bitmask))
        except ValueError:  # of another version: its own mask is enough
            token_ids, ahead = token_ids[:0], ()
        try:
            self._host.engine.provide_mask(
                mask.key, mask.position, (mask.bitmask, *ahead), token_ids
            )
        except InvalidRequest as error:  # a sampler of another vocabulary
            self._broken(mask.key, "internal", error.public_message)

    def _give_up(self, error: ServingError | None) -> None:
        """End the sequences that have waited too long (also for a sampler that only asks back)."""
        now = monotonic_s()
        for key in self._book.wanted_keys():
            if now - self._waiting_since.get(key, now) >= PATIENCE_S:
                code = "unavailable" if error is None else error.code
                self._broken(key, code, "the sampler service does not answer")
