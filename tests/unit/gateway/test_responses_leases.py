"""Whatever two gateways and a client do to a background response, an obvious twin agrees."""

import asyncio
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from finback.services.gateway.store import Store
from finback.services.gateway.store_limits import StoreLimits
from finback.services.gateway.store_rows import Kept
from finback.shared.errors import Cancelled

LIMITS = StoreLimits(retention_s=3600.0, max_tenant_values=1000, max_tenant_bytes=2**28)
NAME = "r"
owners = st.sampled_from(["g1", "g2"])
ages = st.integers(0, 2)


class Leases(RuleBasedStateMachine):
    """The twin: `row` is the response; `held[owner]` the epoch under which each thinks to write."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.folder = tempfile.TemporaryDirectory()
        path = str(Path(self.folder.name) / "s.sqlite")
        self.store = Store(path, LIMITS, max_bytes=2**28)
        self.row: dict[str, Any] | None = None
        self.held: dict[str, int] = {}
        # The events since the last attempt began, and the number of the first.
        self.log: list[bytes] = []
        self.first = 0
        self._wait(self.store.open())

    def _wait(self, coroutine: Any) -> Any:
        return self.loop.run_until_complete(coroutine)

    def _kept(self, status: str) -> Kept:
        body = {"id": NAME, "status": status, "output": []}
        return Kept(response_id=NAME, tenant="t", body=body, items=[{"id": "in"}])

    @precondition(lambda self: self.row is None)
    @rule()
    def queue(self) -> None:
        self._wait(self.store.leases.queue(self._kept("queued"), {"plan": 1}, "g1"))
        self.row = {"status": "queued", "epoch": 0, "owner": "g1", "attempts": 0}
        self.held, self.log, self.first = {}, [], 0

    @rule(owner=owners, age=ages)
    def claim(self, owner: str, age: int) -> None:
        epoch = (self.row["epoch"] if self.row else 0) - age
        found = self._wait(self.store.leases.claim(NAME, epoch, owner))
        row = self.row
        if row is None or age or row["status"] not in ("queued", "in_progress"):
            assert found is None
            return
        row.update(status="in_progress", owner=owner, epoch=epoch + 1, attempts=row["attempts"] + 1)
        self.held[owner] = epoch + 1
        assert (found.epoch, found.num_attempts, found.plan) == (
            epoch + 1,
            row["attempts"],
            {"plan": 1},
        )

    def _is_current(self, owner: str) -> bool:
        return self.row is not None and self.held.get(owner) == self.row["epoch"]

    @rule(owner=owners)
    def append(self, owner: str) -> None:
        documents = [f'{{"n":{len(self.log) + at}}}'.encode() for at in range(2)]
        number = self.first + len(self.log)
        made = self._wait(
            self.store.events.append(NAME, self.held.get(owner, -1), number, documents)
        )
        assert made is self._is_current(owner)
        self.log += documents if made else []

    @rule(owner=owners, keeps=st.integers(-1, 4))
    def begin(self, owner: str, keeps: int) -> None:
        """An attempt begins to tell; one that is over must not forget what the current one told."""
        try:
            number = self._wait(
                self.store.events.begin(NAME, self.held.get(owner, -1), keeps=keeps)
            )
        except Cancelled:
            assert not self._is_current(owner)
            return
        assert self._is_current(owner) and number == self.first + len(self.log)
        if number != keeps:
            self.first, self.log = number, []

    @rule(owner=owners, status=st.sampled_from(["completed", "incomplete", "failed"]))
    def finish(self, owner: str, status: str) -> None:
        done = self._wait(self.store.leases.finish(self._kept(status), self.held.get(owner, -1)))
        assert done is self._is_current(owner)
        if done and self.row is not None:
            self.row.update(status=status, owner="", epoch=self.row["epoch"] + 1)

    @rule(owner=owners)
    def release(self, owner: str) -> None:
        self._wait(self.store.leases.release(NAME, self.held.get(owner, -1)))
        if self._is_current(owner) and self.row is not None:
            self.row.update(owner="", attempts=self.row["attempts"] - 1)

    @rule(tenant=st.sampled_from(["t", "other"]))
    def cancel(self, tenant: str) -> None:
        found = self._wait(self.store.leases.cancel(tenant, NAME))
        if self.row is None or tenant == "other":
            assert found is None
            return
        if self.row["status"] in ("queued", "in_progress"):
            self.row.update(status="cancelled", owner="", epoch=self.row["epoch"] + 1)
        assert found.status == self.row["status"]

    @rule(tenant=st.sampled_from(["t", "other"]))
    def delete(self, tenant: str) -> None:
        done = self._wait(self.store.responses.delete(tenant, NAME))
        assert done is (self.row is not None and tenant == "t")
        if done:
            self.row, self.log = None, []

    @invariant()
    def agree(self) -> None:
        found = self._wait(self.store.responses.get("t", NAME))
        assert (found is None) is (self.row is None)
        rows = self._wait(self.store.leases.unfinished())
        page = self._wait(self.store.events.page("t", NAME, -1))
        if self.row is None:
            assert rows == [] and page is None
            return
        seen = {"status": found.status, "epoch": found.epoch, "owner": found.owner}
        assert {**seen, "attempts": found.num_attempts} == self.row
        assert found.body["status"] == self.row["status"]
        is_open = self.row["status"] in ("queued", "in_progress")
        assert rows == ([(NAME, self.row["owner"], self.row["epoch"])] if is_open else [])
        assert [document for _, document in page.documents] == self.log
        assert [number for number, _ in page.documents] == list(
            range(self.first, self.first + len(self.log))
        )

    def teardown(self) -> None:
        self._wait(self.store.close())
        self.loop.close()
        self.folder.cleanup()


TestLeases = Leases.TestCase
TestLeases.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
