"""Chat Completions: events to chunks, or to one body."""

import json
from collections.abc import Sequence
from json.encoder import encode_basestring
from typing import Any

from finback.services.gateway.answer_events import ChoiceEvent, Usage
from finback.services.gateway.chat_message import AnswerMessage, call_begin_json, finish_of
from finback.services.gateway.chat_schema import ChatRequest
from finback.services.gateway.openai_answer import OpenAIAnswer
from finback.services.gateway.openai_format import (
    Spelling,
    chat_delta,
    chat_finish,
    chat_role,
    usage_json,
)
from finback.shared.codec.output import (
    CallArguments,
    CallBegin,
    OutputEvent,
    ReasoningPart,
    TextPart,
)


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
            echo=_echo(request),
        )
        self._with_logprobs = bool(request.logprobs)
        self._messages = [AnswerMessage() for _ in range(num_choices)]

    # -- streamed

    def chunks(self, events: Sequence[ChoiceEvent]) -> list[bytes]:
        """The documents of some events: role first, then deltas, the finish alone."""
        chunk = self._format.chunk
        documents = []
        for event in events:
            index, message = event.index, self._messages[event.index]
            if index not in self._begun:
                self._begun.add(index)
                documents.append(chunk(chat_role(index)))
            logprobs = self._logprobs_json(event)
            for part in event.parts:
                delta = self._delta(message, part)
                message.note(part)
                if delta:
                    documents.append(chunk(chat_delta(index, delta, logprobs)))
                    logprobs = "null"
            if logprobs != "null":
                documents.append(chunk(chat_delta(index, '"content":""', logprobs)))
            if event.finish_reason is not None:
                reason = finish_of(event.finish_reason, message)
                documents.append(chunk(chat_finish(index, reason, event.stop_reason)))
        return documents

    def _delta(self, message: AnswerMessage, part: OutputEvent) -> str:
        """The inside of a delta, as JSON; empty for an event that is none."""
        if isinstance(part, TextPart):
            return f'"content":{encode_basestring(part.text)}'
        if isinstance(part, ReasoningPart):
            return f'"reasoning_content":{encode_basestring(part.text)}'
        if isinstance(part, CallBegin):
            return f'"tool_calls":[{call_begin_json(part)}]'
        arguments = part.text if isinstance(part, CallArguments) else message.missing(part)
        if not arguments:
            return ""
        is_custom = message.calls[part.index].kind == "custom"
        kind, field = ("custom", "input") if is_custom else ("function", "arguments")
        inside = f'"{kind}":{{"{field}":{encode_basestring(arguments)}}}'
        return f'"tool_calls":[{{"index":{part.index},{inside}}}]'

    def _logprobs_json(self, event: ChoiceEvent) -> str:
        if not self._with_logprobs or not event.logprobs:
            return "null"
        entries = {"content": self._spelling.chat(event.logprobs), "refusal": None}
        return json.dumps(entries, ensure_ascii=False)

    # -- whole

    def add(self, events: Sequence[ChoiceEvent]) -> None:
        """Keep events for the body."""
        super().add(events)
        for event in events:
            for part in event.parts:
                self._messages[event.index].note(part)

    def body(self, usage: Usage) -> dict[str, Any]:
        """The whole answer."""
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [self._choice(index) for index in range(len(self._messages))],
            "usage": usage_json(usage),
        }

    def _choice(self, index: int) -> dict[str, Any]:
        end, message = self._ends[index], self._messages[index]
        logprobs = None
        if self._with_logprobs:
            logprobs = {"content": self._spelling.chat(self._logprobs[index]), "refusal": None}
        return {
            "index": index,
            "message": message.json(),
            "logprobs": logprobs,
            "finish_reason": finish_of(end.finish_reason or "stop", message),
            "stop_reason": end.stop_reason,
        }


def _echo(request: ChatRequest) -> dict[str, Any]:
    """What is said back. There is one tier of service, whichever was asked for."""
    tier = {"service_tier": "default"} if request.service_tier is not None else {}
    metadata = {"metadata": request.metadata} if request.metadata is not None else {}
    return {**tier, **metadata}
