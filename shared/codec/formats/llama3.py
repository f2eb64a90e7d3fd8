"""Llama 3: a call is a JSON object at the start of the answer, perhaps behind <|python_tag|>."""

import json
from collections.abc import Sequence
from typing import Final

from finback.shared.codec.dialogue import Tool
from finback.shared.codec.formats.json_calls import JsonCallParser
from finback.shared.codec.formats.marker_search import MAX_BLANKS
from finback.shared.codec.formats.spans import Spans, Start
from finback.shared.codec.formats.surface import Surface, needs_raw_text, quote
from finback.shared.codec.formats.toolbox import Toolbox

PYTHON_TAG: Final = "<|python_tag|>"


class BareCallParser(JsonCallParser):
    """Objects with nothing around them, one behind the other: only at the start of the content.

    Between two calls may stand a semicolon or a comma, and the whole may be a list.
    """

    def __init__(self, spans: Spans, toolbox: Toolbox, start: Start) -> None:
        super().__init__(spans, toolbox, start)
        self._is_list = False
        if not spans.think_open and toolbox:
            self._state = self._bare

    def _content(self) -> bool:
        """Content begins: it may be a call. Where it is none, all that follows is text."""
        if not self._tools:
            return super()._content()
        self._state = self._bare
        return True

    def _plain(self) -> bool:
        return super()._content()

    def _resume(self) -> None:
        self._state = self._plain

    def _bare(self) -> bool:
        rest = self._text.lstrip()
        blanks = len(self._text) - len(rest)
        if not rest and blanks <= MAX_BLANKS and not self._is_last:
            return False
        for marker in (PYTHON_TAG, "[", "{"):
            if rest.startswith(marker):
                self._lead, self._marker = self._text[:blanks], marker
                self._text = rest
                self._state = self._opened
                return True
            if rest and marker.startswith(rest) and not self._is_last:
                return False
        self._state = self._plain
        return True

    def _opened(self) -> bool:
        """Behind what may open calls an object must follow."""
        if self._marker == "{":
            self._begin_object(0)
            return True
        rest = self._text[len(self._marker) :].lstrip()
        if not rest:
            return self._wait()
        if rest[0] != "{":
            return self._no_call()
        self._is_list = self._marker == "["
        self._begin_object(len(self._text) - len(rest))
        return True

    def _after_object(self) -> bool:
        rest = self._text.lstrip()
        if not rest:
            self._text = ""
            return False
        if self._is_list and rest[0] == "]":
            self._is_list = False
            self._text = rest[1:]
            self._state = self._after_list
            return True
        if rest[0] in ",;":
            behind = rest[1:].lstrip()
            if not behind and not self._is_last:
                return False
            is_next = behind.startswith("{")
            separator = rest[: len(rest) - len(behind)] if is_next else ""
            return self._next_object(separator, rest) if is_next else self._no_more()
        return self._next_object("", rest) if rest[0] == "{" else self._no_more()

    def _next_object(self, separator: str, rest: str) -> bool:
        """A further call; what is none is text, brace and separator included."""
        self._lead = separator
        self._text = rest[len(separator) :]
        self._marker = "{"
        self._begin_object(0)
        return True

    def _no_more(self) -> bool:
        self._text = self._text.lstrip()
        self._state = self._plain
        return True

    def _after_list(self) -> bool:
        self._text = self._text.lstrip()
        if not self._text:
            return False
        self._state = self._plain
        return True


class BareSurface:
    """Objects as the model is shown them. `key`: what it calls the arguments."""

    def __init__(self, key: str) -> None:
        self._key = key

    def calls(self, surface: Surface, tools: Sequence[Tool], is_parallel: bool) -> str:
        """See `CallSurface`. Raw text ends with the answer, so it is the last call."""
        objects = [self._object(surface, tool) for tool in tools if not needs_raw_text(tool)]
        raw = [self._raw(surface, tool) for tool in tools if needs_raw_text(tool)]
        if not objects:
            return surface.rule("calls", " | ".join(raw))
        call = surface.rule("call", " | ".join(objects))
        sequence = f'{call} (";" " "? {call})*' if is_parallel else call
        if raw and is_parallel:
            last = surface.rule("last", " | ".join(raw))
            return surface.rule("calls", f'{sequence} (";" " "? {last})? | {last}')
        return surface.rule("calls", " | ".join([sequence, *raw]))

    def mixed(self, surface: Surface, tools: Sequence[Tool], is_parallel: bool) -> str:
        """See `CallSurface`. Text is what does not begin like a call."""
        calls = self.calls(surface, tools, is_parallel)
        begin = f"{surface.mark(PYTHON_TAG)}? " if surface.is_special(PYTHON_TAG) else ""
        other = r"/\s{0,64}([^\s{\[<](.|\n)*)?/"
        return surface.rule("mixed", f"{begin}{calls} | {other}")

    def in_thought(self, surface: Surface) -> str | None:
        """See `CallSurface`: calls are looked for behind reasoning only."""
        return None

    def _object(self, surface: Surface, tool: Tool) -> str:
        name = json.dumps(tool.name, ensure_ascii=False)
        head = quote(f'{{"name": {name}, "{self._key}": ')
        return f"{head} {surface.arguments(tool)} {quote('}')}"

    def _raw(self, surface: Surface, tool: Tool) -> str:
        head = quote(f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}}}\n')
        return f"{head} {surface.custom_text(tool)}".rstrip()
