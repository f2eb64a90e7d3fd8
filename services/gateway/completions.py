"""Text Completions: events to chunks, or to one body. `echo` puts the prompt before the answer."""

import json
import time
from collections.abc import Sequence
from json.encoder import encode_basestring
from typing import Any

from finback.services.gateway.answer import ChoiceEvent, Usage
from finback.services.gateway.openai_format import ChunkFormat, Spelling, usage_json
from finback.services.gateway.schema import CompletionRequest
from finback.shared.wire.messages.generate import TokenLogprob


class CompletionProtocol:
    """One request's answer in the shape of `text_completion`.

    `echoes[i]`: the text to put before choice i, empty without `echo`.
    """

    def __init__(
        self,
        request: CompletionRequest,
        *,
        request_id: str,
        model: str,
        fingerprint: str,
        spelling: Spelling,
        echoes: Sequence[str],
    ) -> None:
        self._spelling = spelling
        self._num_top = request.logprobs
        options = request.stream_options
        self._wants_usage = bool(options is not None and options.include_usage)
        self._head: dict[str, Any] = {
            "id": f"cmpl-{request_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._format = ChunkFormat(self._head, with_usage=self._wants_usage)
        self._echoes = echoes
        self._offsets = [0] * len(echoes)
        self._begun: set[int] = set()
        self._parts: list[list[str]] = [[] for _ in echoes]
        self._logprobs: list[list[tuple[int, TokenLogprob]]] = [[] for _ in echoes]
        self._ends: dict[int, ChoiceEvent] = {}

    # -- streamed

    def chunks(self, events: Sequence[ChoiceEvent]) -> list[bytes]:
        """The documents of some events: text, then the finish alone."""
        chunk = self._format.chunk
        documents = []
        for event in events:
            echo = ""
            if event.index not in self._begun:
                self._begun.add(event.index)
                echo = self._echoes[event.index]
            if echo:
                documents.append(chunk(self._delta(event.index, echo, ())))
            if event.text or event.logprobs:
                documents.append(chunk(self._delta(event.index, event.text, event.logprobs)))
            if event.finish_reason is not None:
                documents.append(chunk(_finish(event)))
        return documents

    def _delta(self, index: int, text: str, logprobs: Sequence[tuple[int, TokenLogprob]]) -> str:
        told = "null"
        if self._num_top is not None:
            found = self._spelling.completion(logprobs, self._num_top, self._offsets[index])
            told = json.dumps(found, ensure_ascii=False)
        self._offsets[index] += len(text)
        return (
            f'{{"index":{index},"text":{encode_basestring(text)},"logprobs":{told},'
            '"finish_reason":null}'
        )

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
        choices = [self._choice(index) for index in range(len(self._parts))]
        return {**self._head, "choices": choices, "usage": usage_json(usage)}

    def _choice(self, index: int) -> dict[str, Any]:
        end, echo = self._ends[index], self._echoes[index]
        logprobs = None
        if self._num_top is not None:
            kept = self._logprobs[index]
            logprobs = self._spelling.completion(kept, self._num_top, len(echo))
        return {
            "index": index,
            "text": echo + "".join(self._parts[index]),
            "logprobs": logprobs,
            "finish_reason": end.finish_reason,
            "stop_reason": end.stop_reason,
        }


def _finish(event: ChoiceEvent) -> str:
    return (
        f'{{"index":{event.index},"text":"","logprobs":null,'
        f'"finish_reason":{json.dumps(event.finish_reason)},'
        f'"stop_reason":{json.dumps(event.stop_reason, ensure_ascii=False)}}}'
    )
