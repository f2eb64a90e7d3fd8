"""The JSON of OpenAI's chat and text completions, built by hand where it is built per token."""

import json
import math
from collections.abc import Sequence
from typing import Any, Final

from finback.services.gateway.answer_events import Usage
from finback.shared.codec.tokenizer import Tokenizer
from finback.shared.wire.messages.generate import TokenLogprob

# What OpenAI writes for a probability of zero; JSON has no infinity.
LEAST_LOGPROB: Final = -9999.0

Logprobs = Sequence[tuple[int, TokenLogprob]]


def to_json(value: Any) -> bytes:
    """Compact JSON in UTF-8."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def usage_json(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage object; the total is the exact sum."""
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_completion_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
    }


class Spelling:
    """How tokens are written in logprobs."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def text(self, token_id: int) -> str:
        """The token as text; bytes that are no text alone are spelled `bytes:\\x..`."""
        raw = self._tokenizer.token_bytes(token_id)
        if not raw:
            return self._tokenizer.spelling(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{value:02x}" for value in raw)

    def chat(self, logprobs: Logprobs) -> list[dict[str, Any]]:
        """`logprobs.content` of a chat choice."""
        return [
            {
                **self._entry(token_id, found.logprob),
                "top_logprobs": [
                    self._entry(top_id, top)
                    for top_id, top in zip(found.top_ids, found.top_logprobs, strict=True)
                ],
            }
            for token_id, found in logprobs
        ]

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(token_id)
        return {
            "token": self.text(token_id),
            "logprob": finite(logprob),
            "bytes": list(raw) if raw else None,
        }

    def completion(self, logprobs: Logprobs, num_top: int, offset: int) -> dict[str, Any]:
        """`logprobs` of a text completion; `offset` is where its first token's text begins."""
        tokens = [self.text(token_id) for token_id, _ in logprobs]
        offsets = []
        for token_id, _ in logprobs:
            offsets.append(offset)
            raw = self._tokenizer.token_bytes(token_id)
            offset += len(raw.decode("utf-8", errors="ignore"))
        return {
            "tokens": tokens,
            "token_logprobs": [finite(found.logprob) for _, found in logprobs],
            "top_logprobs": [self._top(token_id, found) for token_id, found in logprobs]
            if num_top
            else None,
            "text_offset": offsets,
        }

    def _top(self, token_id: int, found: TokenLogprob) -> dict[str, float]:
        tops = {
            self.text(top_id): finite(top)
            for top_id, top in zip(found.top_ids, found.top_logprobs, strict=True)
        }
        return {**tops, self.text(token_id): finite(found.logprob)}


def finite(logprob: float) -> float:
    """A logprob as JSON can hold it."""
    return logprob if math.isfinite(logprob) else LEAST_LOGPROB


class ChunkFormat:
    """Chunks of one stream: everything that stays the same is encoded once.

    `head` holds the fields that all chunks share; `with_usage` adds `usage` to each of them.
    """

    def __init__(self, head: dict[str, Any], *, with_usage: bool) -> None:
        self._prefix = to_json(head)[:-1] + b',"choices":['
        self._suffix = b'],"usage":null}' if with_usage else b"]}"
        self._last = to_json(head)[:-1] + b',"choices":[],"usage":'

    def chunk(self, choice_json: str) -> bytes:
        """A chunk with one choice, given as JSON text."""
        return self._prefix + choice_json.encode() + self._suffix

    def usage(self, usage: Usage) -> bytes:
        """The last chunk: no choices, but the usage."""
        return self._last + to_json(usage_json(usage)) + b"}"


def chat_delta(index: int, delta_json: str, logprobs_json: str = "null") -> str:
    """A chunk's choice with a delta, given as JSON text."""
    return (
        f'{{"index":{index},"delta":{{{delta_json}}},"logprobs":{logprobs_json},'
        '"finish_reason":null}'
    )


def chat_role(index: int) -> str:
    """The first chunk of a choice."""
    return (
        f'{{"index":{index},"delta":{{"role":"assistant","content":"","refusal":null}},'
        '"logprobs":null,"finish_reason":null}'
    )


def chat_finish(index: int, finish_reason: str, stop_reason: str | int | None) -> str:
    """The last chunk of a choice: an empty delta and the reason."""
    return (
        f'{{"index":{index},"delta":{{}},"logprobs":null,'
        f'"finish_reason":{json.dumps(finish_reason)},'
        f'"stop_reason":{json.dumps(stop_reason, ensure_ascii=False)}}}'
    )
