"""The messages of a chat request as turns of a conversation, each checked by its role."""

from collections.abc import Sequence
from typing import Final

from finback.services.gateway.chat_schema import ChatMessage, ContentPart, MessageToolCall
from finback.services.gateway.known_fields import CACHE_HINTS, check_fields
from finback.services.gateway.tool_rules import invalid_value, missing, unsupported
from finback.shared.codec.dialogue import ToolCall, Turn
from finback.shared.errors import InvalidRequest

# Between the text parts of one message; all APIs join alike, so that prompts are the same.
PART_JOIN: Final = "\n"
_OTHER_PARTS: Final = {
    "image_url": "images are not supported by this model",
    "input_audio": "audio is not supported by this model",
    "file": "files are not supported by this model",
    "video_url": "videos are not supported by this model",
}


def turns_of(messages: Sequence[ChatMessage]) -> tuple[Turn, ...]:
    """The turns. Results must answer calls, and calls must be answered, as OpenAI demands it."""
    turns: list[Turn] = []
    waiting: dict[str, str] = {}  # calls of the last assistant message: id to name
    answered: set[str] = set()
    for at, message in enumerate(messages):
        param = f"messages.{at}"
        if message.role == "tool":
            turns.append(_result(message, param, waiting, answered))
            continue
        _check_answered(waiting, answered, at)
        turn = _turn(message, param)
        waiting = {call.call_id: call.name for call in turn.tool_calls}
        if len(waiting) < len(turn.tool_calls):
            raise invalid_value(f"{param}.tool_calls", "calls with an id of their own each")
        answered = set()
        turns.append(turn)
    _check_answered(waiting, answered, len(messages))
    return tuple(turns)


def _check_answered(waiting: dict[str, str], answered: set[str], at: int) -> None:
    open_ids = [call_id for call_id in waiting if call_id not in answered]
    if open_ids:
        raise InvalidRequest(
            "An assistant message with 'tool_calls' must be followed by tool messages responding "
            "to each 'tool_call_id'. These have no response: " + ", ".join(open_ids[:8]),
            param=f"messages.{at}" if at else "messages",
            reason="missing_tool_results",
        )


def _result(message: ChatMessage, param: str, waiting: dict[str, str], answered: set[str]) -> Turn:
    call_id = message.tool_call_id
    if call_id is None:
        raise missing(f"{param}.tool_call_id")
    if call_id not in waiting:
        raise InvalidRequest(
            "messages with role 'tool' must be a response to a call in the preceding message with "
            f"'tool_calls'; there is no call '{call_id[:64]}'",
            param=f"{param}.tool_call_id",
            reason="invalid_value",
        )
    if call_id in answered:
        raise invalid_value(f"{param}.tool_call_id", "a call that has no response yet")
    answered.add(call_id)
    content = _needed_text(message, param)
    return Turn(role="tool", content=content, call_id=call_id, name=waiting[call_id])


def _turn(message: ChatMessage, param: str) -> Turn:
    if message.role == "function" or message.function_call is not None:
        field = "role" if message.role == "function" else "function_call"
        raise unsupported(f"{param}.{field}", "functions were replaced by tools: use tool_calls")
    if message.role != "assistant":
        if message.tool_calls:
            raise invalid_value(f"{param}.tool_calls", "absent: only the assistant calls tools")
        is_user = message.role == "user"
        return Turn(role="user" if is_user else "system", content=_needed_text(message, param))
    if message.audio is not None:
        raise unsupported(f"{param}.audio", "audio is not supported by this model")
    content = _text(message, param)
    return Turn(
        role="assistant",
        content=content or message.refusal or "",
        reasoning=message.reasoning_content or message.reasoning or "",
        tool_calls=tuple(
            _call(call, f"{param}.tool_calls.{at}")
            for at, call in enumerate(message.tool_calls or ())
        ),
    )


def _call(call: MessageToolCall, param: str) -> ToolCall:
    if call.type == "custom":
        if call.custom is None:
            raise missing(f"{param}.custom")
        name, text = call.custom.name, call.custom.input
        return ToolCall(call_id=call.id, name=name, arguments=text, kind="custom")
    if call.function is None:
        raise missing(f"{param}.function")
    return ToolCall(call_id=call.id, name=call.function.name, arguments=call.function.arguments)


def _needed_text(message: ChatMessage, param: str) -> str:
    if message.content is None:
        raise missing(f"{param}.content")
    return _text(message, param)


def _text(message: ChatMessage, param: str) -> str:
    content = message.content
    if content is None or isinstance(content, str):
        return content or ""
    if not content:
        raise invalid_value(f"{param}.content", "a non-empty list of parts, or a string")
    is_assistant = message.role == "assistant"
    return PART_JOIN.join(
        _part_text(part, f"{param}.content.{at}", is_assistant=is_assistant)
        for at, part in enumerate(content)
    )


def _part_text(part: ContentPart, param: str, *, is_assistant: bool) -> str:
    if part.type == "refusal" and is_assistant:
        check_fields(part.model_dump(), ("type", "refusal"), param)
        if part.refusal is None:
            raise missing(f"{param}.refusal")
        return part.refusal
    if part.type != "text":
        text = _OTHER_PARTS.get(part.type, f"parts of type '{part.type[:40]}' are not supported")
        raise unsupported(f"{param}.type", text)
    check_fields(part.model_dump(), CACHE_HINTS | {"type", "text"}, param)
    if part.text is None:
        raise missing(f"{param}.text")
    return part.text
