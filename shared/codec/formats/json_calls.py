"""Calls as JSON objects: `{"name": ..., "arguments": {...}}`, with the members in any order.

Until a call has begun its text is kept, so that what is no call can be given back whole.
"""

import json
import re
from typing import Final

from finback.shared.codec.formats.json_arguments import JsonArgumentsParser
from finback.shared.codec.formats.json_scan import JsonScanner
from finback.shared.codec.formats.json_text import JsonText
from finback.shared.codec.formats.span_parser import MAX_HEAD_CHARS
from finback.shared.codec.strict_json import loads_strictly

_ARGUMENTS: Final = frozenset({"arguments", "parameters"})
_KEY: Final = re.compile(r'\s*("(?:[^"\\\x00-\x1f]|\\.){0,64}")\s*:\s*(?=\S)')
_KEY_PART: Final = re.compile(r'\s*(?:"(?:[^"\\\x00-\x1f]|\\.){0,64}(?:\\|"\s*(?::\s*)?)?)?\Z')
_NAME: Final = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.){1,256}"')
_NAME_PART: Final = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.){0,256}\\?\Z')
_NEXT: Final = re.compile(r"\s*([,}])")
_BLANK: Final = re.compile(r"\s*\Z")


class JsonCallParser(JsonArgumentsParser):
    """Reads one object a call. A subclass says what stands around the objects.

    `_begin_object(at)` starts reading at an opening brace in `_text`, which keeps everything; `_at`
    is where reading is.
    """

    def _begin_object(self, at: int) -> None:
        self._at = at + 1
        self._name: str | None = None
        self._own_id = ""
        self._held: tuple[int, int] | None = None
        self._key = ""
        self._scanner = JsonScanner()
        self._value_at = 0
        self._state = self._member

    def _wait(self) -> bool:
        """More text is needed; too much of it, or no more, and it is no call."""
        if self._is_last or len(self._text) > MAX_HEAD_CHARS:
            return self._no_call()
        return False

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


def _unquoted(quoted: str) -> str:
    try:
        return str(json.loads(quoted))
    except ValueError:
        return quoted[1:-1]


def _id_of(value: str) -> str:
    """A call's own id, if it is a usable string."""
    try:
        found = loads_strictly(value)
    except ValueError:
        return ""
    is_usable = isinstance(found, str) and 0 < len(found) <= 256
    return found if is_usable else ""
