"""Keeps late work of an older attempt from running after a newer one was seen."""

from collections import OrderedDict


class Fence:
    """The newest attempt of the last `capacity` requests."""

    def __init__(self, capacity: int = 4096) -> None:
        self._capacity = capacity
        self._newest: OrderedDict[str, int] = OrderedDict()

    def admit(self, request_id: str, attempt: int) -> bool:
        """Remember this attempt; False if a newer one is known. Work without an id is let through."""
        if not request_id:
            return True
        newest = self._newest.get(request_id, attempt)
        self._newest[request_id] = max(newest, attempt)
        self._newest.move_to_end(request_id)
        if len(self._newest) > self._capacity:
            self._newest.popitem(last=False)
        return attempt >= newest
