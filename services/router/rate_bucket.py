"""How much of a limit per minute is used up. Pure, and exact: all of it is whole numbers.

A bucket holds what a limit allows in a minute and is refilled steadily. What is reserved ahead is
settled later: what was not needed goes back as far as time has not given it back already. For that,
charges stand in a line and time pays them off from its front. Giving back less than what a charge
still has in the line keeps the bound: whatever was really used between two moments is at most a
bucket and what was refilled in between.
"""

from dataclasses import dataclass
from typing import Final

MINUTE_US: Final = 60_000_000


@dataclass(slots=True, kw_only=True)
class Bucket:
    """One limit of one tenant. Time is in microseconds of any clock that never goes back.

    `charged` and `paid`: positions in the line, in 1 / `MINUTE_US` of what is counted, so that a
    limit of n a minute pays exactly n a microsecond.
    """

    limit: int
    at_us: int
    charged: int = 0
    paid: int = 0

    def advance(self, now_us: int) -> None:
        """Let time pay."""
        passed_us = max(0, now_us - self.at_us)
        self.at_us = max(self.at_us, now_us)
        self.paid = min(self.charged, self.paid + passed_us * self.limit)

    def set_limit(self, limit: int, now_us: int) -> None:
        """Another limit from now on; what is used stays used."""
        self.advance(now_us)
        self.limit = limit

    def wait_us(self, amount: int) -> int:
        """How long until `amount` fits; 0: now. More than a whole bucket waits for an empty one."""
        wanted = min(amount, self.limit) * MINUTE_US
        excess = self.charged - self.paid + wanted - self.limit * MINUTE_US
        return max(0, -(-excess // self.limit))

    def charge(self, amount: int) -> int:
        """Use `amount`, allowed or not; returns the charge's end in the line, for `give_back`."""
        self.charged += amount * MINUTE_US
        return self.charged

    def give_back(self, end: int, reserved: int, amount: int) -> None:
        """Undo `amount` of a charge of `reserved` that ended at `end`, as far as it is not paid."""
        still = min(max(0, end - self.paid), reserved * MINUTE_US)
        self.paid += min(still, amount * MINUTE_US)

    @property
    def is_empty(self) -> bool:
        """Nothing is used: the bucket says no more than its limit does."""
        return self.charged == self.paid

    @property
    def remaining(self) -> int:
        """What could be used at once."""
        return max(0, self.limit - -(-(self.charged - self.paid) // MINUTE_US))

    @property
    def reset_us(self) -> int:
        """How long until nothing is used, if nothing more comes."""
        return -(-(self.charged - self.paid) // self.limit)
