"""Whether the file tier is used: after a failure it is left alone for a while, and tried again. Pure."""

from typing import Final

REST_S: Final = (5.0, 60.0)  # doubled from failure to failure, up to the second


class TierHealth:
    """`state` is `off`, `opening`, `on` or why the tier rests. Times are monotonic."""

    def __init__(self) -> None:
        self.state = "off"
        self._until_s = 0.0
        self._rest_s = REST_S[0]

    @property
    def is_failed(self) -> bool:
        """Whether the last thing that happened was a failure."""
        return self.state not in ("off", "opening", "on")

    def may_try(self, now_s: float) -> bool:
        """Whether it may be asked now."""
        return self.state != "off" and (not self.is_failed or now_s >= self._until_s)

    def worked(self) -> bool:
        """It did what it should; True if it had failed before."""
        was_failed = self.is_failed
        self.state, self._rest_s = "on", REST_S[0]
        return was_failed

    def failed(self, why: str, now_s: float) -> bool:
        """It failed; True if this is news."""
        is_news = not self.is_failed
        if is_news or now_s >= self._until_s:
            self._until_s = now_s + self._rest_s
            self._rest_s = min(REST_S[1], 2 * self._rest_s)
        self.state = why or "failed"
        return is_news
