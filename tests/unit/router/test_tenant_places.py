"""Requests at once, whatever becomes of gateways, routers and their messages.

Gateways' ledgers may come late, twice, out of order or never, as long as each gateway that lives is
heard within a lease. Never are more requests really open than the limit says, and in the end no
place is lost.
"""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from finback.services.router.tenant_book import LEASE_S, TenantBook
from finback.services.router.verdict import TenantLimits, to_us

LIMIT = 3
LEASE_US = to_us(LEASE_S)
GATEWAYS = st.sampled_from(["g1", "g2"])

Key = tuple[str, str]


class Places(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.book = TenantBook()
        self.now_us = 0
        self.number = 0
        self.open: list[Key] = []
        # Ledgers under way: ("held" or "settled", keys).
        self.under_way: list[tuple[str, list[Key]]] = []

    @rule(gateway=GATEWAYS)
    def begin(self, gateway: str) -> None:
        self.number += 1
        key = (gateway, f"r{self.number}")
        limits = TenantLimits(max_concurrency=LIMIT)
        values: dict[str, Any] = {"num_prompt_tokens": 1, "num_most_tokens": 1}
        if not self.book.admit(key, "t", limits, **values, now_us=self.now_us).reason:
            self.open.append(key)

    @rule(which=st.integers(0, 5))
    def end(self, which: int) -> None:
        if self.open:
            key = self.open.pop(which % len(self.open))
            self.under_way.append(("settled", [key]))

    @rule(gateway=GATEWAYS)
    def say(self, gateway: str) -> None:
        self.under_way.append(("held", self.of(gateway)))

    @rule(which=st.integers(0, 9), is_kept=st.booleans())
    def arrive(self, which: int, is_kept: bool) -> None:
        """Any of them, and perhaps once more later."""
        if self.under_way:
            at = which % len(self.under_way)
            kind, keys = self.under_way[at]
            if not is_kept:
                del self.under_way[at]
            self.hear(kind, keys)

    @rule(which=st.integers(0, 9))
    def get_lost(self, which: int) -> None:
        if self.under_way:
            del self.under_way[which % len(self.under_way)]

    @rule(passed_us=st.integers(0, LEASE_US))
    def wait(self, passed_us: int) -> None:
        """Every gateway that lives is heard of before a lease is over."""
        self.now_us += passed_us
        self.begin("g1")
        self.hear("held", self.open)

    @rule(gateway=GATEWAYS)
    def gateway_dies(self, gateway: str) -> None:
        """With what it held; what it has sent is still under way."""
        self.open = [key for key in self.open if key[0] != gateway]

    @rule()
    def router_dies(self) -> None:
        """The next one hears what is held before it is asked."""
        self.book = TenantBook()
        self.hear("held", self.open)

    @invariant()
    def never_more_than_the_limit(self) -> None:
        assert len(self.open) <= LIMIT
        assert self.book.num_open("t") >= len(self.open)

    def teardown(self) -> None:
        self.book.sweep(self.now_us + LEASE_US + 1)
        assert self.book.num_open("t") == 0

    def of(self, gateway: str) -> list[Key]:
        return [key for key in self.open if key[0] == gateway]

    def hear(self, kind: str, keys: list[Key]) -> None:
        if kind == "held":
            self.book.renew([(key, "t") for key in keys], self.now_us)
        else:
            for key in keys:
                self.book.settle(key, 1, self.now_us)


TestPlaces = Places.TestCase
TestPlaces.settings = settings(deadline=None, max_examples=100, stateful_step_count=40)
