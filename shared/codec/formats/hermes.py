"""Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one tag a call."""

import json
from collections.abc import Sequence
from typing import Final

from finback.shared.codec.dialogue import Tool
from finback.shared.codec.formats.json_calls import JsonCallParser
from finback.shared.codec.formats.surface import Surface, needs_raw_text, quote

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"


class HermesParser(JsonCallParser):
    """One object within the tags, or several."""

    _end_marker = CLOSE

    def _open_call(self) -> None:
        self._state = self._object_start

    def _object_start(self) -> bool:
        """Behind the opening tag: an object must follow."""
        rest = self._text[len(OPEN) :].lstrip()
        if not rest:
            return self._wait()
        if rest[0] != "{":
            return self._no_call()
        self._begin_object(self._text.index("{"))
        return True

    def _after_object(self) -> bool:
        rest = self._text.lstrip()
        if rest.startswith(CLOSE):
            self._text = rest[len(CLOSE) :]
            self._state = self._after_call
            return True
        if CLOSE.startswith(rest) and not self._is_last:
            return False
        if rest.startswith("{"):
            # A further call within the same tags; what is no call is text, brace included.
            self._lead, self._marker = "", "{"
            self._text = rest
            self._begin_object(0)
            return True
        if not rest:
            self._text = ""
            return False
        self._state = self._content
        return True


class HermesSurface:
    """Calls as the model is shown them: the object on a line of its own between the tags."""

    def calls(self, surface: Surface, tools: Sequence[Tool], is_parallel: bool) -> str:
        """See `CallSurface`."""
        call = surface.rule("call", f"{surface.mark(OPEN)} ({self._bodies(surface, tools)})")
        return surface.rule("calls", f'{call} ("\\n"? {call})*' if is_parallel else call)

    def mixed(self, surface: Surface, tools: Sequence[Tool], is_parallel: bool) -> str:
        """See `CallSurface`."""
        head = surface.until("head", OPEN)
        call = surface.rule("call", f"{head} ({self._bodies(surface, tools)})")
        return surface.rule("mixed", f"{call}* TEXT" if is_parallel else f"{call} | TEXT")

    def in_thought(self, surface: Surface) -> str | None:
        """See `CallSurface`: calls are looked for behind reasoning only."""
        return None

    def _bodies(self, surface: Surface, tools: Sequence[Tool]) -> str:
        return " | ".join(_body(surface, tool) for tool in tools)


def _body(surface: Surface, tool: Tool) -> str:
    name = json.dumps(tool.name, ensure_ascii=False)
    close = f"{quote(chr(10))} {surface.mark(CLOSE)}"
    if tool.grammar is not None and needs_raw_text(tool):
        head = quote(f'\n{{"name": {name}}}\n')
        return f"{head} {surface.custom_text(tool)} {close}"
    head = quote(f'\n{{"name": {name}, "arguments": ')
    return f"{head} {surface.arguments(tool)} {quote('}')} {close}"
