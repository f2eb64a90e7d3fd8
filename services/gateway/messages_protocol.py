"""The Messages API: events to named stream events, or to one message.

Nothing is signed: thinking blocks carry an empty signature, and are accepted back with any.
"""

from collections.abc import Sequence
from json.encoder import encode_basestring
from typing import Any

from finback.services.gateway.answer_events import ChoiceEvent, Usage
from finback.services.gateway.error_envelope import error_document
from finback.services.gateway.messages_content import MessageContent
from finback.services.gateway.openai_format import to_json
from finback.shared.codec.output import (
    CallArguments,
    CallBegin,
    OutputEvent,
    ReasoningPart,
    TextPart,
)
from finback.shared.errors import ServingError

_PING = b'{"type":"ping"}'
_STOP = b'{"type":"message_stop"}'


class MessagesProtocol:
    """One request's answer. Every document begins with its type."""

    def __init__(
        self,
        *,
        message_id: str,
        model: str,
        num_prompt_tokens: int,
        is_capped: bool,
        shows_thinking: bool,
        request_id: str,
    ) -> None:
        """`is_capped`: the context ends before the limit that was asked for."""
        self._head: dict[str, Any] = {
            "id": message_id,
            "type": "message",
            "role": "assistant",
            "model": model,
        }
        self._num_prompt_tokens = num_prompt_tokens
        self._is_capped = is_capped
        self._shows_thinking = shows_thinking
        self._request_id = request_id
        self._content = MessageContent()
        self._end: ChoiceEvent | None = None
        # The block that is open in the stream: its number and kind.
        self._index = -1
        self._kind = ""

    # -- streamed

    def opening(self) -> list[bytes]:
        """The message without content. What a cache gave is known only at the end."""
        usage = usage_json(Usage(num_prompt_tokens=self._num_prompt_tokens))
        message = {**self._head, "content": [], **_ending(None, None), "usage": usage}
        return [_document("message_start", message=message)]

    def chunks(self, events: Sequence[ChoiceEvent]) -> list[bytes]:
        """The documents of some events."""
        documents: list[bytes] = []
        for event in events:
            for part in event.parts:
                self._add_part(part, documents)
            if event.finish_reason is not None:
                self._end = event
                self._close(documents)
        return documents

    def _add_part(self, part: OutputEvent, documents: list[bytes]) -> None:
        if isinstance(part, TextPart):
            self._open("text", {"type": "text", "text": ""}, documents)
            documents.append(self._delta("text_delta", "text", part.text))
        elif isinstance(part, ReasoningPart):
            block = {"type": "thinking", "thinking": "", "signature": ""}
            self._open("thinking", block, documents)
            if self._shows_thinking:
                documents.append(self._delta("thinking_delta", "thinking", part.text))
        elif isinstance(part, CallBegin):
            self._content.has_calls = True
            self._close(documents)
            call = {"type": "tool_use", "id": part.call_id, "name": part.name}
            self._open("tool_use", {**call, "input": {}}, documents)
        elif isinstance(part, CallArguments):
            documents.append(self._delta("input_json_delta", "partial_json", part.text))
        else:
            self._close(documents)

    def _open(self, kind: str, block: dict[str, Any], documents: list[bytes]) -> None:
        if self._kind == kind:
            return
        self._close(documents)
        self._index += 1
        self._kind = kind
        documents.append(_document("content_block_start", index=self._index, content_block=block))

    def _close(self, documents: list[bytes]) -> None:
        if not self._kind:
            return
        if self._kind == "thinking":
            documents.append(self._delta("signature_delta", "signature", ""))
        self._kind = ""
        documents.append(_document("content_block_stop", index=self._index))

    def _delta(self, kind: str, field: str, text: str) -> bytes:
        return (
            f'{{"type":"content_block_delta","index":{self._index},'
            f'"delta":{{"type":"{kind}","{field}":{encode_basestring(text)}}}}}'
        ).encode()

    def last_chunks(self, usage: Usage) -> list[bytes]:
        """Why it ended, the counts, the end."""
        delta = _ending(*self._reason())
        return [_document("message_delta", delta=delta, usage=usage_json(usage)), _STOP]

    def failure(self, error: ServingError) -> list[bytes]:
        """An `error` event."""
        return [error_document(error, "anthropic", request_id=self._request_id)]

    def ping(self) -> bytes:
        """A `ping` event."""
        return _PING

    # -- whole

    def add(self, events: Sequence[ChoiceEvent]) -> None:
        """Keep events for the body."""
        for event in events:
            for part in event.parts:
                self._content.note(part)
            if event.finish_reason is not None:
                self._end = event

    def body(self, usage: Usage) -> dict[str, Any]:
        """The whole message."""
        content = self._content.blocks(shows_thinking=self._shows_thinking)
        ending = _ending(*self._reason())
        return {**self._head, "content": content, **ending, "usage": usage_json(usage)}

    def _reason(self) -> tuple[str, str | None]:
        """`stop_reason` and the stop sequence that was found."""
        end = self._end
        if end is None or end.finish_reason == "length":
            return ("model_context_window_exceeded" if self._is_capped else "max_tokens"), None
        if isinstance(end.stop_reason, str):
            return "stop_sequence", end.stop_reason
        return ("tool_use" if self._content.has_calls else "end_turn"), None


def _ending(reason: str | None, sequence: str | None) -> dict[str, Any]:
    return {"stop_reason": reason, "stop_sequence": sequence, "stop_details": None}


def usage_json(usage: Usage) -> dict[str, Any]:
    """Anthropic's usage: the prompt is the sum of the three input figures."""
    return {
        "input_tokens": usage.num_prompt_tokens - usage.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.num_cached_tokens,
        "output_tokens": usage.num_completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.num_reasoning_tokens},
        "service_tier": "standard",
    }


def _document(kind: str, **fields: Any) -> bytes:
    return to_json({"type": kind, **fields})
