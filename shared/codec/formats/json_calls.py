"""Calls as JSON objects: `{"name": ..., "arguments": {...}}`, with the members in any order.

Until a call has begun its text is kept, so that what is no call can be given back whole. From then
on its arguments go out as they come; if they break, the rest up to the end marker is still theirs.
"""

import json
import re
from collections.abc import Callable
from typing import Final

from finback.shared.codec.dialogue import Tool
from finback.shared.codec.formats.json_scan import JsonScanner
from finback.shared.codec.formats.json_text import JsonText
from finback.shared.codec.formats.span_parser import MAX_HEAD_CHARS, SpanParser
from finback.shared.codec.formats.toolbox import CUSTOM_INPUT

_ARGUMENTS: Final = frozenset({"arguments", "parameters"})
_KEY: Final = re.compile(r'\s*("(?:[^"\\\x00-\x1f]|\\.){0,64}")\s*:\s*(?=\S)')
_KEY_PART: Final = re.compile(r'\s*(?:"(?:[^"\\\x00-\x1f]|\\.){0,64}(?:\\|"\s*(?::\s*)?)?)?\Z')
_NAME: Final = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.){1,256}"')
_NAME_PART: Final = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.){0,256}\\?\Z')
_NEXT: Final = re.compile(r"\s*([,}])")
_BLANK: Final = re.compile(r"\s*\Z")
_CUSTOM: Final = re.compile(rf'\{{\s*"{CUSTOM_INPUT}"\s*:\s*"')
_CUSTOM_END: Final = re.compile(r"\s*\}")


