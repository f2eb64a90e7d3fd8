"""How busy every worker is: its last report, and what this router has sent since. Pure.

Time comes in as an argument. Everything here can be rebuilt: after a restart the next reports tell
the load.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from finback.services.router.fleet import DEFAULT_SPEED, Worker
from finback.shared.wire.messages.control import InstanceRecord
from finback.shared.wire.messages.decode import LoadReport

# By then a placement has reached the worker and is part of what it reports.
REPORTED_AFTER_S: Final = 0.3
STALE_AFTER_S: Final = 2.0
_MAX_OPEN: Final = 65_536
_SPEED_SHARE: Final = 0.1  # of the newest measurement where it is below the one before


# Not frozen: one is made for each placement.
@dataclass(slots=True, kw_only=True)
class Open:
    """A request that was placed and has not ended."""

    prefill: str
    decode: str
    num_tokens: int
    num_choices: int
    placed_s: float
    attempt: int = 1


@dataclass(frozen=True, slots=True)
class _Heard:
    report: LoadReport
    at_s: float


@dataclass(slots=True)
class _Pending:
    """What was placed on an instance and is not in its reports yet."""

    num_tokens: int = 0
    num_choices: int = 0


_NOTHING: Final = _Pending()


class LoadBook:
    """Reports by (role, instance), and open requests by id."""

    def __init__(self, *, max_age_s: float = 600.0) -> None:
        self._max_age_s = max_age_s
        self._heard: dict[tuple[str, str], _Heard] = {}
        self._open: OrderedDict[str, Open] = OrderedDict()
        self._unreported: OrderedDict[str, Open] = OrderedDict()
        self._pending: dict[str, _Pending] = {}
        self._speed: dict[str, float] = {}
        self._changed: set[str] = set()

    def heard(self, report: LoadReport, now_s: float) -> None:
        """A worker's report; an older start's is ignored."""
        key = (report.role, report.instance)
        last = self._heard.get(key)
        if last is None or report.epoch >= last.report.epoch:
            self._heard[key] = _Heard(report, now_s)
            self._changed.add(report.instance)
            self._measure(report)

    def _measure(self, report: LoadReport) -> None:
        """Its speed counts while it computes prompts; an idle worker's says nothing."""
        if report.num_waiting_tokens <= 0 or report.tokens_per_s <= 0:
            return
        new = report.tokens_per_s
        old = self._speed.get(report.instance, new)
        self._speed[report.instance] = max(new, old + _SPEED_SHARE * (new - old))

    def placed(self, request_id: str, placement: Open) -> None:
        """Count a placement; a later attempt replaces the one before.

        It is no change to be taken: `FleetBook.placed` counts it into the rows.
        """
        self.ended(request_id)
        self._open[request_id] = placement
        self._unreported[request_id] = placement
        self._add(placement, 1)
        while len(self._open) > _MAX_OPEN:
            self.ended(next(iter(self._open)))

    def ended(self, request_id: str, attempt: int | None = None) -> None:
        """The request is over; unknown ones (of another router) are none of ours.

        The end of an earlier attempt says nothing about the one that runs.
        """
        running = self._open.get(request_id)
        if running is not None and attempt is not None and attempt < running.attempt:
            return
        self._reported(request_id)
        self._open.pop(request_id, None)

    def _reported(self, request_id: str) -> None:
        placement = self._unreported.pop(request_id, None)
        if placement is not None:
            self._add(placement, -1)

    def _add(self, placement: Open, sign: int) -> None:
        known = self._pending
        prefill = known.get(placement.prefill)
        if prefill is None:
            prefill = known[placement.prefill] = _Pending()
        prefill.num_tokens += sign * placement.num_tokens
        decode = known.get(placement.decode)
        if decode is None:
            decode = known[placement.decode] = _Pending()
        decode.num_choices += sign * placement.num_choices
        if sign < 0:
            for name, pending in ((placement.prefill, prefill), (placement.decode, decode)):
                self._changed.add(name)
                if not pending.num_tokens and not pending.num_choices:
                    known.pop(name, None)

    def forget(self, instance: str) -> None:
        """An instance is gone: so is its load."""
        for key in [key for key in self._heard if key[1] == instance]:
            del self._heard[key]
        self._speed.pop(instance, None)
        self._changed.add(instance)

    @property
    def num_open(self) -> int:
        """Requests that were placed and have not ended."""
        return len(self._open)

    def sweep(self, now_s: float) -> None:
        """Drop what is older than any request may be: its end was never heard."""
        while self._open:
            request_id, oldest = next(iter(self._open.items()))
            if now_s - oldest.placed_s <= self._max_age_s:
                return
            self.ended(request_id)

    def workers(self, records: Iterable[InstanceRecord], now_s: float) -> list[Worker]:
        """One `Worker` an instance; records of both roles of a co-hosted one are merged."""
        self.drop_reported(now_s)
        return [self.worker(name, roles, now_s) for name, roles in by_instance(records).items()]

    def take_changed(self) -> set[str]:
        """Instances of which something was heard or placed since the last call."""
        changed, self._changed = self._changed, set()
        return changed

    def worker(self, instance: str, by_role: dict[str, InstanceRecord], now_s: float) -> Worker:
        """One instance with its records by role."""
        record = by_role.get("decode") or by_role["prefill"]
        role = record.service
        heard = self._heard.get((role, instance))
        report = heard.report if heard is not None else None
        pending = self._pending.get(instance, _NOTHING)
        spec = record.cache_spec
        num_blocks = report.num_blocks if report else record.num_blocks
        return Worker(
            instance=instance,
            epoch=record.epoch,
            is_prefill="prefill" in by_role,
            is_decode="decode" in by_role,
            host=record.host,
            salt=spec.salt if spec else "",
            token_bytes=spec.block_bytes // spec.block_size if spec else 0,
            kv_kind=f"{spec.salt}:{spec.block_bytes}" if spec else "",
            block_size=spec.block_size if spec else 64,
            num_blocks=num_blocks,
            num_free_blocks=report.num_free_blocks if report else num_blocks,
            num_running=report.num_running if report else 0,
            num_waiting=(report.num_waiting if report else 0) + pending.num_choices,
            num_waiting_tokens=(report.num_waiting_tokens if report else 0) + pending.num_tokens,
            prompt_tokens_per_s=self._speed.get(instance, DEFAULT_SPEED),
            tokens_per_s=report.tokens_per_s if report else 0.0,
            is_stale=heard is not None and now_s - heard.at_s > STALE_AFTER_S,
        )

    def drop_reported(self, now_s: float) -> None:
        """Forget placements that the worker's own numbers contain by now."""
        for request_id, placement in tuple(self._unreported.items()):
            if now_s - placement.placed_s < REPORTED_AFTER_S:
                return  # in order of time
            keys = (("decode", placement.decode), ("prefill", placement.prefill))
            heard = [self._heard[key] for key in keys if key in self._heard]
            due_s = placement.placed_s + REPORTED_AFTER_S
            if not heard or any(h.at_s >= due_s for h in heard):
                self._reported(request_id)


def by_instance(records: Iterable[InstanceRecord]) -> dict[str, dict[str, InstanceRecord]]:
    """Records by instance and role."""
    roles: dict[str, dict[str, InstanceRecord]] = {}
    for record in records:
        roles.setdefault(record.instance, {})[record.service] = record
    return roles
