"""Admissions against a plain list of what is open, step by step, and some plain cases."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from finback.services.router.rate_bucket import MINUTE_US, Bucket
from finback.services.router.tenant_book import LEASE_S, TenantBook
from finback.services.router.verdict import TenantLimits, Verdict, to_us

LEASE_US = to_us(LEASE_S)
TENANTS = st.sampled_from(["a", "b"])
KEYS = st.tuples(st.sampled_from(["g1", "g2"]), st.sampled_from([f"r{i}" for i in range(6)]))


def admit(
    book: TenantBook, request_id: str, now_us: int, prompt: int = 1, most: int = 1, **limits: int
) -> Verdict:
    return book.admit(
        ("g", request_id),
        "t",
        TenantLimits(**limits),
        num_prompt_tokens=prompt,
        num_most_tokens=most,
        now_us=now_us,
    )


def test_requests_a_minute() -> None:
    book = TenantBook()
    for i in range(60):
        assert admit(book, f"r{i}", 0, requests_per_min=60).reason == ""
        book.settle(("g", f"r{i}"), 0, 0)
    refused = admit(book, "late", 0, requests_per_min=60)
    assert (refused.reason, refused.retry_after_us) == ("requests_per_min", 1_000_000)
    assert refused.requests is not None
    assert (refused.requests.remaining, refused.requests.reset_us) == (0, MINUTE_US)
    assert admit(book, "late", 1_000_000, requests_per_min=60).reason == ""
    assert admit(book, "more", 1_000_000, requests_per_min=120).reason == "", "a raised limit"


def test_tokens_are_reserved_and_settled() -> None:
    book = TenantBook()
    first = admit(book, "r1", 0, prompt=10, most=80, tokens_per_min=100)
    assert first.tokens is not None
    assert first.tokens.remaining == 20
    refused = admit(book, "r2", 0, prompt=10, most=50, tokens_per_min=100)
    assert (refused.reason, refused.retry_after_us) == ("tokens_per_min", 18_000_000)
    book.settle(("g", "r1"), 30, 0)
    assert admit(book, "r2", 0, prompt=10, most=50, tokens_per_min=100).reason == ""
    book.settle(("g", "r2"), 90, 0)
    state = admit(book, "r3", 0, tokens_per_min=100).tokens
    assert state is not None
    assert state.remaining == 0, "more than was reserved is charged as well"


def test_a_request_above_the_whole_limit() -> None:
    book = TenantBook()
    hopeless = admit(book, "r1", 0, prompt=101, most=120, tokens_per_min=100)
    assert (hopeless.reason, hopeless.is_hopeless) == ("tokens_per_min", True)
    assert admit(book, "r2", 0, prompt=50, most=9999, tokens_per_min=100).reason == ""
    assert admit(book, "r3", 0, prompt=50, most=9999, tokens_per_min=100).reason != ""


def test_a_silent_gateway_gives_its_places_back() -> None:
    book = TenantBook()
    admit(book, "r1", 0, max_concurrency=1)
    book.renew([(("g", "r1"), "t")], LEASE_US)
    assert admit(book, "r2", 2 * LEASE_US, max_concurrency=1).reason == "tenant_concurrency"
    assert admit(book, "r2", 2 * LEASE_US + 1, max_concurrency=1).reason == ""


def test_idle_tenants_are_forgotten() -> None:
    book = TenantBook()
    admit(book, "r1", 0, requests_per_min=1, tokens_per_min=1)
    book.settle(("g", "r1"), 1, 0)
    book.sweep(MINUTE_US - 1)
    assert book.num_known == 1
    book.sweep(MINUTE_US)
    assert book.num_known == 0


class Twin(RuleBasedStateMachine):
    """The book beside a list of open requests and one bucket a tenant and limit, looked through anew."""

    def __init__(self) -> None:
        super().__init__()
        self.book = TenantBook()
        self.now_us = 0
        self.limits = {name: TenantLimits() for name in ("a", "b")}
        self.open: dict[tuple[str, str], tuple[str, int]] = {}  # key: (tenant, last seen)
        self.buckets: dict[tuple[str, str], Bucket] = {}
        self.reserved: dict[tuple[str, str], tuple[Bucket, int, int]] = {}

    @rule(
        tenant=TENANTS, rpm=st.integers(0, 4), tpm=st.sampled_from([0, 50]), most=st.integers(0, 3)
    )
    def set_limits(self, tenant: str, rpm: int, tpm: int, most: int) -> None:
        self.limits[tenant] = TenantLimits(
            requests_per_min=rpm, tokens_per_min=tpm, max_concurrency=most
        )

    @rule(passed_us=st.integers(0, 2 * LEASE_US))
    def wait(self, passed_us: int) -> None:
        self.now_us += passed_us
        self.let_go()

    @rule(key=KEYS, tenant=TENANTS, prompt=st.integers(1, 60), more=st.integers(0, 60))
    def admit(self, key: tuple[str, str], tenant: str, prompt: int, more: int) -> None:
        limits, most = self.limits[tenant], prompt + more
        verdict = self.book.admit(
            key,
            tenant,
            limits,
            num_prompt_tokens=prompt,
            num_most_tokens=most,
            now_us=self.now_us,
        )
        requests = self.bucket("requests", tenant, limits.requests_per_min)
        tokens = self.bucket("tokens", tenant, limits.tokens_per_min)
        if key in self.open:
            assert not verdict.reason
            return
        num_open = [name for name, _ in self.open.values()].count(tenant)
        is_full = 0 < limits.max_concurrency <= num_open
        is_late = bool(requests and requests.wait_us(1)) or bool(tokens and tokens.wait_us(most))
        is_hopeless = tokens is not None and prompt > tokens.limit
        assert bool(verdict.reason) == (is_full or is_late or is_hopeless)
        assert verdict.is_hopeless == is_hopeless
        if verdict.reason:
            assert is_hopeless or verdict.retry_after_us > 0
            return
        self.open[key] = (tenant, self.now_us)
        if requests:
            requests.charge(1)
        if tokens:
            reserved = min(most, tokens.limit)
            self.reserved[key] = (tokens, reserved, tokens.charge(reserved))

    @rule(key=KEYS, used=st.integers(0, 120))
    def settle(self, key: tuple[str, str], used: int) -> None:
        self.book.settle(key, used, self.now_us)
        if key not in self.open:
            return
        tenant, _ = self.open.pop(key)
        bucket, reserved, end = self.reserved.pop(key, (self.buckets.get(("tokens", tenant)), 0, 0))
        if bucket is None:
            return
        bucket.advance(self.now_us)
        if used > reserved:
            bucket.charge(used - reserved)
        else:
            bucket.give_back(end, reserved, reserved - used)

    @rule(keys=st.lists(KEYS, max_size=4), tenant=TENANTS)
    def renew(self, keys: list[tuple[str, str]], tenant: str) -> None:
        self.book.renew([(key, tenant) for key in keys], self.now_us)
        for key in keys:
            name, _ = self.open.get(key, (tenant, 0))
            self.open[key] = (name, self.now_us)

    @invariant()
    def same_open(self) -> None:
        self.book.sweep(self.now_us)
        for tenant in ("a", "b"):
            count = [name for name, _ in self.open.values()].count(tenant)
            assert self.book.num_open(tenant) == count

    def bucket(self, kind: str, tenant: str, limit: int) -> Bucket | None:
        if not limit:
            self.buckets.pop((kind, tenant), None)
            return None
        bucket = self.buckets.setdefault((kind, tenant), Bucket(limit=limit, at_us=self.now_us))
        bucket.set_limit(limit, self.now_us)
        return bucket

    def let_go(self) -> None:
        for key, (_, seen_us) in tuple(self.open.items()):
            if self.now_us - seen_us > LEASE_US:
                del self.open[key]
                self.reserved.pop(key, None)


TestTwin = Twin.TestCase
TestTwin.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)
