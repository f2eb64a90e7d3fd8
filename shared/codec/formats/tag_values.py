"""The parameters of calls that are written as tags: text is quoted, JSON is checked and copied."""

import json
import re
from dataclasses import dataclass
from typing import Any

from finback.shared.codec.dialogue import Tool
from finback.shared.codec.formats.json_scan import JsonScanner
from finback.shared.codec.formats.marker_search import begun_at_end
from finback.shared.codec.formats.span_parser import MAX_HEAD_CHARS, SpanParser
from finback.shared.codec.formats.spans import Spans, Start
from finback.shared.codec.formats.toolbox import Toolbox


@dataclass(frozen=True, slots=True, kw_only=True)
class TagSyntax:
    """How a family writes the tags. Tags begin with one of `starts` and end with the next `>`.

    `invoke` and `parameter` find the group `name`; `parameter` also `is_text`, `true` or `false`,
    where the tag tells (else the tool's schema does). `trims_line`: one line break at each end of a
    value belongs to its tags.
    """

    starts: tuple[str, ...]
    invoke: re.Pattern[str]
    invoke_end: re.Pattern[str]
    parameter: re.Pattern[str]
    parameter_end: str
    block_end: re.Pattern[str]
    trims_line: bool = False


class TagValueParser(SpanParser):
    """Reads values, from behind a parameter's opening tag to behind its closing one.

    A subclass gives `syntax`, for each block again if it knows several, and the state `_in_invoke`.
    """

    syntax: TagSyntax

    def __init__(self, spans: Spans, toolbox: Toolbox, start: Start) -> None:
        super().__init__(spans, toolbox, start)
        self._tool = Tool(name="")
        self._is_called = False
        self._names: set[str] = set()
        self._scanner = JsonScanner()
        self._after_line = self._text_value

    def _in_invoke(self) -> bool:
        """Between two parameters."""
        raise NotImplementedError

    def _begin_parameter(self, name: str, is_text: str | None) -> None:
        if self._tool.kind == "custom":
            self._names.add(name)
            self._state = self._value_start if self.syntax.trims_line else self._text_value
            self._after_line = self._text_value
            return
        self._say_arguments(
            f"{', ' if self._names else '{'}{json.dumps(name, ensure_ascii=False)}: "
        )
        self._names.add(name)
        self._scanner = JsonScanner()
        if is_text == "true" or (is_text is None and takes_text(self._tool, name)):
            self._say_arguments('"')
            self._after_line = self._text_value
            self._state = self._value_start if self.syntax.trims_line else self._text_value
        else:
            self._state = self._json_start

    def _value_start(self) -> bool:
        """One line break behind the opening tag is not of the value."""
        if not self._text and not self._is_last:
            return False
        self._text = self._text.removeprefix("\n")
        self._state = self._after_line
        return True

    def _text_value(self) -> bool:
        at = self._text.find(self.syntax.parameter_end)
        if at < 0:
            cut = len(self._text) if self._is_last else self._held_from(self._text)
            self._say_arguments(self._spelled(self._text[:cut]))
            self._text = self._text[cut:]
            return False
        text = self._text[:at]
        self._say_arguments(
            self._spelled(text.removesuffix("\n") if self.syntax.trims_line else text)
        )
        if self._tool.kind == "function":
            self._say_arguments('"')
        return self._end_parameter(at)

    def _end_parameter(self, at: int) -> bool:
        self._text = self._text[at + len(self.syntax.parameter_end) :]
        self._state = self._in_invoke
        return True

    def _spelled(self, text: str) -> str:
        return text if self._tool.kind == "custom" else json.dumps(text, ensure_ascii=False)[1:-1]

    def _held_from(self, text: str) -> int:
        """From where on the text may be the beginning of the closing tag."""
        cut = len(text) - begun_at_end(text, self.syntax.parameter_end)
        if self.syntax.trims_line and cut and text[cut - 1] == "\n":
            cut -= 1
        return cut

    # -- parameters that are JSON

    def _json_start(self) -> bool:
        self._text = self._text.lstrip()
        if not self._text:
            return False
        self._state = self._json_value if self._text[0] in '{["' else self._scalar
        return True

    def _scalar(self) -> bool:
        """A number or a word is short, so it is waited for; what is no JSON becomes a string."""
        at = self._text.find(self.syntax.parameter_end)
        if at < 0:
            if len(self._text) > MAX_HEAD_CHARS or self._is_last:
                self._state = self._broken
                return True
            return False
        raw = self._text[:at].strip()
        self._say_arguments(raw if _is_json(raw) else json.dumps(raw, ensure_ascii=False))
        return self._end_parameter(at)

    def _json_value(self) -> bool:
        said, at = self._scanner.take(self._text)
        self._say_arguments(said)
        self._text = self._text[at:]
        if self._scanner.is_bad:
            self._state = self._broken
        elif self._scanner.is_done:
            self._state = self._json_end
        else:
            return False
        return True

    def _json_end(self) -> bool:
        rest = self._text.lstrip()
        if rest.startswith(self.syntax.parameter_end):
            return self._end_parameter(len(self._text) - len(rest))
        if self.syntax.parameter_end.startswith(rest) and not self._is_last:
            return False
        self._state = self._broken
        return True

    def _broken(self) -> bool:
        """A value that is no JSON: up to the end of its element it is passed on as it is."""
        at = self._text.find(self.syntax.parameter_end)
        if at < 0:
            cut = len(self._text) if self._is_last else self._held_from(self._text)
            self._say_arguments(self._text[:cut])
            self._text = self._text[cut:]
            return False
        self._say_arguments(self._text[:at])
        self._end_parameter(at)
        return self._end_broken()

    # -- the end of a call that was cut off, or went wrong

    def _end_broken(self) -> bool:
        """No way to go on: what was said of the call stands, the rest is text."""
        self._say_open()
        self._is_called = False
        self._end_call(is_complete=False)
        self._state = self._content
        return True

    def _say_open(self) -> None:
        """Arguments that were cut off must not look like none."""
        if self._tool.kind == "function" and not self._names:
            self._say_arguments("{")

    def _close(self) -> None:
        if self._is_called:
            self._say_open()
            self._is_called = False
            self._end_call(is_complete=False)
        self._give_back()


def takes_text(tool: Tool, name: str) -> bool:
    """Is a parameter a string by the tool's schema, or not known to be anything else."""
    properties: Any = (tool.parameters or {}).get("properties")
    schema = properties.get(name) if isinstance(properties, dict) else None
    if not isinstance(schema, dict):
        return True
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return all(isinstance(value, str) for value in values)
    return schema.get("type", "string") == "string" and not schema.keys() & {
        "anyOf",
        "oneOf",
        "$ref",
    }


def _is_json(raw: str) -> bool:
    scanner = JsonScanner()
    end = scanner.feed(raw)
    scanner.finish()
    return scanner.is_done and end == len(raw)
