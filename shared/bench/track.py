"""One request while it runs: what arrived when. A client feeds it, an `Outcome` comes out."""

import itertools
import json
import math
from collections import Counter
from typing import Any

from finback.shared.bench.outcomes import Outcome


class RequestFailed(Exception):
    """The service answered this request with an error, or broke off."""


class RequestRefused(RequestFailed):
    """Too many requests; `retry_after_s` is what the service advises."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Track:
    """Times are on the monotonic clock, which all processes of a machine share."""

    def __init__(self, index: int, num_wanted: int, due_at_s: float) -> None:
        self.index = index
        self.num_wanted = num_wanted
        self.due_at_s = due_at_s
        self.sent_at_s = due_at_s
        self.num_tokens = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_refusals = 0
        self.is_refused = False
        self.is_ended = False
        self.error = ""
        self.token_counts: Counter[int | str] = Counter()
        self.surprisals_bits: list[float] = []
        self._num_ids = 0
        self._arrivals_s: list[float] = []
        self._ended_at_s: float | None = None

    @property
    def num_arrived(self) -> int:
        """Tokens so far, as far as it is known how many an arrival brings."""
        return max(self._num_ids, self.num_tokens, len(self._arrivals_s))

    def sent(self, at_s: float) -> None:
        """A try begins; what an earlier, refused one left is forgotten."""
        self.sent_at_s = at_s
        self._num_ids = 0
        self._arrivals_s.clear()

    def arrived(self, at_s: float) -> None:
        """One or several tokens are here."""
        self._arrivals_s.append(at_s)

    def ended(self, at_s: float) -> None:
        """The service has said that the answer is over."""
        self._ended_at_s = at_s
        self.is_ended = True

    def take(self, document: bytes, at_s: float) -> None:
        """One chunk of a streamed text completion. Raises `RequestFailed` for an error in it."""
        try:
            self._take(json.loads(document), at_s)
        except (ValueError, KeyError, TypeError, AttributeError):
            shown = document[:100].decode(errors="replace")
            raise RequestFailed(f"a chunk that is none of a completion: {shown}") from None

    def _take(self, chunk: dict[str, Any], at_s: float) -> None:
        if "error" in chunk:
            raise RequestFailed(str((chunk["error"] or {}).get("message", "the request failed")))
        for choice in chunk.get("choices") or ():
            logprobs = choice.get("logprobs")
            token_ids = choice.get("token_ids")
            if choice.get("text") or logprobs or token_ids:
                self.arrived(at_s)
            if token_ids:
                self._num_ids += len(token_ids)
                self.token_counts.update(token_ids)
            if logprobs:
                self._keep_logprobs(logprobs, has_ids=bool(token_ids))
            if choice.get("finish_reason"):
                self.ended(at_s)
        if usage := chunk.get("usage"):
            self.num_tokens = usage["completion_tokens"]
            self.num_prompt_tokens = usage["prompt_tokens"]
            details = usage.get("prompt_tokens_details") or {}
            self.num_cached_tokens = details.get("cached_tokens") or 0
            if self._num_ids and self._num_ids != self.num_tokens:
                raise RequestFailed(
                    f"{self._num_ids} token ids came, but the usage counts {self.num_tokens}"
                )

    def _keep_logprobs(self, logprobs: dict[str, Any], *, has_ids: bool) -> None:
        if not has_ids:
            self.token_counts.update(logprobs.get("tokens") or ())
        for value in logprobs.get("token_logprobs") or ():
            self.surprisals_bits.append(-value / math.log(2))

    def outcome(self, start_at_s: float) -> Outcome:
        """As it is now. Tokens without text of their own (half a character) arrive with later ones,
        or with the end: an answer that has nothing else arrived when it ended."""
        arrivals = self._arrivals_s
        if not arrivals and self.is_ended and self._ended_at_s is not None:
            arrivals = [self._ended_at_s]
        gaps = [later - earlier for earlier, later in itertools.pairwise(arrivals)]
        return Outcome(
            index=self.index,
            due_s=self.due_at_s - start_at_s,
            sent_s=self.sent_at_s - start_at_s,
            first_s=arrivals[0] - start_at_s if arrivals else None,
            last_s=arrivals[-1] - start_at_s if arrivals else None,
            gaps_s=tuple(gaps),
            num_wanted=self.num_wanted,
            # Of an answer that was cut off nobody told the count: every arrival brought one at least.
            num_tokens=self.num_tokens or self.num_arrived,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_refusals=self.num_refusals,
            is_refused=self.is_refused,
            is_cut=not self.is_ended and not self.error,
            error=self.error,
        )
