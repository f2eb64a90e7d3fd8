"""Open generations and the engines that work on them: token streams in, commands out, who is alive.

One subscription takes the tokens of all requests. An instance is lost when the supervisor says so,
or when its heartbeats stay out and it does not answer a ping either.
"""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

from finback.services.gateway.generation import Choice, Generation, Lost
from finback.shared.actor.bus import Bus, Message
from finback.shared.actor.client import Client
from finback.shared.clock import monotonic_s
from finback.shared.config import StackConfig
from finback.shared.errors import DeadlineExceeded, ServingError, Unavailable, WireError, from_code
from finback.shared.telemetry.metrics import Metrics
from finback.shared.wire import codec
from finback.shared.wire.messages.control import InstanceLost, PingReply, PingRequest
from finback.shared.wire.messages.decode import (
    CreditCommand,
    EndAck,
    FinishReply,
    FinishRequest,
    ResumeReply,
    ResumeRequest,
)
from finback.shared.wire.messages.generate import TokenBatch, TokenRow
from finback.shared.wire.messages.prefill import CancelReply, CancelRequest, PrefillFailed
from finback.shared.wire.messages.route import RouteReply
from finback.shared.wire.subjects import Subjects

MISSED_BEATS: Final = 3
# From the missed beat on which it is asked for a sign of life.
ASKED_BEATS: Final = 2
# What the only instance gets to answer a ping, and any other than a decode instance.
PING_TIMEOUT_S: Final = 2.0
# Hangs one after the other without a token are rather a machine's: each multiplies the patience.
_PATIENCE_GROWTH: Final = 4.0
# A healthy server answers within a millisecond; one that just hung takes its time.
SLOW_FLUSH_S: Final = 0.1
# A prompt is computed in silence; its instance is looked after this often.
PREFILL_CHECK_S: Final = 1.0
# A row can get lost with the end in it; after this much silence the sequence is asked for.
SILENCE_S: Final = 2.0
COMMAND_TIMEOUT_S: Final = 1.0
DAMAGED_TRIES: Final = 3
CANCEL_TRIES: Final = 30

Spawn = Callable[..., None]
T = TypeVar("T")


