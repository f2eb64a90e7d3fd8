"""One call of the offline API: prompts that wait, prompts in the engine, and what came of them.

The engine's thread feeds it, one consumer reads it, on a thread or an event loop of its own.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from finback.shared.offline.outputs import Completion, CompletionChunk
from finback.shared.offline.track import Request, Track


class Job:
    """`wake` is called on the engine's thread: when there is a chunk to take, and when it is over.

    With `max_unread` the consumer takes chunks, and no more than so many answers are begun whose end
    it has not taken. Without, it reads `completions` when the job is over.
    """

    def __init__(
        self,
        requests: Iterable[Request],
        *,
        wake: Callable[[], None],
        max_unread: int | None = None,
    ) -> None:
        self.pending = deque(requests)
        self.is_streamed = max_unread is not None
        self.num_prompts = len(self.pending)
        self.num_ended = 0
        self.num_tokens = 0
        self.is_over = not self.pending
        self._max_unread = max_unread
        self._num_unread = 0
        self._wake = wake
        self._error: BaseException | None = None
        self._completions: list[Completion] = []
        self._lock = threading.Lock()
        self._chunks: dict[int, CompletionChunk] = {}

    # -- the engine's thread

    def may_start(self) -> bool:
        """May another of its prompts enter the engine?"""
        if self._max_unread is not None and self._num_unread >= self._max_unread:
            return False
        return bool(self.pending) and not self.is_over

    def start(self) -> Request:
        """The next prompt, which enters the engine."""
        if self.is_streamed:
            with self._lock:
                self._num_unread += 1
        return self.pending.popleft()

    def tell(self, chunk: CompletionChunk) -> None:
        """New tokens of one of its prompts."""
        self.num_tokens += len(chunk.token_ids)
        if not self.is_streamed:
            return
        with self._lock:
            earlier = self._chunks.get(chunk.index)
            self._chunks[chunk.index] = chunk if earlier is None else _joined(earlier, chunk)
        self._wake()

    def end(self, track: Track) -> None:
        """One of its prompts has its whole answer."""
        if not self.is_streamed:
            self._completions.append(track.completion())
        self.num_ended += 1
        if self.num_ended == self.num_prompts:
            self.is_over = True
            self._wake()

    def fail(self, error: BaseException) -> None:
        """It is over without an answer."""
        if not self.is_over:
            self._error = error
            self.pending.clear()
            self.is_over = True
            self._wake()

    # -- the consumer

    def take(self) -> Iterator[CompletionChunk]:
        """The chunks that are there, one a prompt; what comes meanwhile waits for the next call."""
        with self._lock:
            indexes = list(self._chunks)
        for index in indexes:
            with self._lock:
                chunk = self._chunks.pop(index)
                self._num_unread -= chunk.finish_reason is not None
            yield chunk

    @property
    def is_read(self) -> bool:
        """Is it over, and every chunk taken?"""
        return self.is_over and not self._chunks

    def raise_failure(self) -> None:
        """Raise what it failed with, if it did."""
        if self._error is not None:
            raise self._error

    def completions(self) -> list[Completion]:
        """The answers in the order of the prompts, once it is over; raises what it failed with."""
        self.raise_failure()
        return sorted(self._completions, key=lambda completion: completion.index)


def _joined(first: CompletionChunk, second: CompletionChunk) -> CompletionChunk:
    logprobs = None
    if first.logprobs is not None or second.logprobs is not None:
        logprobs = (*(first.logprobs or ()), *(second.logprobs or ()))
    return CompletionChunk(
        index=first.index,
        token_ids=first.token_ids + second.token_ids,
        text=first.text + second.text,
        logprobs=logprobs,
        finish_reason=second.finish_reason,
        stop_reason=second.stop_reason,
    )
