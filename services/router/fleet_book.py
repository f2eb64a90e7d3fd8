"""Keeps the columns of each model's workers up to date between placements. Pure."""

from collections.abc import Callable, Iterable
from typing import Final

from finback.services.router.fleet import Fleet
from finback.services.router.load_book import LoadBook, Open, by_instance
from finback.shared.wire.messages.control import InstanceRecord

# How often all rows are looked at anew: reports grow stale, placements become part of reports.
_REFRESH_S: Final = 0.05


class FleetBook:
    """The workers of a model as a `Fleet` whose rows are brought up to date when it is asked for."""

    def __init__(self, loads: LoadBook) -> None:
        self._loads = loads
        self._made: dict[str, tuple[Fleet, dict[str, dict[str, InstanceRecord]]]] = {}
        self._refreshed_s = 0.0

    def forget(self) -> None:
        """Who is there has changed."""
        self._made.clear()

    def fleet(
        self, model: str, records: Callable[[], Iterable[InstanceRecord]], now_s: float
    ) -> Fleet:
        """`records` is asked for those of the model when they are not known."""
        self._refresh(now_s)
        known = self._made.get(model)
        if known is None:
            roles = by_instance(records())
            workers = [self._loads.worker(name, r, now_s) for name, r in roles.items()]
            known = self._made[model] = (Fleet(workers), roles)
        return known[0]

    def placed(self, placement: Open) -> None:
        """Count a placement into the rows at once, which is cheaper than to set them."""
        for fleet, _ in self._made.values():
            fleet.add(placement.prefill, num_tokens=placement.num_tokens)
            fleet.add(placement.decode, num_choices=placement.num_choices)

    def refresh_all(self) -> None:
        """Have all rows set when the fleet is asked for next."""
        self._refreshed_s = float("-inf")

    def _refresh(self, now_s: float) -> None:
        is_due = now_s - self._refreshed_s >= _REFRESH_S
        if is_due:
            self._refreshed_s = now_s
            self._loads.drop_reported(now_s)
        changed = self._loads.take_changed()
        for fleet, roles in self._made.values():
            for name in roles if is_due else changed & roles.keys():
                fleet.set(self._loads.worker(name, roles[name], now_s))
