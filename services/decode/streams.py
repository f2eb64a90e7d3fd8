"""Tokens on their way to gateways: one message per step per gateway, and signs of life."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from finback.shared.errors import ServingError
from finback.shared.wire.messages.generate import TokenBatch, TokenRow

# Batches that wait for a bus that is away; beyond it the oldest go, and gateways resume.
_MAX_PENDING: Final = 4096

Publish = Callable[[str, TokenBatch], Awaitable[None]]


class TokenStreams:
    """Sends batches in order. A batch that cannot be sent is dropped: the reader sees the gap."""

    def __init__(self, publish: Publish, epoch: int) -> None:
        self._publish = publish
        self._epoch = epoch
        self._pending: asyncio.Queue[tuple[str, TokenBatch]] = asyncio.Queue(_MAX_PENDING)
        self._step = 0
        self.num_dropped = 0

    def send(self, step: int, rows: dict[str, list[TokenRow]]) -> None:
        """Queue the rows of one step, by gateway."""
        self._step = max(step, self._step)
        for gateway, of_gateway in rows.items():
            self._put(gateway, tuple(of_gateway))

    def heartbeat(self, gateways: set[str]) -> None:
        """Tell gateways with live requests that this instance is there."""
        for gateway in gateways:
            self._put(gateway, ())

    def _put(self, gateway: str, rows: tuple[TokenRow, ...]) -> None:
        if self._pending.full():
            self._pending.get_nowait()
            self._pending.task_done()
            self.num_dropped += 1
        batch = TokenBatch(epoch=self._epoch, step=self._step, rows=rows)
        self._pending.put_nowait((gateway, batch))

    async def run(self) -> None:
        """Send what is queued, for ever."""
        while True:
            gateway, batch = await self._pending.get()
            try:
                await self._publish(gateway, batch)
            except ServingError:
                self.num_dropped += 1
            finally:
                self._pending.task_done()

    async def flush(self) -> None:
        """Return when everything queued so far is sent."""
        await self._pending.join()
