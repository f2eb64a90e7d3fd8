"""Where a background response goes: events into the log, the end into the store."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from finback.services.gateway.responses_keep import kept_of
from finback.services.gateway.responses_plan import Plan
from finback.services.gateway.responses_protocol import ResponsesProtocol
from finback.services.gateway.sink import Outcome
from finback.services.gateway.store import Store
from finback.shared.errors import Cancelled, ServingError

# Events are written together: a write costs the same for one as for ten.
FLUSH_S: Final = 0.05
# Above it the job waits for the log.
MAX_BUFFERED: Final = 2_048


class JobSink:
    """One attempt's. Everything it writes names the attempt's epoch; `on_news` after each write."""

    def __init__(
        self,
        plan: Plan,
        protocol: ResponsesProtocol,
        store: Store,
        *,
        tenant: str,
        epoch: int,
        on_news: Callable[[], None],
    ) -> None:
        self._plan = plan
        self._protocol = protocol
        self._store = store
        self._tenant = tenant
        self._epoch = epoch
        self._on_news = on_news
        self._next = protocol.numbering.next
        self._buffer: list[bytes] = []
        self._has_some = asyncio.Event()
        self._writing = asyncio.Lock()
        self._is_over = False
        self.is_begun = False

    async def reply(
        self, status: int, body: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        self.is_begun = True
        await self._finish()

    async def open_stream(self) -> None:
        """The log is open."""

    async def send(self, documents: Sequence[bytes]) -> None:
        self.is_begun = True
        self._buffer.extend(documents)
        self._has_some.set()
        if self._protocol.final is not None:
            await self._flush()
            await self._finish()
        elif len(self._buffer) > MAX_BUFFERED:
            await self._flush()

    async def keep_alive(self) -> None:
        """Followers make their own."""

    async def close_stream(self, final: Outcome) -> None:
        """The response's status says it."""

    async def fail(self, error: ServingError) -> None:
        """The response failed before anything of it was there."""
        documents = self._protocol.failure(error)
        if self._plan.request.stream:
            await self.send(documents)
        else:
            await self._finish()

    async def flush_forever(self) -> None:
        """Run beside the attempt; ends with an error when the attempt is fenced off."""
        while True:
            await self._has_some.wait()
            await self._flush()
            await asyncio.sleep(FLUSH_S)

    async def _flush(self) -> None:
        async with self._writing:
            documents, self._buffer = self._buffer, []
            self._has_some.clear()
            if not documents:
                return
            first, self._next = self._next, self._next + len(documents)
            name = self._plan.response_id
            if not await self._store.events.append(name, self._epoch, first, documents):
                raise Cancelled("another gateway makes this response, or it was cancelled")
        self._on_news()

    async def _finish(self) -> None:
        final = self._protocol.final
        if final is None or self._is_over:
            return
        self._is_over = True
        kept = kept_of(self._plan, final, self._tenant)
        if not await self._store.leases.finish(kept, self._epoch):
            raise Cancelled("another gateway makes this response, or it was cancelled")
        self._on_news()
