"""The bucket against a line of charges that is kept piece by piece, and against what it promises."""

from dataclasses import dataclass, field
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from finback.services.router.rate_bucket import MINUTE_US, Bucket


@dataclass
class Piece:
    owner: int
    unpaid: Fraction


@dataclass
class Line:
    """The twin: charges one behind the other, paid from the front, in exact fractions."""

    limit: int
    at_us: int = 0
    pieces: list[Piece] = field(default_factory=list)

    @property
    def used(self) -> Fraction:
        return sum((piece.unpaid for piece in self.pieces), Fraction(0))

    def pay(self, amount: Fraction) -> None:
        while amount > 0 and self.pieces:
            first = self.pieces[0]
            part = min(amount, first.unpaid)
            first.unpaid -= part
            amount -= part
            if not first.unpaid:
                self.pieces.pop(0)

    def advance(self, now_us: int) -> None:
        self.pay(Fraction((now_us - self.at_us) * self.limit, MINUTE_US))
        self.at_us = now_us

    def give_back(self, owner: int, amount: int) -> None:
        own = sum((p.unpaid for p in self.pieces if p.owner == owner), Fraction(0))
        self.pay(min(own, Fraction(amount)))


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["charge", "settle", "settle", "limit"]),
        st.integers(0, 90_000_000),  # microseconds since the step before
        st.integers(0, 70),
        st.integers(0, 100),
    ),
    max_size=30,
)


@settings(deadline=None)
@given(STEPS, st.integers(1, 60))
def test_like_a_line_that_is_paid_from_its_front(
    steps: list[tuple[str, int, int, int]], limit: int
) -> None:
    bucket, line = Bucket(limit=limit, at_us=0), Line(limit)
    open_: list[tuple[int, int, int]] = []  # (owner, end, reserved)
    now_us = 0
    for at, (verb, passed_us, number, percent) in enumerate(steps):
        now_us += passed_us
        bucket.advance(now_us)
        line.advance(now_us)
        if verb == "charge":
            open_.append((at, bucket.charge(number), number))
            line.pieces.append(Piece(at, Fraction(number)))
        elif verb == "settle" and open_:
            owner, end, reserved = open_.pop(number % len(open_))
            unused = reserved * percent // 100
            bucket.give_back(end, reserved, unused)
            line.give_back(owner, unused)
        elif verb == "limit":
            bucket.set_limit(number + 1, now_us)
            line.limit = number + 1
        assert Fraction(bucket.charged - bucket.paid, MINUTE_US) == line.used
        assert bucket.remaining == max(0, bucket.limit - -(-line.used // 1))
        assert bucket.is_empty == (line.used == 0)


COARSE_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["charge", "settle"]),
        st.sampled_from([0, 0, MINUTE_US // 3, MINUTE_US]),
        st.integers(1, 4),
        st.sampled_from([100, 50, 0]),
    ),
    max_size=16,
)


@settings(deadline=None, max_examples=500)
@given(COARSE_STEPS, st.integers(1, 3))
def test_what_was_really_used_keeps_to_the_rate(
    steps: list[tuple[str, int, int, int]], limit: int
) -> None:
    """In every stretch of time: at most a full bucket, and what is refilled meanwhile."""
    bucket = Bucket(limit=limit, at_us=0)
    charges: list[list[int]] = []  # [moment, used in the end]
    open_: list[tuple[int, int, int]] = []  # (index in charges, end, reserved)
    now_us = 0
    for verb, passed_us, number, percent in steps:
        now_us += passed_us
        bucket.advance(now_us)
        amount = min(number, limit)
        if verb == "charge" and not bucket.wait_us(amount):
            open_.append((len(charges), bucket.charge(amount), amount))
            charges.append([now_us, amount])
        elif verb == "settle" and open_:
            index, end, reserved = open_.pop(number % len(open_))
            unused = reserved * percent // 100
            bucket.give_back(end, reserved, unused)
            charges[index][1] = reserved - unused
    for first, (from_us, _) in enumerate(charges):
        total = 0
        for index in range(first, len(charges)):
            total += charges[index][1]
            most = limit + Fraction((charges[index][0] - from_us) * limit, MINUTE_US)
            assert total <= most


@given(st.integers(1, 1000), st.integers(0, 2000), st.integers(1, 2000))
def test_the_wait_is_no_longer_and_no_shorter_than_needed(
    limit: int, used: int, amount: int
) -> None:
    bucket = Bucket(limit=limit, at_us=0)
    bucket.charge(used)
    wait_us = bucket.wait_us(amount)
    if wait_us:
        bucket.advance(wait_us - 1)
        assert bucket.wait_us(amount) > 0
    bucket.advance(wait_us)
    assert bucket.wait_us(amount) == 0
    bucket.advance(wait_us + bucket.reset_us)
    assert bucket.is_empty
