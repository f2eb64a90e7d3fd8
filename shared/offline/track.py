"""One prompt of a call on its way through the engine: its tokens, and the text they make."""

from collections.abc import Sequence
from dataclasses import dataclass

from finback.shared.codec.answer_text import AnswerText
from finback.shared.codec.tokenizer import Tokenizer
from finback.shared.engine.output import SequenceOutput
from finback.shared.engine.sequence import SequenceCounts
from finback.shared.offline.outputs import Completion, CompletionChunk, TokenLogprobs
from finback.shared.wire.messages.generate import EndInfo, SamplingSpec, TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt, checked, with the sampling of its answer. `stops`: stop strings."""

    index: int
    token_ids: tuple[int, ...]
    sampling: SamplingSpec
    seed: int
    stops: tuple[str, ...] = ()


class Track:
    """The answer so far. Text is made as tokens come only where somebody looks at it."""

    __slots__ = ("_is_live", "_logprobs", "_parts",
                 "_reason", "_stop_reason", "_text", "_token_ids", "num_accepted", "num_cached",
                 "num_draft", "request")  # fmt: skip

    def __init__(self, request: Request, tokenizer: Tokenizer, *, is_streamed: bool) -> None:
        self.request = request
        self._is_live = is_streamed or bool(request.stops)
        self._text: AnswerText[TokenLogprob] = AnswerText(
            tokenizer, request.stops, min_tokens=request.sampling.min_tokens
        )
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._parts: list[str] = []
        self._reason: str | None = None
        self._stop_reason: str | int | None = None
        self.num_cached = self.num_draft = self.num_accepted = 0

    @property
    def is_over(self) -> bool:
        """Has it ended, here or in the engine?"""
        return self._reason is not None

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer so far."""
        return len(self._token_ids)

    def push(self, row: SequenceOutput) -> CompletionChunk:
        """Take the tokens of a step; what follows a stop string is dropped here."""
        token_ids: list[int] = row.token_ids.tolist()
        text = ""
        if row.end is not None:
            self._close(row.end)
        if self._is_live or row.end is not None:
            text, num_kept = self._push_text(token_ids, row.end)
            token_ids = token_ids[:num_kept]
        self._token_ids += token_ids
        logprobs = _logprobs(row.logprobs, len(token_ids))
        if logprobs is not None:
            self._logprobs += logprobs
        return CompletionChunk(
            index=self.request.index,
            token_ids=tuple(token_ids),
            text=text,
            logprobs=logprobs,
            finish_reason=self._reason,
            stop_reason=self._stop_reason,
        )

    def count(self, counts: SequenceCounts | EndInfo) -> None:
        """The engine's counts of the sequence."""
        self.num_cached = counts.num_cached_tokens
        self.num_draft = counts.num_draft_tokens
        self.num_accepted = counts.num_accepted_tokens

    def completion(self) -> Completion:
        """The whole answer, once it is over."""
        if self._reason is None:
            raise ValueError("the answer is not over yet")
        wants_logprobs = self.request.sampling.num_logprobs is not None
        return Completion(
            index=self.request.index,
            prompt_token_ids=self.request.token_ids,
            token_ids=tuple(self._token_ids),
            text="".join(self._parts),
            finish_reason=self._reason,
            stop_reason=self._stop_reason,
            logprobs=tuple(self._logprobs) if wants_logprobs else None,
            num_cached_tokens=self.num_cached,
            num_draft_tokens=self.num_draft,
            num_accepted_tokens=self.num_accepted,
        )

    def _close(self, end: EndInfo) -> None:
        self._reason = end.finish_reason
        if end.stop_token_id in self.request.sampling.stop_token_ids:
            self._stop_reason = end.stop_token_id
        self.count(end)

    def _push_text(self, token_ids: list[int], end: EndInfo | None) -> tuple[str, int]:
        """(new text, how many of the new tokens belong to the answer)."""
        num_before, num_new = len(self._token_ids), len(token_ids)
        shown = token_ids
        if end is not None and token_ids and token_ids[-1] == end.stop_token_id:
            shown = token_ids[:-1]  # the token that ended the answer is no part of its text
        if not self._is_live:
            shown, num_before = [*self._token_ids, *shown], 0
        delta = self._text.push(shown)
        text, hit = delta.text, delta.stop
        if hit is None and end is not None:
            rest = self._text.finish()
            text, hit = text + rest.text, rest.stop
        self._parts.append(text)
        if hit is None:
            return text, num_new
        self._reason, self._stop_reason = "stop", hit.matched
        return text, hit.num_tokens - num_before


def _logprobs(
    found: Sequence[TokenLogprob] | None, num_kept: int
) -> tuple[TokenLogprobs, ...] | None:
    if found is None:
        return None
    return tuple(
        TokenLogprobs(
            logprob=entry.logprob,
            top=dict(zip(entry.top_ids, entry.top_logprobs, strict=True)),
        )
        for entry in found[:num_kept]
    )
