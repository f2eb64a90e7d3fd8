"""Plays a background stream from its log, from any event on, and follows it to its end."""

from collections.abc import Awaitable, Callable
from typing import Final

from finback.services.gateway.responses_output_items import Numbering
from finback.services.gateway.sink import Sink
from finback.services.gateway.store import Store
from finback.services.gateway.store_rows import UNFINISHED
from finback.shared.clock import monotonic_s
from finback.shared.errors import InvalidRequest, NotFound

Wait = Callable[[str, float], Awaitable[None]]
_CREATED: Final = b'{"type":"response.created"'
_ENDS: Final = tuple(
    f'{{"type":"response.{kind}"'.encode() for kind in ("completed", "incomplete", "failed")
)


class Follower:
    """One client's way through one log. `wait` returns when there may be news."""

    def __init__(
        self, store: Store, tenant: str, response_id: str, sink: Sink, *, wait: Wait, tick_s: float
    ) -> None:
        self._store = store
        self._tenant = tenant
        self._response_id = response_id
        self._sink = sink
        self._wait = wait
        self._tick_s = tick_s
        self._is_open = False
        self._has_sent = False
        self._quiet_since_s = monotonic_s()

    async def follow(self, after: int) -> None:
        """Send every event after number `after`; raises as long as nothing was sent."""
        while True:
            page = await self._store.events.page(self._tenant, self._response_id, after)
            if page is None:
                return await self._end_early(after, "response_deleted", "it was deleted")
            if page.documents:
                if self._has_sent and any(d.startswith(_CREATED) for _, d in page.documents):
                    text = "its gateway was lost and it is made again: follow it from the start"
                    return await self._end_early(after, "response_restarted", text)
                after = page.documents[-1][0]
                await self._send([document for _, document in page.documents])
                if page.documents[-1][1].startswith(_ENDS):
                    is_failed = page.documents[-1][1].startswith(_ENDS[-1])
                    return await self._sink.close_stream("error" if is_failed else "end")
                continue
            if not page.has_log and page.status in UNFINISHED:
                return await self._end_early(after, "no_event_stream", "it has no event stream")
            if page.status not in UNFINISHED:
                return await self._end_silent(after, page.status)
            await self._pause()

    async def _end_silent(self, after: int, status: str) -> None:
        """It is finished, and the log says no more."""
        if status == "cancelled":
            return await self._end_early(after, "response_cancelled", "it was cancelled")
        if not self._is_open and after >= 0:
            await self._open()
            return await self._sink.close_stream("end")  # all of it was seen before
        await self._end_early(after, "no_event_stream", "it has no event stream any more")

    async def _end_early(self, after: int, code: str, text: str) -> None:
        message = f"the stream of response '{self._response_id}' ends here: {text}"
        if not self._is_open:
            if code == "response_deleted":
                raise NotFound(f"Response with id '{self._response_id}' not found.")
            raise InvalidRequest(message, param="stream", reason=code)
        numbering = Numbering(after + 1)
        await self._sink.send([numbering.document("error", code=code, message=message, param=None)])
        await self._sink.close_stream("cancelled" if code == "response_cancelled" else "error")

    async def _send(self, documents: list[bytes]) -> None:
        await self._open()
        self._has_sent = True
        await self._sink.send(documents)
        self._quiet_since_s = monotonic_s()

    async def _open(self) -> None:
        if not self._is_open:
            self._is_open = True
            await self._sink.open_stream()

    async def _pause(self) -> None:
        await self._wait(self._response_id, self._tick_s)
        if monotonic_s() - self._quiet_since_s >= self._tick_s:
            await self._open()
            self._quiet_since_s = monotonic_s()
            await self._sink.keep_alive()
