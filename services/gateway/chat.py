"""Chat Completions: events to chunks, or to one body."""

import time
from collections.abc import Sequence
from typing import Any

from finback.services.gateway.answer import ChoiceEvent, Usage
from finback.services.gateway.openai_format import (
    ChunkFormat,
    Spelling,
    chat_delta,
    chat_finish,
    chat_role,
    usage_json,
)
from finback.services.gateway.schema import ChatRequest
from finback.shared.wire.messages.generate import TokenLogprob


class ChatProtocol:
    """One request's answer in the shapes of `chat.completion` and `chat.completion.chunk`."""

    def __init__(
        self,
        request: ChatRequest,
        *,
        request_id: str,
        model: str,
        fingerprint: str,
        spelling: Spelling,
        num_choices: int,
    ) -> None:
        self._spelling = spelling
        self._with_logprobs = bool(request.logprobs)
        options = request.stream_options
        self._wants_usage = bool(options is not None and options.include_usage)
        self._head: dict[str, Any] = {
            "id": f"chatcmpl-{request_id}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._format = ChunkFormat(self._head, with_usage=self._wants_usage)
        self._begun: set[int] = set()
        self._parts: list[list[str]] = [[] for _ in range(num_choices)]
        self._logprobs: list[list[tuple[int, TokenLogprob]]] = [[] for _ in range(num_choices)]
        self._ends: dict[int, ChoiceEvent] = {}

    # -- streamed

    def chunks(self, events: Sequence[ChoiceEvent]) -> list[bytes]:
        """The documents of some events: role first, then deltas, the finish alone."""
        chunk = self._format.chunk
        documents = []
        for event in events:
            if event.index not in self._begun:
                self._begun.add(event.index)
                documents.append(chunk(chat_role(event.index)))
            if event.text or event.logprobs:
                delta = chat_delta(event, self._spelling, with_logprobs=self._with_logprobs)
                documents.append(chunk(delta))
            if event.finish_reason is not None:
                documents.append(chunk(chat_finish(event)))
        return documents

    def last_chunks(self, usage: Usage) -> list[bytes]:
        """What follows the last choice's finish."""
        return [self._format.usage(usage)] if self._wants_usage else []

    # -- whole

    def add(self, events: Sequence[ChoiceEvent]) -> None:
        """Keep events for the body."""
        for event in events:
            self._parts[event.index].append(event.text)
            self._logprobs[event.index].extend(event.logprobs)
            if event.finish_reason is not None:
                self._ends[event.index] = event

    def restart(self, index: int) -> None:
        """A choice starts over: nothing of it was sent."""
        self._parts[index].clear()
        self._logprobs[index].clear()

    def body(self, usage: Usage) -> dict[str, Any]:
        """The whole answer."""
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [self._choice(index) for index in range(len(self._parts))],
            "usage": usage_json(usage),
        }

    def _choice(self, index: int) -> dict[str, Any]:
        end = self._ends[index]
        logprobs = None
        if self._with_logprobs:
            logprobs = {"content": self._spelling.chat(self._logprobs[index]), "refusal": None}
        message: dict[str, Any] = {
            "role": "assistant",
            "content": "".join(self._parts[index]),
            "refusal": None,
            "annotations": [],
        }
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": end.finish_reason,
            "stop_reason": end.stop_reason,
        }
