"""A clock for consumers: it rings when nothing has come for a while."""

import asyncio


class Ticker:
    """Wakes a consumer when nothing has come for a while. One timer, moved only when it rings."""

    __slots__ = ("_loop", "_notify", "_quiet_since_s", "_tick_s", "_ticked", "_timer")

    def __init__(self, tick_s: float, notify: asyncio.Event) -> None:
        self._tick_s = tick_s
        self._notify = notify
        self._ticked = False
        self._loop = asyncio.get_running_loop()
        self._quiet_since_s = self._loop.time()
        self._timer = self._loop.call_later(tick_s, self._ring)

    def reset(self) -> None:
        """Something came."""
        self._quiet_since_s = self._loop.time()

    def has_ticked(self) -> bool:
        """Was it quiet for a whole tick; asked once a tick."""
        ticked, self._ticked = self._ticked, False
        return ticked

    def stop(self) -> None:
        self._timer.cancel()

    def _ring(self) -> None:
        left_s = self._quiet_since_s + self._tick_s - self._loop.time()
        if left_s <= 0:
            self._ticked, left_s = True, self._tick_s
            self._quiet_since_s = self._loop.time()
            self._notify.set()
        self._timer = self._loop.call_later(left_s, self._ring)
