"""A conversation to the pieces of a prompt: plain text stretches and control tokens.

Before the template sees them, `developer` becomes `system`, text parts become one string. A final
assistant message can be left open, so that the model continues it.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from finback.shared.codec.chat_template import ChatTemplate
from finback.shared.codec.control_tokens import (
    ControlToken,
    ControlTokens,
    map_strings,
    strings_in,
    unused_marks,
)
from finback.shared.errors import InvalidRequest

Message = Mapping[str, Any]


class ConversationRenderer:
    """Renders with the injection check that a template which inspects its input needs."""

    def __init__(self, template: ChatTemplate, control: ControlTokens) -> None:
        self._template = template
        self._control = control

    def pieces(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any] | None = None,
        *,
        continues: bool | None = None,
    ) -> list[str | ControlToken]:
        """The prompt of a conversation; control spellings in its strings stay text.

        `continues`: the last message is continued, not answered; None: if it is the assistant's.
        """
        plain = plain_messages(messages)
        if continues is None:
            continues = len(plain) > 1 and plain[-1]["role"] == "assistant"
        supplied = strings_in([plain, variables or {}])
        is_plain = not any(self._control.may_occur(text) for text in supplied)
        if is_plain and not continues:
            return list(self._control.split(self._render(plain, variables, None)))
        mark, end = unused_marks([*supplied, self._template.source])
        open_end = end if continues else None
        if is_plain:
            return list(self._control.split(self._render(plain, variables, open_end)))
        text = self._render_marked(plain, variables, mark, open_end)
        return [
            piece if isinstance(piece, ControlToken) else _unmarked(piece, mark)
            for piece in self._control.split(text)
        ]

    def _render_marked(
        self,
        messages: list[dict[str, Any]],
        variables: Mapping[str, Any] | None,
        mark: str,
        end: str | None,
    ) -> str:
        """The rendering with marks, if it says the same as the one without.

        Where the template looks at control spellings in what it is given (Qwen3 cuts an earlier
        answer at `</think>`), it gets to see those of assistant messages, if none of them comes
        through as a control token. Failing that, the marked rendering holds: always safe.
        """
        wanted = self._render(messages, variables, end)
        marked_variables = self._marked(variables or {}, mark)
        marked = [self._marked(message, mark) for message in messages]
        safe = self._render(marked, marked_variables, end)
        if _unmarked(safe, mark) == wanted:
            return safe
        seen = [
            message if message["role"] == "assistant" else hidden
            for message, hidden in zip(messages, marked, strict=True)
        ]
        open_text = self._render(seen, marked_variables, end)
        spellings = self._control.spellings_in
        if _unmarked(open_text, mark) == wanted and spellings(open_text) == spellings(safe):
            return open_text
        return safe

    def _marked(self, value: Any, mark: str) -> Any:
        def change(text: str) -> str:
            return self._control.mark(text, mark)

        return map_strings(value, change)

    def _render(
        self, messages: Sequence[Message], variables: Mapping[str, Any] | None, end: str | None
    ) -> str:
        """`end` set: a character that marks where the last message, left open, ends."""
        if end is None:
            return self._template.render(messages, variables=variables)
        *earlier, last = messages
        text = str(last["content"])
        # The blank behind the mark shows whether the template trims what it is given.
        open_last = {**last, "content": f"{text}{end} "}
        rendered = self._template.render(
            [*earlier, open_last], add_generation_prompt=False, variables=variables
        )
        at = rendered.rfind(end)
        if at >= 0:
            is_trimmed = not rendered.startswith(f"{end} ", at)
            return rendered[:at].rstrip() if is_trimmed else rendered[:at]
        return self._template.render(earlier, variables=variables) + text


def _unmarked(text: str, mark: str) -> str:
    """Without marks, also where a template wrote them as JSON escapes."""
    return text.replace(mark, "").replace(json.dumps(mark)[1:-1], "")


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as templates expect them: known roles, content one string."""
    if not messages:
        raise InvalidRequest("messages must not be empty", param="messages")
    return [_plain(message, index) for index, message in enumerate(messages)]


def _plain(message: Message, index: int) -> dict[str, Any]:
    role = "system" if message["role"] == "developer" else message["role"]
    content = message.get("content")
    if content is None:
        content = ""
    elif not isinstance(content, str):
        content = "\n".join(_part_text(part, index, at) for at, part in enumerate(content))
    kept = {key: value for key, value in message.items() if value is not None}
    return {**kept, "role": role, "content": content}


def _part_text(part: Mapping[str, Any], index: int, at: int) -> str:
    if part.get("type") not in ("text", "input_text", "output_text"):
        raise InvalidRequest(
            f"content parts of type {part.get('type')!r} are not supported by this model",
            param=f"messages.{index}.content.{at}.type",
            reason="unsupported_value",
        )
    return str(part["text"])