class Desk:
    """What the gateway holds of requests in flight, by request id and by instance."""

    def __init__(
        self,
        *,
        bus: Bus,
        client: Client,
        subjects: Subjects,
        config: StackConfig,
        instance: str,
        metrics: Metrics,
        log: Any,
        spawn: Spawn,
        has_other: Callable[[str], bool] = lambda decode: False,
    ) -> None:
        """`has_other` says whether another decode instance than the given one serves."""
        self.bus = bus
        self.client = client
        self.subjects = subjects
        self.instance = instance
        self.metrics = metrics
        self.log = log
        self.open: dict[str, Generation] = {}
        self._spawn = spawn
        self._has_other = has_other
        self._beat_s = config.heartbeat_ms / 1000
        self._lease_ttl_s = config.lease_ttl_s
        self._heard_s: dict[str, float] = {}
        self._pinging: set[str] = set()
        self._lost: dict[str, int] = {}
        self._patient_until_s = 0.0
        self._last_prefill_check_s = 0.0

    # -- tokens in

    def on_tokens(self, message: Message) -> None:
        """One step's tokens of one decode instance; called on the event loop, never blocks."""
        decode = message.subject.rpartition(".")[2]
        try:
            batch = codec.decode(message.data, TokenBatch)
        except WireError as error:
            self.metrics.count("finback.gateway.bad_batches")
            self.log.warning("dropped", instance=decode, error=error.public_message)
            # It may have been the last one, behind which no gap would show.
            for generation in self._placed_at(decode):
                if generation.is_accepted:
                    self._resume_all(generation)
            return
        self._heard_s[decode] = monotonic_s()
        ended = [
            (row.request_id, row.choice, row.attempt)
            for row in batch.rows
            if self._on_row(decode, batch.epoch, row)
        ]
        if ended:
            self._spawn(self._acknowledge, decode, tuple(ended))

    def _on_row(self, decode: str, epoch: int, row: TokenRow) -> bool:
        """Returns whether the row's end can be acknowledged: nothing more is wanted of it."""
        generation = self.open.get(row.request_id)
        if generation is None or generation.attempt != row.attempt:
            return row.end is not None
        placement = generation.placement
        if placement is None or placement.decode_instance != decode:
            return False
        if epoch < placement.decode_epoch:
            return False
        self._stop_stray(generation, row)
        lacking = generation.accept(row)
        if lacking is not None:
            self.metrics.count("finback.gateway.gaps")
            self.resume_later(generation, lacking, decode)
            return False
        return row.end is not None

    def _stop_stray(self, generation: Generation, row: TokenRow) -> None:
        """A choice that ended here before its instance knew of it need not go on there."""
        if row.end is not None or not 0 <= row.choice < len(generation.choices):
            return
        choice, placement = generation.choices[row.choice], generation.placement
        if choice.end is not None and not choice.is_heard and placement is not None:
            self.cancel_later(generation.request_id, row.attempt, placement, row.choice)

    async def _acknowledge(self, decode: str, ended: tuple[tuple[str, int, int], ...]) -> None:
        await self.publish(self.subjects.instance("decode", decode, "ended"), EndAck(ended=ended))

    def resume_later(self, generation: Generation, choice: Choice, decode: str) -> None:
        """Ask the sequence for what is missing, once at a time."""
        if not choice.is_resuming:
            choice.is_resuming = True
            self._spawn(self._resume, generation, choice, decode)

    async def _resume(self, generation: Generation, choice: Choice, decode: str) -> None:
        attempt = generation.attempt
        request = ResumeRequest(
            request_id=generation.request_id,
            choice=choice.index,
            attempt=attempt,
            offset=choice.num_received,
        )
        try:
            reply = await self._resumed(decode, request)
        except ServingError as error:
            self.log.warning("resume failed", instance=decode, error=error.public_message)
            return
        finally:
            choice.is_resuming = False
        if generation.attempt != attempt or generation.is_over:
            return
        if reply.row is None:
            # Before the first token its prompt may be on its way.
            if generation.has_tokens:
                text = f"{decode} no longer knows the request"
                generation.lose(Lost(text, decode, is_crash=False))
        else:
            generation.accept(reply.row)
            if reply.row.end is not None:
                key = (generation.request_id, choice.index, attempt)
                await self._acknowledge(decode, (key,))

    async def _resumed(self, decode: str, request: ResumeRequest) -> ResumeReply:
        """The answer; one that was damaged on its way is asked for again. Raises `ServingError`."""
        for _ in range(DAMAGED_TRIES - 1):
            try:
                return await self._ask_decode(decode, "resume", request, ResumeReply)
            except WireError as error:
                self.metrics.count("finback.gateway.bad_replies")
                self.log.warning("asked again", instance=decode, error=error.public_message)
        return await self._ask_decode(decode, "resume", request, ResumeReply)

    async def on_failed(self, failed: PrefillFailed) -> None:
        """Prefill could not complete a prompt."""
        generation = self.open.get(failed.request_id)
        if generation is None or generation.attempt != failed.attempt:
            return
        error = from_code(failed.code, failed.public_message, reason=failed.reason or None)
        if isinstance(error, Unavailable):
            error = Lost(failed.public_message, failed.instance, is_crash=False)
        generation.lose(error, failed.instance)

    # -- commands out

    async def publish(self, subject: str, message: object) -> None:
        """Tell; a bus that is away for the moment only costs a metric."""
        try:
            await self.client.publish(subject, message)
        except ServingError as error:
            self.metrics.count("finback.gateway.publish_failures")
            self.log.warning("cannot publish", subject=subject, error=error.public_message)

    async def grant(self, generation: Generation, choice: Choice) -> None:
        """Let a choice run on."""
        placement = generation.placement
        if placement is not None:
            up_to = generation.extend_credit(choice)
            command = CreditCommand(grants=((generation.request_id, choice.index, up_to),))
            subject = self.subjects.instance("decode", placement.decode_instance, "credit")
            await self.publish(subject, command)

    async def finish(
        self, generation: Generation, choice: Choice, num_tokens: int
    ) -> FinishReply | None:
        """A stop string: end a choice at decode too. None if decode could not be asked."""
        placement = generation.placement
        if placement is None:
            return None
        request = FinishRequest(
            request_id=generation.request_id,
            choice=choice.index,
            attempt=generation.attempt,
            num_tokens=num_tokens,
        )
        decode = placement.decode_instance
        try:
            reply: FinishReply = await self._ask_decode(decode, "finish", request, FinishReply)
        except ServingError as error:
            self.log.warning("finish failed", instance=decode, error=error.public_message)
            self.cancel_later(generation.request_id, generation.attempt, placement, choice.index)
            return None
        return reply

    def cancel_later(
        self, request_id: str, attempt: int, placement: RouteReply, choice: int | None = None
    ) -> None:
        """Cancel at both instances, until each has acknowledged it or is lost."""
        request = CancelRequest(request_id=request_id, attempt=attempt, choice=choice)
        self._spawn(self._cancel, "decode", placement.decode_instance, request)
        if placement.prefill_instance != placement.decode_instance:
            self._spawn(self._cancel, "prefill", placement.prefill_instance, request)

    async def _cancel(self, role: str, instance: str, request: CancelRequest) -> None:
        subject = self.subjects.instance(role, instance, "cancel")
        for _ in range(CANCEL_TRIES):
            if instance in self._lost:
                return
            try:
                await self.client.call(
                    subject,
                    request,
                    CancelReply,
                    timeout_s=COMMAND_TIMEOUT_S,
                    request_id=request.request_id,
                    attempt=request.attempt,
                )
            except Unavailable as error:
                if error.reason == "no_responders":
                    return
                await asyncio.sleep(COMMAND_TIMEOUT_S)
            except DeadlineExceeded:
                continue
            except ServingError as error:
                self.log.warning("cancel refused", instance=instance, error=error.public_message)
                return
            else:
                self.metrics.count("finback.gateway.cancels", role=role)
                return
        self.log.error("cancel was never acknowledged", instance=instance)

    async def _ask_decode(self, decode: str, verb: str, message: Any, reply_type: type[T]) -> T:
        return await self.client.call(
            self.subjects.instance("decode", decode, verb),
            message,
            reply_type,
            timeout_s=COMMAND_TIMEOUT_S,
            request_id=message.request_id,
            attempt=message.attempt,
        )

    # -- who is alive

    def expect(self, decode: str) -> None:
        """From now on this instance should be heard of."""
        self._heard_s[decode] = monotonic_s()

    def on_lost(self, event: InstanceLost) -> None:
        """The supervisor saw the process end."""
        self._lost[event.instance] = event.epoch
        why = event.reason or "the process has ended"
        self.lose_instance(event.instance, why, is_crash=event.is_crash)

    def lose_instance(
        self, instance: str, why: str, *, is_crash: bool, is_hang: bool = False
    ) -> None:
        """Every generation placed there goes on elsewhere, or fails."""
        affected = list(self._placed_at(instance))
        if affected:
            self.metrics.count("finback.gateway.instances_lost")
            self.log.warning("instance lost", instance=instance, why=why, requests=len(affected))
        for generation in affected:
            text = f"{instance} was lost: {why}"
            generation.lose(Lost(text, instance, is_crash=is_crash, is_hang=is_hang))

    async def on_reconnect(self) -> None:
        """Our own connection was away: nobody is declared lost for a while, all are asked."""
        self._patient_until_s = monotonic_s() + self._lease_ttl_s
        for generation in self.open.values():
            if generation.is_accepted:
                self._resume_all(generation)

    async def watch(self) -> None:
        """Run in the service's task group."""
        while True:
            before_s = monotonic_s()
            await asyncio.sleep(self._beat_s / 4)
            now_s = monotonic_s()
            if now_s - before_s > 2 * self._beat_s:  # it was we who stood still
                patient_s = now_s + MISSED_BEATS * self._beat_s
                self._patient_until_s = max(self._patient_until_s, patient_s)
            if self.open and self.bus.is_connected:
                self.check(now_s)

    def check(self, now_s: float) -> None:
        """Ping who was silent too long, ask for sequences that were."""
        if now_s < self._patient_until_s:
            return
        due = now_s - ASKED_BEATS * self._beat_s
        is_prefill_due = now_s - self._last_prefill_check_s > PREFILL_CHECK_S
        if is_prefill_due:
            self._last_prefill_check_s = now_s
        for generation in self.open.values():
            placement = generation.placement
            if placement is None or not generation.is_accepted:
                continue
            decode = placement.decode_instance
            if self._heard_s.get(decode, now_s) < due:
                self._ping_later("decode", decode)
            if now_s - generation.last_row_s > SILENCE_S:
                generation.last_row_s = now_s
                self._resume_all(generation)
            if (
                not generation.has_tokens
                and is_prefill_due
                and placement.prefill_instance != decode
            ):
                self._ping_later("prefill", placement.prefill_instance)

    def _resume_all(self, generation: Generation) -> None:
        placement = generation.placement
        if placement is None:
            return
        for choice in generation.choices:
            if choice.end is None:
                self.resume_later(generation, choice, placement.decode_instance)

    def _ping_later(self, role: str, instance: str) -> None:
        if instance not in self._pinging:
            self._pinging.add(instance)
            self._spawn(self._ping, role, instance)

    async def _ping(self, role: str, instance: str) -> None:
        subject = self.subjects.instance(role, instance, "ping")
        asked_s = monotonic_s()
        try:
            timeout_s = self._patience_s(role, instance)
            await self.client.call(subject, PingRequest(), PingReply, timeout_s=timeout_s)
            self._heard_s[instance] = monotonic_s()
        except DeadlineExceeded as error:
            if await self._is_bus_well() and monotonic_s() >= self._patient_until_s:
                if role == "decode" and self._heard_s.get(instance, asked_s) > asked_s:
                    return
                why = error.public_message
                self.lose_instance(instance, why, is_crash=False, is_hang=True)
        except Unavailable as error:
            if self.bus.is_connected and monotonic_s() >= self._patient_until_s:
                self.lose_instance(instance, error.public_message, is_crash=False)
        except ServingError as error:
            self.log.warning("ping", instance=instance, error=error.public_message)
        finally:
            self._pinging.discard(instance)

    def _patience_s(self, role: str, instance: str) -> float:
        """How long a ping may take: the rest of the missed beats, if a stream can go elsewhere."""
        if role != "decode" or not self._has_other(instance):
            return PING_TIMEOUT_S
        num_barren = max((g.num_barren for g in self._placed_at(instance)), default=0)
        rest_s = self._beat_s * (MISSED_BEATS - ASKED_BEATS)
        return float(min(PING_TIMEOUT_S, rest_s * _PATIENCE_GROWTH**num_barren))

    def _placed_at(self, instance: str) -> Iterator[Generation]:
        """Generations that an instance's death would disturb."""
        for generation in self.open.values():
            placement = generation.placement
            if placement is not None and (
                placement.decode_instance == instance
                or (placement.prefill_instance == instance and not generation.has_tokens)
            ):
                yield generation

    async def _is_bus_well(self) -> bool:
        """A server that hangs silences everybody: while it does, nobody is declared lost."""
        begun_s = monotonic_s()
        try:
            async with asyncio.timeout(PING_TIMEOUT_S):
                await self.bus.flush()
        except (TimeoutError, ServingError):
            self.metrics.count("finback.gateway.bus_hangs")
        if self.bus.is_connected and monotonic_s() - begun_s < SLOW_FLUSH_S:
            return True
        self._patient_until_s = max(self._patient_until_s, monotonic_s() + self._beat_s)
        return False
