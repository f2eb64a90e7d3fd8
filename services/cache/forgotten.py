"""What is to be forgotten, for work that was under way when that was asked. Pure; thread-safe.

Writing a block to files, and reading one from there, take a while in worker threads. Such work takes
a mark when it begins and gives it back when it has really ended. A rule covers what began before it:
it must not be kept, whenever it comes to an end. Whoever forgets waits until no older mark is out.
"""

import threading
from collections import Counter
from dataclasses import dataclass
from typing import Final

from finback.services.cache.block_names import tenant_digest
from finback.shared.lanes.arena_format import BlockLabel
from finback.shared.wire.messages.cache_admin import ForgetRequest

# Rules that are remembered for work that does not end; more are merged into "everything".
MAX_RULES: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetRule:
    """Which blocks; any one of the fields is enough. `tenant`: the digest of headers.

    `salt` goes with `hashes`, or stands for all it has; "" with hashes: in all salts.
    """

    is_all: bool = False
    tenant: bytes | None = None
    salt: str = ""
    hashes: frozenset[bytes] = frozenset()

    def covers(self, salt: str, digest: bytes, tenant: bytes) -> bool:
        """Whether it is about this block."""
        if self.is_all or (self.tenant is not None and tenant == self.tenant):
            return True
        if self.hashes:
            return digest in self.hashes and self.salt in ("", salt)
        return bool(self.salt) and salt == self.salt

    def covers_prefix(self, salt: str, digest: bytes) -> bool:
        """Whether a block whose owner is not known may be meant."""
        return self.tenant is not None or self.covers(salt, digest, b"")


def rule_of(request: ForgetRequest, hashes: list[bytes]) -> ForgetRule:
    """What a request asks for; `hashes` are its own, checked."""
    return ForgetRule(
        is_all=request.is_all,
        tenant=None if request.tenant is None else tenant_digest(request.tenant),
        salt=request.salt,
        hashes=frozenset(hashes),
    )


class Forgotten:
    """Rules by the time at which they were made, and the marks of work that is under way."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = 0
        self._open: Counter[int] = Counter()
        self._rules: list[tuple[int, ForgetRule]] = []

    def begin(self) -> int:
        """A mark for work that begins now; `end` it."""
        with self._lock:
            self._open[self._now] += 1
            return self._now

    def end(self, mark: int) -> None:
        """That work has ended: it keeps nothing more."""
        with self._lock:
            self._open[mark] -= 1
            if not self._open[mark]:
                del self._open[mark]
            eldest = min(self._open, default=self._now)
            self._rules = [(at, rule) for at, rule in self._rules if at > eldest]

    def add(self, rule: ForgetRule) -> int:
        """Forget these from now on; returns a time for `num_before`."""
        with self._lock:
            self._now += 1
            if self._open:
                if len(self._rules) >= MAX_RULES:
                    self._rules, rule = [], ForgetRule(is_all=True)
                self._rules.append((self._now, rule))
            return self._now

    def num_before(self, at: int) -> int:
        """How much work that began before a rule is still under way."""
        with self._lock:
            return sum(count for mark, count in self._open.items() if mark < at)

    def is_void(self, mark: int, salt: str, digest: bytes, tenant: bytes) -> bool:
        """Whether this block was to be forgotten since the work with this mark began."""
        with self._lock:
            return any(at > mark and rule.covers(salt, digest, tenant) for at, rule in self._rules)

    def is_label_void(self, mark: int, label: BlockLabel) -> bool:
        """As `is_void`."""
        return self.is_void(mark, label.salt, label.hash, label.tenant)
