"""The decode role: what it answers. The work is in `generations.py` and `takeover.py`."""

import asyncio
from typing import ClassVar, Final

from finback.services.decode.generations import Generations
from finback.services.decode.prefixes import hold_prefix
from finback.services.decode.table import Request
from finback.services.decode.takeover import BlockReceiver
from finback.services.decode.watch import PeerWatch
from finback.shared.actor.endpoint import Call
from finback.shared.clock import monotonic_s
from finback.shared.engine.output import StepOutput
from finback.shared.engine.sequence import Mode
from finback.shared.engine.token_chunks import ChunkAssembler
from finback.shared.engine.worker_host import WorkerHost
from finback.shared.errors import NotFound, Unavailable
from finback.shared.wire.messages.decode import (
    CreditCommand,
    EndAck,
    FinishReply,
    FinishRequest,
    HandoffReply,
    HandoffRequest,
    ReserveReply,
    ReserveRequest,
    ResumeReply,
    ResumeRequest,
)
from finback.shared.wire.messages.generate import GenerationSpec
from finback.shared.wire.messages.prefill import Ack, CancelReply, CancelRequest, TokenChunk

_CHUNKS_TIMEOUT_S: Final = 10.0
_DRAIN_POLL_S: Final = 0.02
# The reason of ends that are no failure.
DRAINING: Final = "draining"


