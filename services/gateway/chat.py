"""Chat Completions: events to chunks, or to one body."""

from collections.abc import Sequence
from typing import Any

from finback.services.gateway.answer import ChoiceEvent, Usage
from finback.services.gateway.openai_answer import OpenAIAnswer
from finback.services.gateway.openai_format import (
    Spelling,
    chat_delta,
    chat_finish,
    chat_role,
    usage_json,
)
from finback.services.gateway.schema import ChatRequest


class ChatProtocol(OpenAIAnswer):
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
        super().__init__(
            answer_id=f"chatcmpl-{request_id}",
            kind="chat.completion.chunk",
            model=model,
            fingerprint=fingerprint,
            spelling=spelling,
            stream_options=request.stream_options,
            num_choices=num_choices,
        )
        self._with_logprobs = bool(request.logprobs)

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

    # -- whole

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
