"""The content blocks of a message, as its parts come."""

from dataclasses import dataclass, field
from typing import Any, Final

from finback.shared.codec.output import (
    CallArguments,
    CallBegin,
    OutputEvent,
    ReasoningPart,
    TextPart,
)
from finback.shared.codec.strict_json import loads_strictly

# Arguments that were cut off are no object; they are given under the name that Anthropic proposes.
INVALID: Final = "INVALID_JSON"


@dataclass(slots=True)
class _Block:
    """`head`: what is known when it begins; `pieces`: its text, thoughts or arguments."""

    head: dict[str, Any]
    pieces: list[str] = field(default_factory=list)


class MessageContent:
    """What the model has said so far."""

    def __init__(self) -> None:
        self.has_calls = False
        self._blocks: list[_Block] = []

    def note(self, part: OutputEvent) -> None:
        """Keep one more part; texts in a row are one block."""
        if isinstance(part, TextPart):
            self._block("text").pieces.append(part.text)
        elif isinstance(part, ReasoningPart):
            self._block("thinking").pieces.append(part.text)
        elif isinstance(part, CallBegin):
            self.has_calls = True
            head = {"type": "tool_use", "id": part.call_id, "name": part.name}
            self._blocks.append(_Block(head))
        elif isinstance(part, CallArguments):
            self._blocks[-1].pieces.append(part.text)

    def _block(self, kind: str) -> _Block:
        if not self._blocks or self._blocks[-1].head["type"] != kind:
            self._blocks.append(_Block({"type": kind}))
        return self._blocks[-1]

    def blocks(self, *, shows_thinking: bool) -> list[dict[str, Any]]:
        """The blocks in Anthropic's form."""
        return [_json(block, shows_thinking=shows_thinking) for block in self._blocks]


def _json(block: _Block, *, shows_thinking: bool) -> dict[str, Any]:
    text, kind = "".join(block.pieces), block.head["type"]
    if kind == "text":
        return {**block.head, "text": text}
    if kind == "thinking":
        return {**block.head, "thinking": text if shows_thinking else "", "signature": ""}
    return {**block.head, "input": input_of(text)}


def input_of(arguments: str) -> dict[str, Any]:
    """The object that arguments are, as JSON text."""
    if not arguments.strip():
        return {}
    try:
        found = loads_strictly(arguments)
    except ValueError:
        return {INVALID: arguments}
    return found if isinstance(found, dict) else {INVALID: arguments}
