"""The router on the bus: listens to loads and ends, answers `router.admit` and `router.route`."""

from typing import Final

import anyio

from finback.services.router.admission import Limits, refusal
from finback.services.router.load_book import LoadBook, Open
from finback.services.router.policy import choose
from finback.services.router.prefix_book import PrefixBook, split_hashes
from finback.services.router.tenant_desk import TenantDesk
from finback.shared.actor.endpoint import Call
from finback.shared.actor.service import Service, ServiceContext
from finback.shared.clock import monotonic_s
from finback.shared.errors import InvalidRequest, NotFound, Unavailable
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
ROLES: Final = ("prefill", "decode")


class Router(Service):
    """Holds nothing that reports do not bring back; any number of routers may run."""

    name = "router"

    def __init__(self, context: ServiceContext) -> None:
        super().__init__(context)
        self.loads = LoadBook(max_age_s=self.config.request_timeout_s + 60)
        self.prefixes = PrefixBook()
        self.tenants = TenantDesk(self.metrics)
        self.limits = Limits(max_queue=self.config.max_queue)
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
        self.spawn(self._sweep)
        # One worker: each answer counts what the one before has placed.
        await self.add_endpoint("route", RouteRequest, self._route, scope="both", workers=1)
        await self.add_endpoint(
            "admit", AdmitRequest, self.tenants.admit, scope="instance", workers=1
        )

    async def _route(self, call: Call[RouteRequest]) -> RouteReply:
        request = call.message
        if len(request.block_hashes) > 32 * _MAX_BLOCKS:
            raise InvalidRequest("too many block hashes", reason="block_hashes")
        try:
            hashes = split_hashes(request.block_hashes)
        except ValueError as error:
            raise InvalidRequest(str(error), reason="block_hashes") from None
        now_s = monotonic_s()
        records = self._records(request.model)
        if not records:
            raise self._nobody(request.model)
        workers = self.loads.workers(records, now_s)
        workers = [w for w in workers if w.instance not in request.exclude]
        refused = refusal(
            workers,
            self.limits,
            num_prompt_tokens=request.num_prompt_tokens,
            num_choices=request.num_choices,
        )
        if refused is not None:
            self.metrics.count("finback.router.refused", reason=refused.reason or refused.code)
            raise refused
        placement = choose(
            workers,
            num_prompt_tokens=request.num_prompt_tokens,
            hit_blocks=self.prefixes.hits(hashes),
        )
        if placement is None:
            self.metrics.count("finback.router.refused", reason="no_pair")
            raise Unavailable(
                f"no prefill and decode instance free for {request.model}", reason="no_instance"
            )
        prefill, decode = placement.prefill, placement.decode
        self.prefixes.note(hashes, (decode.instance, prefill.instance))
        self.loads.placed(
            request.request_id,
            Open(
                prefill=prefill.instance,
                decode=decode.instance,
                num_tokens=request.num_prompt_tokens - placement.num_hit_tokens,
                num_choices=request.num_choices,
                placed_s=now_s,
                attempt=request.attempt,
            ),
        )
        self.metrics.count("finback.router.placed", decode=decode.instance)
        tracing.annotate(
            finback__reason=placement.reason,
            finback__prefill=prefill.instance,
            finback__decode=decode.instance,
        )
        return RouteReply(
            prefill_instance=prefill.instance,
            prefill_epoch=prefill.epoch,
            decode_instance=decode.instance,
            decode_epoch=decode.epoch,
            reason=placement.reason,
            num_hit_tokens=placement.num_hit_tokens,
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
        self.prefixes.forget(lost.instance)
        self.metrics.count("finback.router.instances_lost")

    def _directory_changed(self) -> None:
        records = self.context.directory.all()
        self._lost &= {(record.instance, record.epoch) for record in records}

    async def _sweep(self) -> None:
        while True:
            await anyio.sleep(_SWEEP_S)
            self.loads.sweep(monotonic_s())
            self.tenants.sweep()
