"""Items to the turns of a conversation: what the model is shown of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from finback.services.gateway.store_limits import Item
from finback.shared.codec.dialogue import ToolCall, Turn
from finback.shared.errors import InvalidRequest

Unseal = Callable[[str], str]


@dataclass(slots=True)
class _Assistant:
    """An assistant turn that is being gathered from reasoning, text and calls."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    @property
    def has_answer(self) -> bool:
        return bool(self.content or self.calls)

    def turn(self) -> Turn:
        return Turn(
            role="assistant",
            content="".join(self.content),
            reasoning="\n".join(self.reasoning),
            tool_calls=tuple(self.calls),
        )


def turns_of(items: Sequence[Item], *, instructions: str | None, unseal: Unseal) -> list[Turn]:
    """The turns. Every call must have its output before the next turn, and every output its call.

    Reasoning, one message and the calls that follow each other are one assistant turn.
    """
    turns = [Turn(role="system", content=instructions)] if instructions else []
    pending: _Assistant | None = None
    names: dict[str, str] = {}
    missing: dict[str, None] = {}
    for item in items:
        kind = item["type"]
        if kind in ("function_call_output", "custom_tool_call_output"):
            if pending is not None:
                turns.append(pending.turn())
                pending = None
            turns.append(_tool_turn(item, names))
            missing.pop(item["call_id"], None)
            continue
        if kind == "message" and item["role"] != "assistant":
            if pending is not None:
                turns.append(pending.turn())
                pending = None
            _check_answered(missing)
            turns.append(_said(item))
            continue
        if pending is not None and _begins_anew(pending, item):
            turns.append(pending.turn())
            pending = None
        pending = pending or _Assistant()
        _gather(pending, item, unseal)
        if kind in ("function_call", "custom_tool_call"):
            names[item["call_id"]] = item["name"]
            missing[item["call_id"]] = None
    if pending is not None:
        turns.append(pending.turn())
    _check_answered(missing)
    if not turns:
        raise InvalidRequest(
            "there is nothing to answer: give input or instructions",
            param="input",
            reason="missing_required_parameter",
        )
    return turns


def _begins_anew(pending: _Assistant, item: Item) -> bool:
    """Whether an assistant item cannot belong to the turn that is being gathered."""
    if item["type"] == "message":
        return bool(pending.content)
    return bool(item["type"] == "reasoning" and pending.has_answer)


def _gather(pending: _Assistant, item: Item, unseal: Unseal) -> None:
    kind = item["type"]
    if kind == "message":
        pending.content.append(_joined(item["content"]))
    elif kind == "reasoning":
        pending.reasoning.append(_thought(item, unseal))
    else:
        is_custom = kind == "custom_tool_call"
        pending.calls.append(
            ToolCall(
                call_id=item["call_id"],
                name=item["name"],
                arguments=item["input"] if is_custom else item["arguments"],
                kind="custom" if is_custom else "function",
            )
        )


def _thought(item: Item, unseal: Unseal) -> str:
    if not item.get("content") and item.get("encrypted_content"):
        return unseal(item["encrypted_content"])
    return "".join(part["text"] for part in item.get("content") or ())


def _said(item: Item) -> Turn:
    content = _joined(item["content"])
    if item["role"] == "user":
        return Turn(role="user", content=content)
    return Turn(role="system", content=content)  # a developer's too


def _tool_turn(item: Item, names: dict[str, str]) -> Turn:
    call_id, output = item["call_id"], item["output"]
    if call_id not in names:
        raise InvalidRequest(
            f"No tool call found for function call output with call_id {call_id}.",
            param="input",
            reason="invalid_value",
        )
    text = output if isinstance(output, str) else _joined(output)
    return Turn(role="tool", content=text, call_id=call_id, name=names[call_id])


def _check_answered(missing: dict[str, None]) -> None:
    if missing:
        raise InvalidRequest(
            f"No tool output found for function call {next(iter(missing))}.",
            param="input",
            reason="invalid_value",
        )


def _joined(parts: Sequence[dict[str, Any]]) -> str:
    return "".join(part.get("text") or part.get("refusal") or "" for part in parts)
