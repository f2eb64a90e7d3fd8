"""The event loop's half of the engine: plan, hand to the device, commit, tell.

While step t runs, plan t + 1 (on a device that computes by itself, t + 2 as well) may already lie in
the device's queue; never more. A result is committed first, then the next plan is made, then the owner
is told, so that the device waits least.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial

from finback.shared.engine.device_thread import DeviceThread, Pending
from finback.shared.engine.outcome import step_output
from finback.shared.engine.output import StepOutput
from finback.shared.engine.plan import StepPlan, StepResult
from finback.shared.engine.scheduler import Scheduler
from finback.shared.engine.step_times import StepTimes
from finback.shared.errors import InvariantViolated


class StepLoop:
    """Keeps the device busy; all methods run on the event loop.

    `depth`: most plans on their way. `overlap_below_ms`: plan ahead only behind a step that is expected to be shorter.
    `max_stall_ms`: for about how long prompts may keep sequences that decode waiting; 0: any time. `on_error`
    hears of an exception here (it is raised as well): the books can no longer be trusted.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        execute: Callable[[StepPlan], StepResult | Pending[StepResult]],
        times: StepTimes,
        *,
        depth: int = 2,
        overlap_below_ms: float,
        max_stall_ms: float = 0.0,
        on_step: Callable[[StepOutput], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._scheduler = scheduler
        self._execute = execute
        self._times = times
        self._depth = depth
        self._overlap_below_ms = overlap_below_ms
        self._max_stall_ms = max_stall_ms
        self._on_step = on_step
        self._on_error = on_error
        self._in_flight: deque[StepPlan] = deque()
        self._outbox: deque[StepOutput] = deque()
        self._is_awake = False
        self._loop: asyncio.AbstractEventLoop
        self._thread: DeviceThread
        self.is_running = False
        self.progress = 0

    def start(self, loop: asyncio.AbstractEventLoop, thread: DeviceThread) -> None:
        """Take work from now on."""
        self._loop, self._thread = loop, thread
        self.is_running = True

    @property
    def is_busy(self) -> bool:
        """Is a step on its way?"""
        return bool(self._in_flight)

    def wake(self) -> None:
        """Plan soon, once for all calls of this turn of the loop."""
        if self.is_running and not self._is_awake:
            self._is_awake = True
            self._loop.call_soon(self._turn, None)

    def _turn(self, result: StepResult | None) -> None:
        self._is_awake = self._is_awake and result is not None
        if not self.is_running:
            return
        try:
            if result is not None:
                self._commit(result)
            self._submit_plans()
            self._tell()
        except BaseException as error:  # a broken invariant here is as final as one on the device
            self._on_error(error)
            raise

    def _submit_plans(self) -> None:
        while self.is_running and self._may_plan():
            most = self._times.rows_within(self._max_stall_ms) if self._max_stall_ms else None
            plan = self._scheduler.plan(most)
            if plan is None:
                return
            self._in_flight.append(plan)
            self._thread.submit(partial(self._execute, plan), self._turn)

    def _may_plan(self) -> bool:
        if not self._in_flight:
            return True
        if len(self._in_flight) >= self._depth or not self._overlap_below_ms:
            return False
        first = self._in_flight[0]
        expected = self._times.expected_ms(first.num_rows - first.num_reserved)
        return expected is not None and expected < self._overlap_below_ms

    def _commit(self, result: StepResult) -> None:
        plan = self._in_flight.popleft()
        if plan.step != result.step:
            raise InvariantViolated(f"step {result.step} retired before step {plan.step}")
        committed = self._scheduler.commit(plan, result.items)
        self.progress = result.step
        if result.num_rows:
            self._times.record(result.num_rows, result.duration_ms)
        num_tokens = sum(row.token_ids.size for row in committed.rows)
        if num_tokens:
            self._times.record_tokens(result.started_s + result.duration_ms / 1e3, num_tokens)
        self._outbox.append(step_output(committed, result.step, result))

    def _tell(self) -> None:
        news = self._scheduler.take_news()
        if news:
            self._outbox.append(step_output(news, self.progress))
        while self._outbox:
            self._on_step(self._outbox.popleft())
