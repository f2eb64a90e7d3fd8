"""The drafter service's endpoint: one message for all sequences of a decode step."""

from typing import ClassVar, Final

import anyio

from finback.services.drafter.histories import Histories
from finback.shared.actor.endpoint import Call
from finback.shared.actor.service import Service, ServiceContext
from finback.shared.clock import monotonic_s
from finback.shared.drafting.suffix_drafts import MatchPolicy
from finback.shared.wire.messages.draft import DraftReply, DraftRequest

_TICK_S: Final = 10.0


class DrafterService(Service):
    """Guesses from tokens alone. What a restart loses, callers tell again when asked."""

    name: ClassVar[str] = "drafter"

    def __init__(self, context: ServiceContext) -> None:
        super().__init__(context)
        self._histories = Histories(MatchPolicy())

    async def start(self) -> None:
        """Answer `drafter.draft`."""
        # One worker: nothing here awaits. A draft that waits long is late, so few may wait.
        await self.add_endpoint(
            "draft", DraftRequest, self._on_draft, scope="both", workers=1, mailbox=64
        )
        self.spawn(self._tick)

    async def _on_draft(self, call: Call[DraftRequest]) -> DraftReply:
        request = call.message
        caller = (request.instance, request.epoch)
        self._histories.end((*caller, *ended) for ended in request.ended)
        now_s = monotonic_s()
        drafts = []
        for row in request.rows:
            found = self._histories.answer((*caller, row.request_id, row.choice), row, now_s)
            if found is not None:
                drafts.append(found)
        num_guesses = sum(found.need_from is None for found in drafts)
        self.metrics.count("finback.drafter.rows", len(request.rows) - num_guesses, guess="none")
        self.metrics.count("finback.drafter.rows", num_guesses, guess="some")
        return DraftReply(drafts=tuple(drafts))

    async def _tick(self) -> None:
        while True:
            self._histories.expire(monotonic_s())
            self.metrics.gauge("finback.drafter.num_sequences", len(self._histories))
            self.metrics.gauge("finback.drafter.num_tokens", self._histories.num_tokens)
            await anyio.sleep(_TICK_S)
