"""The router on the bus: listens to loads, ends and KV events, answers `admit` and `route`."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import anyio
import anyio.lowlevel

from finback.services.router.kv_watch import KvWatch
from finback.services.router.placer import Decision, Placer
from finback.services.router.prefix_index import HASH_BYTES, Segments, keys_of
from finback.services.router.tenant_desk import TenantDesk
from finback.shared.actor.endpoint import Call
from finback.shared.actor.service import Service, ServiceContext
from finback.shared.clock import monotonic_s
from finback.shared.errors import InvalidRequest, NotFound, ServingError, Unavailable
from finback.shared.telemetry import tracing
from finback.shared.wire.messages.control import InstanceLost, InstanceRecord
from finback.shared.wire.messages.decode import LoadReport
from finback.shared.wire.messages.route import (
    AdmitRequest,
    RequestEnded,
    RouteReply,
    RouteRequest,
    TenantLedger,
)

_SWEEP_S: Final = 5.0
_MAX_BLOCKS: Final = 65_536
_PIECE: Final = 4_096  # blocks looked up at a time: under half a millisecond
ROLES: Final = ("prefill", "decode")


class Router(Service):
    """Holds nothing that reports do not bring back; any number of routers may run."""

    name = "router"

    def __init__(self, context: ServiceContext) -> None:
        super().__init__(context)
        self.placer = Placer(
            max_age_s=self.config.request_timeout_s + 60,
            max_queue=self.config.max_queue,
            max_blocks=self.config.router_index_blocks,
        )
        self.loads = self.placer.loads
        self.kv = KvWatch(self, self.placer)
        self.tenants = TenantDesk(self.metrics)
        self._lost: set[tuple[str, int]] = set()

    async def start(self) -> None:
        for role in ROLES:
            await self.listen(self.subjects.event(role, "load"), LoadReport, self._load)
        ended = self.subjects.event("gateway", "request-ended")
        await self.listen(ended, RequestEnded, self._ended)
        ledger = self.subjects.event("gateway", "tenant-ledger")
        await self.listen(ledger, TenantLedger, self.tenants.hear)
        lost = self.subjects.event("supervisor", "instance-lost")
        await self.listen(lost, InstanceLost, self._instance_lost)
        self.context.directory.on_change(self._directory_changed)
        await self.kv.start()
        self.spawn(self._sweep)
        # One worker: each answer counts what the one before has placed.
        await self.add_endpoint("route", RouteRequest, self._route, scope="both", workers=1)
        await self.add_endpoint(
            "admit", AdmitRequest, self.tenants.admit, scope="instance", workers=1
        )

    async def _route(self, call: Call[RouteRequest]) -> RouteReply:
        request = call.message
        if len(request.block_hashes) > HASH_BYTES * _MAX_BLOCKS:
            raise InvalidRequest(
                f"block_hashes must be at most {_MAX_BLOCKS} hashes", reason="block_hashes"
            )
        try:
            keys = keys_of(request.block_hashes)
        except ValueError as error:
            raise InvalidRequest(str(error), reason="block_hashes") from None
        segments = await self._segments(keys)
        request = replace(request, model=self._canonical(request.model))
        try:
            decision = self.placer.place(
                request, keys, segments, lambda: self._records(call.message.model), monotonic_s()
            )
        except ServingError as refused:
            if not self._records(request.model):
                raise self._nobody(call.message.model) from None
            why = refused.reason or refused.code
            self.metrics.count("finback.router.refused", reason=why)
            raise
        self._tell(decision)
        await self.kv.prefetch(request, decision)
        return _reply(decision)

    async def _segments(self, keys: Sequence[int]) -> Segments | None:
        """Holders along the prompt; None while the index is being rebuilt.

        Very long prompts are looked up in pieces, so that the event loop goes round in between.
        """
        if not self.kv.is_ready:
            return None
        found: Segments = []
        for start in range(0, len(keys), _PIECE):
            piece = keys[start : start + _PIECE]
            part = self.placer.index.segments(piece)
            found += part
            if sum(count for _, count in part) < len(piece):
                break
            if start + _PIECE < len(keys):
                await anyio.lowlevel.checkpoint()
        return found

    def _tell(self, decision: Decision) -> None:
        placement = decision.placement
        self.metrics.count(
            "finback.router.placed", decode=placement.decode.instance, reason=decision.kind
        )
        tracing.annotate(
            finback__reason=decision.reason,
            finback__prefill=placement.prefill.instance,
            finback__decode=placement.decode.instance,
        )

    def _records(self, model: str) -> list[InstanceRecord]:
        wanted = self._canonical(model)
        return [
            record
            for role in ROLES
            for record in self.context.directory.instances(role)
            if record.model in ("", wanted) and (record.instance, record.epoch) not in self._lost
        ]

    def _canonical(self, model: str) -> str:
        return self.config.model_name if model in self.config.model_aliases else model

    def _nobody(self, model: str) -> Exception:
        records = [r for role in ROLES for r in self.context.directory.instances(role, state=None)]
        served = {record.model for record in records} | {self.config.model_name}
        if self._canonical(model) in served:
            return Unavailable(f"no instance serves {model} now", reason="no_instance")
        return NotFound(f"the model {model!r} does not exist", param="model", reason="model")

    def _load(self, report: LoadReport) -> None:
        self.loads.heard(report, monotonic_s())

    def _ended(self, ended: RequestEnded) -> None:
        self.loads.ended(ended.request_id, ended.attempt)

    def _instance_lost(self, lost: InstanceLost) -> None:
        """Known dead before its lease runs out; the bucket may still list it for a while."""
        self._lost.add((lost.instance, lost.epoch))
        self.loads.forget(lost.instance)
        self.kv.instance_lost(lost)
        self.placer.fleets.forget()
        self.metrics.count("finback.router.instances_lost")

    def _directory_changed(self) -> None:
        records = self.context.directory.all()
        self._lost &= {(record.instance, record.epoch) for record in records}
        self.placer.fleets.forget()
        self.kv.directory_changed()

    async def _sweep(self) -> None:
        while True:
            await anyio.sleep(_SWEEP_S)
            self.loads.sweep(monotonic_s())
            self.placer.sessions.sweep(monotonic_s())
            self.tenants.sweep()


def _reply(decision: Decision) -> RouteReply:
    prefill, decode = decision.placement.prefill, decision.placement.decode
    return RouteReply(
        prefill_instance=prefill.instance,
        prefill_epoch=prefill.epoch,
        decode_instance=decode.instance,
        decode_epoch=decode.epoch,
        reason=decision.reason,
        num_hit_tokens=decision.placement.num_hit_tokens,
        decode_computes_tokens=decision.decode_computes_tokens,
    )
