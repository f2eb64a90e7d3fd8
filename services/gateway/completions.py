"""Text Completions: events to chunks, or to one body. `echo` puts the prompt before the answer."""

import json
from collections.abc import Sequence
from json.encoder import encode_basestring
from typing import Any

from finback.services.gateway.answer_events import ChoiceEvent, Usage
from finback.services.gateway.openai_answer import OpenAIAnswer
from finback.services.gateway.openai_format import Spelling, usage_json
from finback.services.gateway.schema import CompletionRequest
from finback.shared.wire.messages.generate import TokenLogprob


class CompletionProtocol(OpenAIAnswer):
    """One request's answer in the shape of `text_completion`.

    `echoes[i]`: the text to put before choice i, empty without `echo`. `has_token_ids`: choices
    tell their ids.
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
        has_token_ids: bool = False,
    ) -> None:
        super().__init__(
            answer_id=f"cmpl-{request_id}",
            kind="text_completion",
            model=model,
            fingerprint=fingerprint,
            spelling=spelling,
            stream_options=request.stream_options,
            num_choices=len(echoes),
        )
        self._num_top = request.logprobs
        self._has_ids = has_token_ids
        self._token_ids: list[list[int]] = [[] for _ in echoes]
        self._echoes = echoes
        self._offsets = [0] * len(echoes)

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
                documents.append(chunk(self._delta(event.index, echo, (), ())))
            if event.text or event.logprobs or event.token_ids:
                delta = self._delta(event.index, event.text, event.logprobs, event.token_ids)
                documents.append(chunk(delta))
            if event.finish_reason is not None:
                documents.append(chunk(_finish(event)))
        return documents

    def _delta(
        self,
        index: int,
        text: str,
        logprobs: Sequence[tuple[int, TokenLogprob]],
        token_ids: Sequence[int],
    ) -> str:
        told = "null"
        if self._num_top is not None:
            found = self._spelling.completion(logprobs, self._num_top, self._offsets[index])
            told = json.dumps(found, ensure_ascii=False)
        self._offsets[index] += len(text)
        ids = f'"token_ids":{json.dumps(list(token_ids))},' if self._has_ids else ""
        return (
            f'{{"index":{index},"text":{encode_basestring(text)},"logprobs":{told},{ids}'
            '"finish_reason":null}'
        )

    # -- whole

    def add(self, events: Sequence[ChoiceEvent]) -> None:
        super().add(events)
        for event in events:
            self._token_ids[event.index].extend(event.token_ids)

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
            **({"token_ids": self._token_ids[index]} if self._has_ids else {}),
        }


def _finish(event: ChoiceEvent) -> str:
    return (
        f'{{"index":{event.index},"text":"","logprobs":null,'
        f'"finish_reason":{json.dumps(event.finish_reason)},'
        f'"stop_reason":{json.dumps(event.stop_reason, ensure_ascii=False)}}}'
    )