class JsonCallParser(SpanParser):
    """Reads one object a call. A subclass says what stands around the objects.

    `_begin_object(at)` starts reading at an opening brace in `_text`; `_after_object` is the state
    behind the closing one; `_end_marker` ends arguments that are broken (empty: nothing does).
    """

    _end_marker = ""

    def _begin_object(self, at: int) -> None:
        self._at = at + 1
        self._name: str | None = None
        self._own_id = ""
        self._held: tuple[int, int] | None = None
        self._key = ""
        self._scanner = JsonScanner()
        self._value_at = 0
        self._state = self._member

    def _after_object(self) -> bool:
        """Behind the closing brace of a call."""
        raise NotImplementedError

    def _wait(self) -> bool:
        """More text is needed; too much of it, or no more, and it is no call."""
        if self._is_last or len(self._text) > MAX_HEAD_CHARS:
            return self._no_call()
        return False

    # -- before the call has begun: `_text` keeps everything, `_at` is where reading is

    def _member(self) -> bool:
        found = _KEY.match(self._text, self._at)
        if found is None:
            is_part = _KEY_PART.match(self._text, self._at)
            return self._wait() if is_part else self._no_call()
        self._key, self._at = _unquoted(found[1]), found.end()
        self._value_at = self._at
        if self._key == "name" and self._name is None:
            self._state = self._read_name
        elif self._key in _ARGUMENTS and self._held is None:
            if self._name is not None:
                return self._begin_arguments(self._at)
            return self._skip_value() if self._text[self._at] in '{"n' else self._no_call()
        elif self._key in ("id", "type"):
            return self._skip_value()
        else:
            return self._no_call()
        return True

    def _read_name(self) -> bool:
        found = _NAME.match(self._text, self._at)
        if found is None:
            return self._wait() if _NAME_PART.match(self._text, self._at) else self._no_call()
        name = _unquoted(found[0])
        if self._tools.find(name) is None:
            return self._no_call()
        self._name, self._at = name, found.end()
        self._state = self._next_member
        return True

    def _skip_value(self) -> bool:
        self._scanner = JsonScanner()
        self._state = self._skipping
        return True

    def _skipping(self) -> bool:
        self._at = self._scanner.feed(self._text, self._at)
        if self._scanner.is_bad:
            return self._no_call()
        if not self._scanner.is_done:
            return self._wait()
        if self._key == "id":
            self._own_id = _id_of(self._text[self._value_at : self._at])
        elif self._key in _ARGUMENTS:
            self._held = (self._value_at, self._at)
        self._state = self._next_member
        return True

    def _next_member(self) -> bool:
        found = _NEXT.match(self._text, self._at)
        if found is None:
            is_blank = _BLANK.match(self._text, self._at)
            return self._wait() if is_blank else self._no_call()
        self._at = found.end()
        if found[1] == ",":
            self._state = self._member
            return True
        return self._object_ended()

    def _object_ended(self) -> bool:
        """The object closed before any arguments were streamed."""
        tool = self._tools.find(self._name) if self._name is not None else None
        if tool is None:
            return self._no_call()
        rest = self._text[self._at :]
        if self._held is None and tool.kind == "custom":
            self._text = rest
            self._begin_call(tool.name, tool.kind, self._own_id)
            self._state = self._raw_start
            return True
        if self._held is None:
            self._text = rest
            self._begin_call(tool.name, tool.kind, self._own_id)
            self._say_arguments("{}")
            self._end_call()
            self._state = self._after_object
            return True
        # The arguments came before the name: they are read again, and `}` is still to come.
        start, end = self._held
        self._text = self._text[start:end] + "}" + rest
        self._at = 0
        return self._begin_arguments(0)

    # -- arguments, as they come: from here on `_text` is only what is not yet out

    def _begin_arguments(self, at: int) -> bool:
        tool = self._tools.find(self._name) if self._name is not None else None
        first = self._text[at : at + 1]
        is_null = self._text.startswith("null", at)
        if first == "n" and not is_null:
            could_be = "null".startswith(self._text[at:])
            self._state = lambda: self._begin_arguments(at)
            return self._wait() if could_be else self._no_call()
        if tool is None or not (first in ("{", '"') or is_null):
            return self._no_call()
        self._text = self._text[at:]
        self._scanner = JsonScanner()
        if tool.kind == "custom":
            self._state = self._custom_start(tool)
            return True
        self._begin_call(tool.name, tool.kind, self._own_id)
        if is_null:
            self._text = self._text[4:]
            self._say_arguments("{}")
            self._end_call()
            self._state = self._behind_arguments
        elif first == '"':
            self._text = self._text[1:]
            self._quoted = JsonText()
            self._state = self._quoted_arguments
        else:
            self._state = self._arguments
        return True

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
        marker = self._end_marker
        at = self._text.find(marker) if marker else -1
        if at >= 0:
            self._say_arguments(self._text[:at].rstrip())
            self._text = self._text[at:]
            self._end_call(is_complete=False)
            self._state = self._after_object
            return True
        self._say_until(marker)
        return False

    def _say_until(self, marker: str) -> None:
        """Pass text on, but for what may be the beginning of `marker` and the blanks before it."""
        text = self._text
        cut = len(text)
        if marker and not self._is_last:
            sizes = range(min(len(marker) - 1, len(text)), 0, -1)
            cut -= next((size for size in sizes if text.endswith(marker[:size])), 0)
            cut = len(text[:cut].rstrip())
        self._say_arguments(text[:cut])
        self._text = text[cut:]

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
        marker = self._end_marker
        at = self._text.find(marker) if marker else -1
        if at >= 0:
            body = self._text[:at]
            self._say_arguments(body.removesuffix("\n").removesuffix("\r"))
            self._text = self._text[at:]
            self._end_call()
            self._state = self._after_object
            return True
        self._say_raw(marker)
        return False

    def _say_raw(self, marker: str) -> None:
        text = self._text
        cut = len(text)
        if marker and not self._is_last:
            sizes = range(min(len(marker) - 1, len(text)), 0, -1)
            cut -= next((size for size in sizes if text.endswith(marker[:size])), 0)
            cut = len(text[:cut].removesuffix("\n").removesuffix("\r"))
        self._say_arguments(text[:cut])
        self._text = text[cut:]

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


_CUSTOM_PART: Final = re.compile(
    r"\{\s*(?:" + "|".join(
        [rf'"{CUSTOM_INPUT}"\s*(?::\s*)?', *(f'"{CUSTOM_INPUT}'[:size] for size in range(6, 0, -1))]
    ) + r")?\Z"
)  # fmt: skip
_TRAILING: Final = re.compile(r'\s*,\s*"(?:id|type)"\s*:\s*"[^"\\\x00-\x1f]{0,256}"')
_TRAILING_PART: Final = re.compile(
    r'\s*,\s*(?:"(?:i|id|t|ty|typ|type|(?:id|type)"\s*(?::\s*(?:"[^"\\\x00-\x1f]{0,256})?)?)?)?\Z'
)


def _unquoted(quoted: str) -> str:
    try:
        return str(json.loads(quoted))
    except ValueError:
        return quoted[1:-1]


def _id_of(value: str) -> str:
    """A call's own id, if it is a usable string."""
    try:
        found = json.loads(value)
    except ValueError:
        return ""
    is_usable = isinstance(found, str) and 0 < len(found) <= 256
    return found if is_usable else ""
