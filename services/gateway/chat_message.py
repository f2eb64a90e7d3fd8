"""The assistant's message of a chat completion, as its parts come."""

from dataclasses import dataclass, field
from typing import Any

from finback.services.gateway.openai_format import to_json
from finback.shared.codec.dialogue import ToolKind
from finback.shared.codec.output import (
    CallArguments,
    CallBegin,
    CallEnd,
    OutputEvent,
    ReasoningPart,
    TextPart,
)


@dataclass(slots=True)
class AnswerCall:
    """A call that the model makes."""

    call_id: str
    name: str
    kind: ToolKind
    arguments: list[str] = field(default_factory=list)

    def json(self) -> dict[str, Any]:
        """In OpenAI's form."""
        text = "".join(self.arguments)
        if self.kind == "custom":
            inside = {"custom": {"name": self.name, "input": text}}
        else:
            inside = {"function": {"name": self.name, "arguments": text}}
        return {"id": self.call_id, "type": self.kind, **inside}


@dataclass(slots=True)
class AnswerMessage:
    """What one choice has said so far."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[AnswerCall] = field(default_factory=list)

    def note(self, part: OutputEvent) -> None:
        """Keep one more part."""
        match part:
            case TextPart(text):
                self.content.append(text)
            case ReasoningPart(text):
                self.reasoning.append(text)
            case CallBegin():
                self.calls.append(AnswerCall(part.call_id, part.name, part.kind))
            case CallArguments(index, text):
                self.calls[index].arguments.append(text)
            case CallEnd(index):
                self.calls[index].arguments.append(self.missing(part))

    def missing(self, end: CallEnd) -> str:
        """What a complete call lacks to be JSON: a function without arguments gets no object."""
        call = self.calls[end.index]
        return "{}" if end.is_complete and call.kind == "function" and not call.arguments else ""

    def json(self) -> dict[str, Any]:
        """The message; content is null where there is only a call."""
        text = "".join(self.content)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": text if text or not self.calls else None,
            "refusal": None,
            "annotations": [],
        }
        if self.reasoning:
            message["reasoning_content"] = "".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = [call.json() for call in self.calls]
        return message


def call_begin_json(part: CallBegin) -> str:
    """The first delta of a call: who it is, no arguments yet."""
    inside = {"name": part.name, ("input" if part.kind == "custom" else "arguments"): ""}
    first = {"index": part.index, "id": part.call_id, "type": part.kind, part.kind: inside}
    return to_json(first).decode()


def finish_of(reason: str, message: AnswerMessage) -> str:
    """`tool_calls` where a turn ended with calls; a cut one stays cut."""
    return "tool_calls" if reason == "stop" and message.calls else reason
