"""Output items while they are built up, and the numbering of a stream's events."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from finback.services.gateway.openai_format import to_json
from finback.services.gateway.responses_items import new_id
from finback.services.gateway.store_limits import Item
from finback.shared.codec.dialogue import ToolKind

Logprob = dict[str, Any]


class Numbering:
    """Makes documents with rising sequence numbers; `begin` is the first one's."""

    def __init__(self, begin: int = 0) -> None:
        self.next = begin

    def document(self, kind: str, **fields: Any) -> bytes:
        """One event."""
        return to_json({"type": kind, "sequence_number": self.take(), **fields})

    def take(self) -> int:
        """The next number, for a document that is made elsewhere."""
        number, self.next = self.next, self.next + 1
        return number


@dataclass(slots=True)
class Message:
    """What the user is shown."""

    item_id: str = field(default_factory=lambda: new_id("msg"))
    texts: list[str] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)

    def part(self) -> dict[str, Any]:
        """The part as it is so far."""
        text = "".join(self.texts)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self.logprobs}

    def item(self, status: str) -> Item:
        """The item as it is so far."""
        return {
            "id": self.item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [] if status == "in_progress" else [self.part()],
        }


@dataclass(slots=True)
class Reasoning:
    """A thought; `seal` makes its `encrypted_content`, None: not asked for."""

    seal: Callable[[str], str] | None
    item_id: str = field(default_factory=lambda: new_id("rs"))
    texts: list[str] = field(default_factory=list)

    def part(self) -> dict[str, Any]:
        """The part as it is so far."""
        return {"type": "reasoning_text", "text": "".join(self.texts)}

    def item(self, status: str) -> Item:
        """The item as it is so far."""
        is_new = status == "in_progress"
        item: Item = {
            "id": self.item_id,
            "type": "reasoning",
            "status": status,
            "summary": [],
            "content": [] if is_new else [self.part()],
        }
        if self.seal is not None and not is_new:
            item["encrypted_content"] = self.seal("".join(self.texts))
        return item


@dataclass(slots=True)
class Call:
    """A call of a function or of a custom tool."""

    index: int
    call_id: str
    name: str
    kind: ToolKind
    item_id: str
    texts: list[str] = field(default_factory=list)

    @property
    def event(self) -> str:
        """What its events are called."""
        is_custom = self.kind == "custom"
        return "custom_tool_call_input" if is_custom else "function_call_arguments"

    def text(self) -> str:
        """The arguments, or the input."""
        return "".join(self.texts)

    def item(self, status: str) -> Item:
        """The item as it is so far."""
        is_custom = self.kind == "custom"
        return {
            "id": self.item_id,
            "type": "custom_tool_call" if is_custom else "function_call",
            "status": status,
            "call_id": self.call_id,
            "name": self.name,
            "input" if is_custom else "arguments": self.text(),
        }
