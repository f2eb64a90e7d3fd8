"""The messages of a Messages request as turns of a conversation."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from finback.services.gateway.chat_turns import PART_JOIN
from finback.services.gateway.messages_blocks import (
    Block,
    call_in,
    result_in,
    text_in,
    thought_in,
    type_of,
)
from finback.services.gateway.messages_schema import MessageParam
from finback.services.gateway.tool_rules import invalid_value
from finback.shared.codec.dialogue import ToolCall, Turn
from finback.shared.errors import InvalidRequest

MESSAGE_JOIN = "\n\n"


@dataclass(slots=True)
class _Group:
    """Messages of one role in a row: (where, blocks) of each."""

    role: str
    messages: list[tuple[str, list[tuple[str, Block]]]] = field(default_factory=list)


def system_turns(system: str | Sequence[Block] | None) -> tuple[Turn, ...]:
    """The system prompt; several blocks all count."""
    if isinstance(system, str) or system is None:
        return (Turn(role="system", content=system),) if system else ()
    return _system([(f"system.{at}", block) for at, block in enumerate(system)])


def message_turns(messages: Sequence[MessageParam]) -> tuple[Turn, ...]:
    """The turns. Calls must be answered in the next message, and only calls may be."""
    turns: list[Turn] = []
    calls: tuple[ToolCall, ...] = ()
    groups = _groups(messages)
    for at, group in enumerate(groups):
        if group.role == "system":
            turns.extend(_system([b for _, blocks in group.messages for b in blocks]))
            continue
        if group.role == "user":
            turns.extend(_user(group, calls))
            calls = ()
            continue
        if calls:
            raise _unanswered(group.messages[0][0], [call.call_id for call in calls])
        is_last = at == len(groups) - 1
        turn = _assistant(group, is_last=is_last)
        calls = turn.tool_calls
        if turn.content or calls or turn.reasoning:
            turns.append(turn)
    if calls:
        raise _unanswered("messages", [call.call_id for call in calls])
    return tuple(turns)


def _groups(messages: Sequence[MessageParam]) -> list[_Group]:
    groups: list[_Group] = []
    last = len(messages) - 1
    for at, message in enumerate(messages):
        param = f"messages.{at}"
        if not message.content and not (message.role == "assistant" and at == last):
            raise InvalidRequest(
                f"{param}: all messages must have non-empty content except for the optional final "
                "assistant message",
                param=f"{param}.content",
            )
        if not groups or groups[-1].role != message.role:
            groups.append(_Group(message.role))
        groups[-1].messages.append((param, _blocks(message.content, f"{param}.content")))
    return groups


def _blocks(content: str | Sequence[Block], param: str) -> list[tuple[str, Block]]:
    if isinstance(content, str):
        return [(param, {"type": "text", "text": content})] if content else []
    return [(f"{param}.{at}", block) for at, block in enumerate(content)]


def _system(blocks: Sequence[tuple[str, Block]]) -> tuple[Turn, ...]:
    texts = []
    for param, block in blocks:
        type_of(block, param, "system")
        texts.append(text_in(block, param))
    return (Turn(role="system", content=PART_JOIN.join(texts)),) if texts else ()


def _user(group: _Group, calls: Sequence[ToolCall]) -> Iterator[Turn]:
    names = {call.call_id: call.name for call in calls}
    answered: set[str] = set()
    texts: list[str] = []
    for where, blocks in group.messages:
        own: list[str] = []
        for param, block in blocks:
            if type_of(block, param, "user") == "text":
                own.append(text_in(block, param))
                continue
            call_id, text = result_in(block, param)
            _check_result(call_id, param, names, answered)
            if texts or own:
                raise invalid_value(param, "before any text: results come first in a message")
            answered.add(call_id)
            yield Turn(role="tool", content=text, call_id=call_id, name=names[call_id])
        if own:
            texts.append(PART_JOIN.join(own))
        is_over = own or where == group.messages[-1][0]
        if is_over and len(answered) < len(names):
            raise _unanswered(where, [call_id for call_id in names if call_id not in answered])
    if texts:
        yield Turn(role="user", content=MESSAGE_JOIN.join(texts))


def _check_result(call_id: str, param: str, names: dict[str, str], answered: set[str]) -> None:
    if call_id not in names:
        raise InvalidRequest(
            f"{param}: unexpected `tool_use_id` found in `tool_result` blocks: {call_id[:64]}. Each "
            "`tool_result` block must have a corresponding `tool_use` block in the previous message.",
            param=f"{param}.tool_use_id",
        )
    if call_id in answered:
        raise invalid_value(f"{param}.tool_use_id", "a call that has no result yet")


def _unanswered(where: str, ids: Sequence[str]) -> InvalidRequest:
    return InvalidRequest(
        f"{where}: `tool_use` ids were found without `tool_result` blocks immediately after: "
        f"{', '.join(ids[:8])}. Each `tool_use` block must have a corresponding `tool_result` block "
        "in the next message.",
        param=where,
    )


def _assistant(group: _Group, *, is_last: bool) -> Turn:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    ids: set[str] = set()
    for _, blocks in group.messages:
        own: list[str] = []
        for param, block in blocks:
            kind = type_of(block, param, "assistant")
            if kind == "text":
                own.append(text_in(block, param))
            elif kind == "thinking":
                thoughts.append(thought_in(block, param))
            elif kind == "tool_use":
                calls.append(call_in(block, param))
                if calls[-1].call_id in ids:
                    raise invalid_value(f"{param}.id", "an id that no other call has")
                ids.add(calls[-1].call_id)
        # What one answer said around its calls is one text.
        texts.extend(["".join(own)] if own else [])
    content = MESSAGE_JOIN.join(texts)
    if is_last and not calls and content != content.rstrip():
        raise InvalidRequest(
            "messages: final assistant content cannot end with trailing whitespace",
            param="messages",
        )
    return Turn(
        role="assistant", content=content, reasoning="".join(thoughts), tool_calls=tuple(calls)
    )