class DecodeRole:
    """Continues prompts that prefill hands over, or takes whole ones from a co-hosted prefill."""

    name: ClassVar[str] = "decode"

    def __init__(self, host: WorkerHost) -> None:
        self._host = host
        self._generations = Generations(host)
        self._table = self._generations.table
        self._chunks = ChunkAssembler()
        self._receiver = BlockReceiver(host)
        self._watch = PeerWatch(host, self._generations)
        self._is_draining = False

    # -- lifecycle

    async def start(self) -> None:
        """Add the endpoints and start the loops."""
        generations = self._generations
        for loop in (generations.streams.run, generations.masks.run, generations.drafts.run):
            self._host.spawn(loop)
        self._host.spawn(self._beat)
        await self._watch.start()
        serve = self._host.serve
        await serve(self.name, "chunk", TokenChunk, self._chunk)
        await serve(self.name, "handoff", HandoffRequest, self._handoff, workers=32)
        await serve(self.name, "finish", FinishRequest, self._finish)
        await serve(self.name, "cancel", CancelRequest, self._cancel, workers=32)
        await serve(self.name, "resume", ResumeRequest, self._resume)
        await serve(self.name, "credit", CreditCommand, self._credit, workers=1)
        await serve(self.name, "ended", EndAck, self._ended, workers=1)
        await serve(
            self.name, "reserve", ReserveRequest, self._reserve, workers=32, takes_work=True
        )

    def on_step(self, output: StepOutput) -> None:
        """One engine step's results."""
        self._generations.on_step(output)

    async def drain(self) -> None:
        """Take no new sequence; what has not ended after a grace is left to another instance."""
        self._is_draining = True
        moves_at_s = monotonic_s() + self._host.config.drain_grace_s
        while self.num_open and monotonic_s() < moves_at_s:  # noqa: ASYNC110  # a count over a table
            await asyncio.sleep(_DRAIN_POLL_S)
        self._hand_on("the decode instance is draining", DRAINING)
        await self._generations.streams.flush()

    def _hand_on(self, text: str, reason: str = "") -> None:
        """End what is open; its gateways go on with it elsewhere."""
        for request in self._table:
            self._generations.end_request_with_error(request, "unavailable", text, reason=reason)

    async def stop(self) -> None:
        """Tell whoever still waits that nothing more comes."""
        self._is_draining = True
        self._hand_on("the decode instance stops")
        await self._generations.streams.flush()

    @property
    def num_open(self) -> int:
        """Choices that have not ended."""
        return len(self._table.open_choices())

    @property
    def num_queued(self) -> int:
        """Sequences whose prompt is still being handed over."""
        return sum(not request.is_activated for request in self._table)

    # -- taking sequences in

    async def add_full(self, spec: GenerationSpec, token_ids: bytes, timeout_s: float) -> None:
        """A whole prompt from the prefill role of this process."""
        self._check_open()
        request = await self._generations.admit(spec, token_ids, timeout_s)
        request.is_activated = True
        await self._add_first(request, "full")

    async def cancel(self, request_id: str, attempt: int, choice: int | None) -> bool:
        """End a request of this process's prefill role."""
        return await self._generations.cancel(request_id, attempt, choice)

    async def _chunk(self, call: Call[TokenChunk]) -> Ack:
        self._chunks.add(call.message)
        return Ack()

    async def _reserve(self, call: Call[ReserveRequest]) -> ReserveReply:
        self._check_open()
        message, spec = call.message, call.message.spec
        try:
            async with asyncio.timeout(_CHUNKS_TIMEOUT_S):
                prompt = await self._chunks.join(
                    spec.request_id, spec.attempt, spec.token_ids, message.num_chunks
                )
        except TimeoutError:
            raise Unavailable("pieces of the prompt did not arrive", reason="chunk") from None
        await self._host.has_arena()
        lane = await self._host.peer_lanes.agree(
            message.prefill_instance, message.cache_instance, message.file_address
        )
        timeout_s = spec.timeout_ms / 1000 or self._host.config.request_timeout_s
        request = await self._generations.admit(spec, prompt, timeout_s)
        request.prefill_instance = message.prefill_instance
        request.prefill_epoch = message.prefill_epoch
        num_cached = await self._add_first(request, "decode")
        return ReserveReply(epoch=self._host.epoch, num_cached_tokens=num_cached, lane=lane)

    async def _add_first(self, request: Request, mode: Mode) -> int:
        """Bring what the cache has of the prompt, then into the engine; its cached tokens."""
        at_once = mode == "full"
        hold = await hold_prefix(self._host, self._generations, request, at_once=at_once)
        num_cached = self._generations.add_first(request, mode, hold)
        if hold is None:
            self._host.prefixes.count_device(num_cached)
        return num_cached

    def _check_open(self) -> None:
        if self._is_draining:
            raise Unavailable("the decode instance is draining", reason="draining")

    async def _handoff(self, call: Call[HandoffRequest]) -> HandoffReply:
        message = call.message
        request = self._open_request(message.request_id, message.attempt)
        if request.is_activated:  # asked again because our answer was lost
            return HandoffReply(num_copied_blocks=len(message.tickets))
        request.heard_s = monotonic_s()
        missing = await self._receiver.receive(request, message)
        request = self._open_request(message.request_id, message.attempt)
        request.heard_s = monotonic_s()
        if missing:
            request.first_missing = min(missing)
        if message.is_last and message.state is not None and not missing:
            await self._receiver.receive_states(request, message)
            request = self._open_request(message.request_id, message.attempt)
        if message.is_last and not request.is_activated:
            self._activate(request, message)
        return HandoffReply(num_copied_blocks=len(message.tickets) - len(missing), missing=missing)

    def _open_request(self, request_id: str, attempt: int) -> Request:
        request = self._table.get(request_id, attempt)
        if request is None or request.is_ended:
            raise NotFound("no such sequence here (any more)", reason="sequence")
        return request

    def _activate(self, request: Request, last: HandoffRequest) -> None:
        num_tokens = last.num_tokens
        if request.first_missing is not None:
            block_size = self._host.engine.cache_spec.block_size
            num_tokens = min(num_tokens, request.first_missing * block_size)
        request.is_activated = True
        key = (request.request_id, request.spec.choices[0].index)
        if not self._host.engine.activate(key, num_tokens, last.num_cached_tokens):
            raise NotFound("the sequence is gone", reason="sequence")

    # -- what gateways ask

    async def _finish(self, call: Call[FinishRequest]) -> FinishReply:
        message = call.message
        choice = self._table.choice((message.request_id, message.choice), message.attempt)
        counts = None if choice is None else self._generations.finish(choice, message.num_tokens)
        if counts is None:
            return FinishReply(found=False)
        return FinishReply(
            found=True,
            num_cached_tokens=counts.num_cached_tokens,
            num_draft_tokens=counts.num_draft_tokens,
            num_accepted_tokens=counts.num_accepted_tokens,
            num_steps=counts.num_steps,
        )

    async def _cancel(self, call: Call[CancelRequest]) -> CancelReply:
        message = call.message
        found = await self._generations.cancel(message.request_id, message.attempt, message.choice)
        return CancelReply(found=found)

    async def _resume(self, call: Call[ResumeRequest]) -> ResumeReply:
        message = call.message
        choice = self._table.choice((message.request_id, message.choice), message.attempt)
        return ResumeReply(row=None if choice is None else choice.row_from(message.offset))

    async def _credit(self, call: Call[CreditCommand]) -> None:
        for request_id, index, up_to_offset in call.message.grants:
            self._host.engine.grant((request_id, index), up_to_offset)

    async def _ended(self, call: Call[EndAck]) -> None:
        for request_id, index, attempt in call.message.ended:
            request = self._table.get(request_id, attempt)
            if request is not None:
                self._generations.acknowledge(request, index)

    # -- loops

    async def _beat(self) -> None:
        """Signs of life to every gateway that waits for tokens."""
        while True:
            await asyncio.sleep(self._host.config.heartbeat_ms / 1000)
            self._generations.streams.heartbeat(self._table.live_gateways())
