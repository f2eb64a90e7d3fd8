"""The arguments of calls that are JSON objects, as they come.

If they break, the rest up to the end marker is still theirs: what went out cannot be taken back.
"""

import re
from collections.abc import Callable
from typing import Final

from finback.shared.codec.dialogue import Tool
from finback.shared.codec.formats.json_scan import JsonScanner
from finback.shared.codec.formats.json_text import JsonText
from finback.shared.codec.formats.marker_search import begun_at_end
from finback.shared.codec.formats.span_parser import SpanParser
from finback.shared.codec.formats.spans import Spans, Start
from finback.shared.codec.formats.toolbox import CUSTOM_INPUT, Toolbox

_NEXT: Final = re.compile(r"\s*([,}])")
_BLANK: Final = re.compile(r"\s*\Z")
_CUSTOM: Final = re.compile(rf'\{{\s*"{CUSTOM_INPUT}"\s*:\s*"')
_CUSTOM_END: Final = re.compile(r"\s*\}")
_CUSTOM_PART: Final = re.compile(
    r"\{\s*(?:" + "|".join(
        [rf'"{CUSTOM_INPUT}"\s*(?::\s*)?', *(f'"{CUSTOM_INPUT}'[:size] for size in range(6, 0, -1))]
    ) + r")?\Z"
)  # fmt: skip
_TRAILING: Final = re.compile(r'\s*,\s*"(?:id|type)"\s*:\s*"[^"\\\x00-\x1f]{0,256}"')
_TRAILING_PART: Final = re.compile(
    r'\s*,\s*(?:"(?:i|id|t|ty|typ|type|(?:id|type)"\s*(?::\s*(?:"[^"\\\x00-\x1f]{0,256})?)?)?)?\Z'
)


class JsonArgumentsParser(SpanParser):
    """Reads from the first character of the arguments to the end of their object.

    `_text` is only what is not yet out. `_after_object` is the state behind the closing brace;
    `_end_marker` ends arguments that are broken (empty: nothing does).
    """

    _end_marker = ""

    def __init__(self, spans: Spans, toolbox: Toolbox, start: Start) -> None:
        super().__init__(spans, toolbox, start)
        self._own_id = ""
        self._scanner = JsonScanner()
        self._quoted = JsonText()
        self._is_member = False

    def _after_object(self) -> bool:
        """Behind the closing brace of a call."""
        raise NotImplementedError

    def _arguments(self) -> bool:
        said, at = self._scanner.take(self._text)
        self._say_arguments(said)
        self._text = self._text[at:]
        if self._scanner.is_bad:
            self._state = self._broken
        elif self._scanner.is_done:
            self._end_call()
            self._state = self._behind_arguments
        else:
            return False
        return True

    def _quoted_arguments(self) -> bool:
        """Arguments that are JSON in a JSON string, as some models write them."""
        text, at = self._quoted.take(self._text, is_last=self._is_last)
        self._text = self._text[at:]
        self._scanner.feed(text)
        self._say_arguments(text)
        if self._quoted.is_done:
            self._end_call(is_complete=self._scanner.is_done and not self._scanner.is_bad)
            self._state = self._behind_arguments
        return self._quoted.is_done

    def _broken(self) -> bool:
        """No JSON any more: up to the end marker it is passed on as it is."""
        return self._up_to_end_marker(is_complete=False)

    def _up_to_end_marker(self, *, is_complete: bool) -> bool:
        """Pass text on, but for a line break before the marker and what may be its beginning."""
        text, marker = self._text, self._end_marker
        at = text.find(marker) if marker else -1
        is_held = at < 0 and bool(marker) and not self._is_last
        cut = at if at >= 0 else len(text) - (begun_at_end(text, marker) if is_held else 0)
        if at >= 0 or is_held:
            said = text[:cut].removesuffix("\n").removesuffix("\r")
        else:
            said = text[:cut]
        self._say_arguments(said)
        if at < 0:
            self._text = text[len(said) :]
            return False
        self._text = text[at:]
        self._end_call(is_complete=is_complete)
        self._state = self._after_object
        return True

    def _behind_arguments(self) -> bool:
        """The call has ended; `}` is to come, perhaps after an id, perhaps forgotten."""
        found = _NEXT.match(self._text)
        if found is None:
            if _BLANK.match(self._text) and not self._is_last:
                return False
            self._state = self._after_object
            return True
        if found[1] == "}":
            self._text = self._text[found.end() :]
            self._state = self._after_object
            return True
        member = _TRAILING.match(self._text)
        if member is None and _TRAILING_PART.match(self._text) and not self._is_last:
            return False
        if member is None:
            self._resume()
        else:
            self._text = self._text[member.end() :]
        return True

    # -- custom tools: free text, in a JSON string or raw behind the object

    def _custom_start(self, tool: Tool) -> Callable[[], bool]:
        def start() -> bool:
            found = _CUSTOM.match(self._text)
            is_string = self._text.startswith('"')
            if found or is_string:
                self._begin_call(tool.name, tool.kind, self._own_id)
                self._text = self._text[found.end() if found else 1 :]
                self._quoted = JsonText()
                self._is_member = not is_string
                self._state = self._custom_text
                return True
            if _CUSTOM_PART.match(self._text) and not self._is_last:
                return False
            self._begin_call(tool.name, tool.kind, self._own_id)
            self._state = self._arguments
            return True

        return start

    def _custom_text(self) -> bool:
        text, at = self._quoted.take(self._text, is_last=self._is_last)
        self._text = self._text[at:]
        self._say_arguments(text)
        if not self._quoted.is_done:
            return False
        self._state = self._custom_end if self._is_member else self._custom_over
        return True

    def _custom_end(self) -> bool:
        found = _CUSTOM_END.match(self._text)
        if found is None and _BLANK.match(self._text) and not self._is_last:
            return False
        self._text = self._text[found.end() :] if found else self._text
        return self._custom_over()

    def _custom_over(self) -> bool:
        self._end_call()
        self._state = self._behind_arguments
        return True

    def _raw_start(self) -> bool:
        """`{"name": ...}` of a custom tool: its text follows on the next line."""
        if not self._text and not self._is_last:
            return False
        if self._text.startswith("\r") and len(self._text) < 2 and not self._is_last:
            return False
        self._text = re.sub(r"\A\r?\n", "", self._text)
        self._state = self._raw_text
        return True

    def _raw_text(self) -> bool:
        return self._up_to_end_marker(is_complete=True)

    # -- the end

    def _close(self) -> None:
        streaming = (self._arguments, self._quoted_arguments, self._broken, self._custom_text)
        if self._state in streaming:
            self._say_arguments(self._text)
            self._text = ""
            self._end_call(is_complete=False)
        elif self._state == self._raw_text:
            self._say_arguments(self._text)
            self._text = ""
            self._end_call(is_complete=not self._end_marker)
        self._give_back()
