"""The scheduler's properties while prefixes are held and restored beside it.

What a restore copies into a block is checked like all other KV: a block that was given away too early,
or registered too early, is read as wrong KV by whoever finds it.
"""

from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from unit.engine.test_scheduler_properties import BLOCK_SIZE, PREFIX, SchedulerMachine

from finback.shared.engine.arrival import Arrival
from finback.shared.engine.prefix_hold import PrefixHold
from finback.shared.engine.sequence import SequenceSpec, State
from finback.shared.wire.messages.generate import SamplingSpec
from support.engine_sim import digest


class HoldingMachine(SchedulerMachine):
    @initialize()
    def no_holds(self) -> None:
        self.holds: list[tuple[PrefixHold, Any]] = []
        self.arriving: list[tuple[PrefixHold, Any]] = []

    @rule(length=st.integers(1, 12), own=st.integers(0, 10))
    def hold(self, length: int, own: int) -> None:
        """As for a prompt that is about to be queued."""
        tokens = np.append(PREFIX[:length], np.int32(own)).astype(np.int32)
        self.holds.append((self.scheduler.table.holds.hold(tokens, b""), tokens))

    @rule(data=st.data(), is_good=st.booleans())
    def restore(self, data: Any, is_good: bool) -> None:
        """Copy one block in, behind the steps that are queued; or fail at it."""
        if not self.holds:
            return
        hold, tokens = data.draw(st.sampled_from(self.holds))
        for index in hold.missing[:1]:
            room = self.scheduler.table.holds.take_room(hold, index, spare=1)
            if room is None:
                continue
            for at in range(len(self.queue)):
                if self.queue[at][1] is None:
                    self._execute(at)
            for position in range(index * BLOCK_SIZE, (index + 1) * BLOCK_SIZE):
                value = digest(tokens[: position + 1]) if is_good else -1
                self.runner.kv[room * BLOCK_SIZE + position % BLOCK_SIZE] = value
            self.scheduler.table.holds.land(hold, index, is_good=is_good)

    @rule(length=st.integers(4, 12), own=st.integers(0, 10), most=st.integers(1, 3))
    def queue_arriving(self, length: int, own: int, most: int) -> None:
        """A thread begins to write blocks of a prompt that is queued at once."""
        self.hold(length, own)
        hold, tokens = self.holds[-1]
        holds = self.scheduler.table.holds
        taken = [i for i in hold.missing[:most] if holds.take_room(hold, i, spare=1) is not None]
        if taken:
            holds.begin_arrival(hold, taken, Arrival(num_layers=2, num_blocks=len(taken)))
            self.arriving.append((hold, tokens))
        self._let_go(len(self.holds) - 1, queues=True)

    @rule(data=st.data(), num_good=st.sampled_from([3, 3, 3, 0, 1, 2]), settles=st.booleans())
    def conclude(self, data: Any, num_good: int, settles: bool) -> None:
        """The thread is through: its first blocks are good. The loop may hear of it only later."""
        if self.arriving:
            at = data.draw(st.integers(0, len(self.arriving) - 1))
            self._conclude(at, num_good, settles)

    def _conclude(self, at: int, num_good: int, settles: bool) -> None:
        hold, tokens = self.arriving[at]
        arrival = hold.arrival
        assert arrival is not None
        if not arrival.is_over:
            num_good = 0 if arrival.is_given_up else min(num_good, arrival.num_blocks)
            for count, index in enumerate(sorted(hold.pending)):
                room = hold.pending[index]
                for position in range(index * BLOCK_SIZE, (index + 1) * BLOCK_SIZE):
                    value = digest(tokens[: position + 1]) if count < num_good else -2
                    self.runner.kv[room * BLOCK_SIZE + position % BLOCK_SIZE] = value
            arrival.conclude(num_good)
        if settles:
            self.scheduler.table.holds.settle(hold)
            self.arriving.pop(at)

    @rule(data=st.data(), queues=st.booleans())
    def let_go(self, data: Any, queues: bool) -> None:
        """Queue the prompt with its hold, or let go of it."""
        if self.holds:
            self._let_go(data.draw(st.integers(0, len(self.holds) - 1)), queues)

    def _let_go(self, at: int, queues: bool) -> None:
        hold, tokens = self.holds.pop(at)
        if queues:
            self.count += 1
            spec = SequenceSpec(
                key=(f"h{self.count}", 0),
                attempt=1,
                token_ids=tokens,
                sampling=self._sampling(),
                seed=self.count % 3,
            )
            if self.scheduler.add(spec).accepted:
                self.specs[spec.key] = spec
                self.got[spec.key] = []
                self.credits[spec.key] = spec.credit_tokens
                self.scheduler.table.by_key[spec.key].hold = hold
                return
        self.scheduler.table.holds.release(hold)

    @rule(data=st.data())
    def stop_string(self, data: Any) -> None:
        """What ran over is not found by anybody."""
        key = self._some(data, State.RUNNING)
        if key is None or self.specs[key].mode == "prefill":
            return
        sequence = self.scheduler.table.by_key[key]
        kept = data.draw(st.integers(0, sequence.num_completion))
        blocks = list(sequence.block_ids[: sequence.num_registered])
        hashes = sequence.hashes
        self.scheduler.finish(key, kept)
        self._forget(key)
        for index in range((sequence.num_prompt + kept) // BLOCK_SIZE, len(blocks)):
            found = self.scheduler.table.pool.find(hashes[index])
            assert found is None or found[0] != blocks[index]

    def _sampling(self) -> SamplingSpec:
        return SamplingSpec(max_tokens=5, ignore_eos=True)

    def teardown(self) -> None:
        while getattr(self, "arriving", []):
            self._conclude(0, 3, settles=True)
        for hold, _ in getattr(self, "holds", []):
            self.scheduler.table.holds.release(hold)
        super().teardown()
        if hasattr(self, "scheduler"):
            assert len(self.scheduler.table.holds) == 0


TestHolding = HoldingMachine.TestCase
TestHolding.settings = settings(
    max_examples=60,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
