"""Whatever happens, in whatever order: every sequence gets the tokens it would get alone.

The scheduler runs against a device whose KV is checked on every read (support/engine_sim.py), with
up to two plans in flight, and hypothesis chooses arrivals, drafts, masks, credits, ends and aborts.
"""

from collections import deque
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from finback.shared.engine.mask_shelf import span_of
from finback.shared.engine.outcome import Committed
from finback.shared.engine.output import SequenceOutput
from finback.shared.engine.plan import ItemResult, StepPlan
from finback.shared.engine.scheduler import Scheduler
from finback.shared.engine.sequence import SequenceKey, SequenceSpec, State
from finback.shared.engine.state_book import StateRules
from finback.shared.engine.table import SchedulerConfig
from finback.shared.kv.state_policy import ReplayRule, exact_replay_tokens
from finback.shared.wire.messages.generate import SamplingSpec
from support.engine_sim import VOCAB_SIZE, SimRunner, expected_completion, mask_of
from support.state_sim import SimState

EOS = (0,)
BLOCK_SIZE = 4
PREFIX = np.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], dtype=np.int32)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.sampled_from([6, 4, 5, 8, 14]),
        max_num_seqs=st.sampled_from([3, 4, 2, 1]),
        budget=st.integers(0, 20),
        max_drafts=st.sampled_from([3, 1, 0]),
    )
    def start(self, num_blocks: int, max_num_seqs: int, budget: int, max_drafts: int) -> None:
        self.config = SchedulerConfig(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_model_len=min(num_blocks * BLOCK_SIZE, 37),
            vocab_size=VOCAB_SIZE,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + budget,
            max_queue=6,
            max_draft_tokens=max_drafts,
            max_span_tokens=max_drafts,
            eos_token_ids=EOS,
            state=self.state_rules(),
        )
        self.now_s = 0.0
        self.scheduler = Scheduler(self.config, now_s=lambda: self.now_s)
        self.runner = SimRunner(
            num_slots=max_num_seqs,
            max_model_len=self.config.max_model_len,
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            state=self.new_state(max_num_seqs, max_drafts + 1),
        )
        self.queue: deque[tuple[StepPlan, list[ItemResult] | None]] = deque()
        self.specs: dict[SequenceKey, SequenceSpec] = {}
        self.got: dict[SequenceKey, list[int]] = {}
        self.ends: dict[SequenceKey, str] = {}
        self.prefilled: dict[SequenceKey, int] = {}
        self.credits: dict[SequenceKey, int] = {}
        self.count = self.turn = 0

    def state_rules(self) -> StateRules | None:
        """Of a model with state slots."""
        return None

    def new_state(self, _num_slots: int, _rollback: int) -> SimState | None:
        """The slots themselves."""
        return None

    # -- what a worker does

    @rule(
        shared=st.integers(0, 12),
        own=st.sampled_from([[2], [2, 4], [6, 6, 6], [1, 8, 2, 8, 1, 8, 2, 8]]),
        max_tokens=st.sampled_from([20, 18, 12, 7, 3, 1]),
        min_tokens=st.integers(0, 3),
        mode=st.sampled_from(["full", "full", "full", "prefill", "decode"]),
        grammar=st.sampled_from([False, False, True]),
        drafting=st.sampled_from([True, True, False]),
        credit=st.sampled_from([1000, 1000, 3, 0]),
        ignore_eos=st.sampled_from([True, True, False]),
    )
    def add(
        self,
        shared: int,
        own: list[int],
        max_tokens: int,
        min_tokens: int,
        mode: Any,
        grammar: bool,
        drafting: bool,
        credit: int,
        ignore_eos: bool,
    ) -> None:
        """One more sequence; `own` and `shared` are drawn from few, so that prefixes meet."""
        self.count += 1
        spec = SequenceSpec(
            key=(f"r{self.count}", 0),
            attempt=1,
            token_ids=np.append(PREFIX[:shared], np.array(own, dtype=np.int32)).astype(np.int32),
            sampling=SamplingSpec(
                max_tokens=max_tokens,
                min_tokens=min(min_tokens, max_tokens),
                ignore_eos=ignore_eos,
                stop_token_ids=(7,) if max_tokens % 3 == 0 else (),
            ),
            seed=self.count % 3,
            mode=mode,
            has_grammar=grammar and mode != "prefill",
            drafting=drafting,
            credit_tokens=credit,
        )
        if self.scheduler.add(spec).accepted:
            self.specs[spec.key] = spec
            self.got[spec.key] = []
            self.credits[spec.key] = credit

    def _some(self, data: Any, *states: State) -> SequenceKey | None:
        keys = [k for k, s in self.scheduler.table.by_key.items() if s.state in states]
        return data.draw(st.sampled_from(keys)) if keys else None

    @rule(data=st.data())
    def activate(self, data: Any) -> None:
        key = self._some(data, State.RESERVED)
        if key is not None:
            # Nothing was imported: the engine computes what its own prefix hits do not cover.
            self.scheduler.activate(key, 0)

    @rule(data=st.data())
    def abort(self, data: Any) -> None:
        key = self._some(data, *State)
        if key is not None:
            self.scheduler.abort(key)
            self._forget(key)

    @rule(data=st.data())
    def finish(self, data: Any) -> None:
        key = self._some(data, State.RUNNING, State.WAITING)
        if key is not None and self.specs[key].mode != "prefill":
            counts = self.scheduler.finish(key, data.draw(st.integers(0, len(self.got[key]))))
            assert counts is not None
            self._forget(key)

    def _forget(self, key: SequenceKey) -> None:
        del self.specs[key], self.got[key]
        self.prefilled.pop(key, None)

    @rule(data=st.data(), more=st.integers(1, 5))
    def grant(self, data: Any, more: int) -> None:
        key = self._some(data, State.RUNNING, State.WAITING)
        if key is not None:
            self._grant(key, len(self.got[key]) + more)

    def _grant(self, key: SequenceKey, up_to: int) -> None:
        self.scheduler.grant(key, up_to)
        self.credits[key] = max(self.credits[key], up_to)

    @rule(
        data=st.data(), offset=st.integers(-1, 1), size=st.integers(0, 8), wrong=st.integers(0, 8)
    )
    def mask(self, data: Any, offset: int, size: int, wrong: int) -> None:
        key = self._some(data, State.RUNNING, State.WAITING)
        if key is not None:
            position = len(self.got[key]) + offset
            assert self._mask(key, position, size, wrong) == (offset == 0)

    def _mask(self, key: SequenceKey, position: int, size: int, wrong: int) -> bool:
        """A mask, and those along a guess that is good but for its token `wrong`; was it taken?"""
        sequence = self.scheduler.provide_mask(key, position, mask_of(position))
        if sequence is None or sequence.state is not State.RUNNING:
            return sequence is not None
        full, _ = expected_completion(self.specs[key], self.config.max_model_len, EOS)
        guess = full[position : position + size]
        if wrong < len(guess):
            guess[wrong] = (guess[wrong] + 1) % VOCAB_SIZE
        masks = tuple(mask_of(position + index) for index in range(1 + len(guess)))
        span = span_of(sequence, masks, np.array(guess, dtype=np.int32))
        self.runner.slots.offer_masks(sequence.slot, span)
        return True

    @rule(data=st.data(), size=st.integers(0, 8), wrong=st.integers(0, 8), early=st.integers(0, 3))
    def draft(self, data: Any, size: int, wrong: int, early: int) -> None:
        key = self._some(data, State.RUNNING)
        if key is not None:
            self._offer(key, size, wrong, early)

    def _offer(self, key: SequenceKey, size: int, wrong: int, early: int) -> None:
        """A guess that begins `early` tokens before the end; good but for its token `wrong`."""
        spec = self.specs[key]
        sequence = self.scheduler.table.by_key[key]
        if spec.mode == "prefill":
            return
        full, _ = expected_completion(spec, self.config.max_model_len, EOS)
        begin = max(0, len(self.got[key]) - early)
        guess = full[begin : begin + size]
        if wrong < len(guess):
            guess[wrong] = (guess[wrong] + 1) % VOCAB_SIZE
        self.runner.slots.offer_draft(
            sequence.slot,
            sequence.incarnation,
            spec.token_ids.size + begin,
            np.array(guess, dtype=np.int32),
        )

    @rule(count=st.integers(1, 8))
    def turns(self, count: int) -> None:
        """A worker that drafts, well and badly, and runs a few steps."""
        for _ in range(count):
            self._run_once()

    # -- what an engine does

    @precondition(lambda self: len(self.queue) < 2)
    @rule(max_chunk_rows=st.sampled_from([None, None, 1, 2, 5]))
    def plan(self, max_chunk_rows: int | None) -> None:
        plan = self.scheduler.plan(max_chunk_rows)
        self._news()
        if plan is not None:
            assert plan.num_rows <= self.config.max_num_batched_tokens
            self.queue.append((plan, None))

    @precondition(lambda self: self.queue and self.queue[0][1] is None)
    @rule()
    def execute(self) -> None:
        self._execute(0)

    @precondition(lambda self: len(self.queue) == 2 and self.queue[0][1] and not self.queue[1][1])
    @rule()
    def execute_ahead(self) -> None:
        self._execute(1)

    @precondition(lambda self: self.queue and self.queue[0][1] is not None)
    @rule()
    def commit(self) -> None:
        plan, results = self.queue.popleft()
        assert results is not None
        self._take(self.scheduler.commit(plan, results))

    def _execute(self, index: int) -> None:
        plan, _ = self.queue[index]
        self.queue[index] = (plan, self.runner.execute(plan))

    def _news(self) -> None:
        self._take(self.scheduler.take_news())

    def _take(self, out: Committed) -> None:
        for row in out.rows:
            self._take_row(row)
        for progress in out.prefilled:
            assert progress.num_computed_tokens >= self.prefilled.get(progress.key, 0)
            self.prefilled[progress.key] = progress.num_computed_tokens
            assert progress.is_last == (
                progress.num_computed_tokens == self.specs[progress.key].token_ids.size - 1
            )

    def _take_row(self, row: SequenceOutput) -> None:
        spec, got = self.specs[row.key], self.got[row.key]
        assert row.key not in self.ends
        assert row.offset == len(got)
        got += row.token_ids.tolist()
        assert len(got) <= self.credits[row.key]
        full, reason = expected_completion(spec, self.config.max_model_len, EOS)
        assert got == full[: len(got)]
        if row.end is not None:
            assert got == full
            assert row.end.finish_reason == reason
            assert row.end.num_completion_tokens == len(full)
            self.ends[row.key] = reason
            self._forget(row.key)

    @invariant()
    def books_add_up(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.table.check_integrity()

    def teardown(self) -> None:
        """Left alone with credit and masks, everything comes to its end."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(3000):
            if not self._advance():
                break
        assert not self.got
        self.scheduler.table.check_integrity()
        assert self.scheduler.table.pool.num_free == self.config.num_blocks
        assert len(self.scheduler.table.free_slots) == self.config.max_num_seqs

    def _advance(self) -> bool:
        table = self.scheduler.table
        for key, sequence in list(table.by_key.items()):
            self._grant(key, 1000)
            position = sequence.num_completion
            self.turn += 1
            self._mask(key, position, self.turn % 9, self.turn * 5 % 8)
            if sequence.state is State.RESERVED:
                self.scheduler.activate(key, 0)
            elif sequence.state is State.HELD and not self.queue:
                assert self.prefilled[key] == self.specs[key].token_ids.size - 1
                self.scheduler.release(key)
                self._forget(key)
        if self._run_once():
            return True
        return bool(table.by_key)

    def _run_once(self) -> bool:
        for sequence in self.scheduler.table.running:
            self.turn += 1
            self._offer(sequence.spec.key, 9, self.turn * 5 % 8, self.turn % 3)
        while len(self.queue) < 2:
            plan = self.scheduler.plan()
            self._news()
            if plan is None:
                break
            self.queue.append((plan, None))
        if not self.queue:
            return False
        if self.queue[0][1] is None:
            self._execute(0)
        self.commit()
        return True


class StatefulMachine(SchedulerMachine):
    """The same for a model with window layers, whose snapshots get lost now and then."""

    NUM_LAYERS, WINDOW = 2, 3

    def new_state(self, num_slots: int, rollback: int) -> SimState:
        return SimState(num_slots, self.NUM_LAYERS, self.WINDOW, rollback)

    def state_rules(self) -> StateRules:
        exact = exact_replay_tokens(self.NUM_LAYERS, self.WINDOW)
        size = self.new_state(1, 1).payload_bytes
        return StateRules(
            rule=ReplayRule(mode="exact", exact_tokens=exact),
            snapshot_bytes=3 * size,
        )

    @precondition(lambda self: hasattr(self, "scheduler"))
    @rule(seconds=st.sampled_from([1.0, 100.0, 200.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds


_SETTINGS = settings(
    max_examples=100,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = _SETTINGS
TestStatefulScheduler = StatefulMachine.TestCase
TestStatefulScheduler.settings = _SETTINGS
