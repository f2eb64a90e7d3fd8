"""What the answers of both OpenAI completion APIs share: the head, kept events, the usage chunk."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from finback.services.gateway.answer_events import ChoiceEvent, Usage
from finback.services.gateway.error_envelope import error_document
from finback.services.gateway.openai_format import ChunkFormat, Spelling
from finback.services.gateway.schema import StreamOptions
from finback.shared.errors import ServingError
from finback.shared.wire.messages.generate import TokenLogprob


class OpenAIAnswer:
    """One request's answer; a subclass knows the shapes of its chunks and of its body."""

    def __init__(
        self,
        *,
        answer_id: str,
        kind: str,
        model: str,
        fingerprint: str,
        spelling: Spelling,
        stream_options: StreamOptions | None,
        num_choices: int,
        echo: Mapping[str, Any] | None = None,
    ) -> None:
        """`kind` is the `object` of a chunk. `echo`: fields of the request to say back."""
        self._spelling = spelling
        self._wants_usage = bool(stream_options is not None and stream_options.include_usage)
        self._head: dict[str, Any] = {
            "id": answer_id,
            "object": kind,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
            **(echo or {}),
        }
        self._format = ChunkFormat(self._head, with_usage=self._wants_usage)
        self._begun: set[int] = set()
        self._parts: list[list[str]] = [[] for _ in range(num_choices)]
        self._logprobs: list[list[tuple[int, TokenLogprob]]] = [[] for _ in range(num_choices)]
        self._ends: dict[int, ChoiceEvent] = {}

    def opening(self) -> list[bytes]:
        """Nothing: each choice begins with a chunk of its own."""
        return []

    def failure(self, error: ServingError) -> list[bytes]:
        """The error's document is a record of the stream."""
        return [error_document(error)]

    def ping(self) -> None:
        """A comment is enough."""

    def last_chunks(self, usage: Usage) -> list[bytes]:
        """What follows the last choice's finish."""
        return [self._format.usage(usage)] if self._wants_usage else []

    def add(self, events: Sequence[ChoiceEvent]) -> None:
        """Keep events for the body."""
        for event in events:
            self._parts[event.index].append(event.text)
            self._logprobs[event.index].extend(event.logprobs)
            if event.finish_reason is not None:
                self._ends[event.index] = event
