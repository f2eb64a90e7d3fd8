"""Blocks that arrive layer by layer when they are forgotten are found by nobody afterwards."""

import numpy as np
import pytest

from finback.shared.engine.arrival import Arrival
from finback.shared.engine.block_pool import BlockPool
from finback.shared.engine.prefix_hold import PrefixHolds
from finback.shared.kv.forget_scope import ForgetScope, forget_scope

TOKENS = np.arange(33, dtype=np.int32)


@pytest.mark.parametrize(
    ("scope", "is_found"),
    [
        (forget_scope("ann", b""), False),
        (forget_scope(None, b""), False),
        (forget_scope("bob", b""), True),
    ],
)
def test_an_arrival_that_is_forgotten_does_not_serve(scope: ForgetScope, is_found: bool) -> None:
    pool = BlockPool(16)
    holds = PrefixHolds(pool, 8, b"key")
    hold = holds.hold(TOKENS, b"ann")
    for index in range(4):
        assert holds.take_room(hold, index, 0) is not None
    arrival = Arrival(num_layers=6, num_blocks=4)
    holds.begin_arrival(hold, [0, 1, 2, 3], arrival)
    holds.forget(scope.covers)
    pool.forget(scope.covers)
    arrival.conclude(4)
    holds.settle(hold)
    holds.release(hold)
    assert [pool.find(name) is not None for name in hold.hashes] == [is_found] * 4
    pool.check_integrity()
    assert pool.num_free == 16
