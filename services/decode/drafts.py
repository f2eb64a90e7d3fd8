"""Asks the drafter for guesses while a step runs. A guess that comes late is worth nothing.

One request is in flight at most, so a slow or dead drafter costs one message and no step waits.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from finback.services.decode.draft_book import DraftBook, Key, TokensFrom
from finback.services.decode.fair_parent import FairParent
from finback.shared.clock import monotonic_s
from finback.shared.drafting.draft_policy import DraftPolicy, break_even
from finback.shared.engine.sequence import TokenIds
from finback.shared.engine.worker_host import WorkerHost
from finback.shared.errors import ServingError
from finback.shared.telemetry import tracing
from finback.shared.wire.messages.draft import DraftReply, DraftRequest, DraftRow

_TIMEOUT_S: Final = 0.5
# After a failure the drafter is left alone this long, so that its restart is not hammered.
_BACK_OFF_S: Final = 0.5
# Steps between two looks at what steps with and without drafts cost.
_WEIGH_EVERY: Final = 8


class DraftPump:
    """Keeps the engine in drafts where they pay. `run` is its loop, the others only take notes."""

    def __init__(
        self,
        host: WorkerHost,
        policy: DraftPolicy,
        tokens_from: TokensFrom,
        parent_of: Callable[[Key], Any],
        offer: Callable[[Key, int, TokenIds], None],
    ) -> None:
        """`offer` takes (key, absolute position, guess) to where it is verified."""
        self._host = host
        self._book = DraftBook(policy)
        self._tokens_from = tokens_from
        self._parents = FairParent(parent_of)
        self._offer = offer
        self._num_draft_tokens = policy.num_draft_tokens
        self._num_wants = 0
        self._quiet_until_s = 0.0
        self._wake = asyncio.Event()

    def add(self, key: Key) -> None:
        """This sequence may be drafted."""
        self._book.add(key)

    def end(self, key: Key) -> None:
        """The sequence is over."""
        self._book.end(key)
        self._parents.forget(key)
        self._wake.set()

    def step(self, key: Key, num_drafted: int, num_accepted: int) -> None:
        """The sequence took part in a step: what its draft (if any) brought."""
        self._book.step(key, num_drafted, num_accepted)

    def want(self, keys: tuple[Key, ...], num_running: int) -> None:
        """The engine could use drafts for these sequences in its next step."""
        if not keys:
            return
        self._weigh(num_running)
        for key in keys:
            self._book.want(key, num_running)
        self._wake.set()

    def _weigh(self, num_running: int) -> None:
        self._num_wants += 1
        if self._num_wants % _WEIGH_EVERY == 0:
            times = self._host.engine.step_times
            gain = break_even(times, num_running, self._num_draft_tokens)
            if gain is not None:
                self._book.set_min_gain(gain)

    async def run(self) -> None:
        """Ask for drafts for ever."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            if monotonic_s() < self._quiet_until_s:
                continue
            rows = self._book.take_rows(self._tokens_from)
            if not rows and not self._book.has_ended:
                continue
            try:
                await self._ask(rows)
            except ServingError as error:
                self._book.forget_sent(rows)
                self._quiet_until_s = monotonic_s() + _BACK_OFF_S
                self._host.metrics.count("finback.decode.draft_failures", code=error.code)

    async def _ask(self, rows: tuple[DraftRow, ...]) -> None:
        request = DraftRequest(
            instance=self._host.instance,
            epoch=self._host.epoch,
            rows=rows,
            ended=self._book.take_ended(),
        )
        parent = self._parents.choose([(row.request_id, row.choice) for row in rows])
        with tracing.span("draft", {"finback.num_rows": len(rows)}, parent=parent) as span:
            reply = await self._host.client.call(
                self._host.subjects.service("drafter", "draft"),
                request,
                DraftReply,
                timeout_s=_TIMEOUT_S,
                request_id=rows[0].request_id if rows else "",
            )
            usable = self._book.apply(rows, reply.drafts)
            span.set_attribute("finback.num_drafts", len(usable))
        for draft in usable:
            token_ids = np.frombuffer(draft.token_ids, dtype="<i4").astype(np.int32)
            self._offer((draft.request_id, draft.choice), draft.position, token_ids)
