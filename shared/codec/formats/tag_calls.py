"""Calls as nested tags: a block of invocations, each with one element a parameter.

The arguments come out as one JSON object, element by element. Until the first invocation has a known
name, the block can be given back whole.
"""

from finback.shared.codec.formats.span_parser import MAX_HEAD_CHARS
from finback.shared.codec.formats.tag_values import TagValueParser

MAX_TAG_CHARS = 512


class TagCallParser(TagValueParser):
    """Reads blocks and invocations."""

    def enter_block(self) -> None:
        """The prompt has opened a block already: the answer begins inside it."""
        self._state = self._in_block

    # -- the block: until an invocation is known `_text` keeps everything from its marker on

    def _open_call(self) -> None:
        self._state = self._first_invoke

    def _first_invoke(self) -> bool:
        size = len(self._marker)
        tag, end = self._tag(size)
        if tag is None:
            if end == 0 or self._is_last or len(self._text) > MAX_HEAD_CHARS:
                return self._no_call()
            return False
        found = self.syntax.invoke.fullmatch(tag)
        if found is None or self._tools.find(found["name"]) is None:
            return self._no_call()
        return self._begin_invoke(found["name"], end)

    def _in_block(self) -> bool:
        """Between two invocations: another one, or the end of the block; else it is text."""
        self._text = self._text.lstrip()
        tag, end = self._tag(0)
        if tag is None:
            if end == 0 or self._is_last:
                self._state = self._after_block
                return not self._is_last or bool(self._text)
            return False
        if self.syntax.block_end.fullmatch(tag):
            self._text = self._text[end:]
            self._state = self._after_call
            return True
        found = self.syntax.invoke.fullmatch(tag)
        if found is None or self._tools.find(found["name"]) is None:
            self._state = self._content
            return True
        return self._begin_invoke(found["name"], end)

    def _after_block(self) -> bool:
        self._state = self._content
        return True

    def _tag(self, at: int) -> tuple[str | None, int]:
        """The tag behind blanks at `at`, and where it ends; (None, 0): there is none, else wait."""
        text = self._text
        rest = text[at:].lstrip()
        if not rest:
            return None, 1
        begun = len(text) - len(rest)
        starts = self.syntax.starts
        if not any(rest.startswith(start) for start in starts):
            return None, int(any(start.startswith(rest) for start in starts))
        end = rest.find(">")
        if end < 0:
            return None, int(len(rest) <= MAX_TAG_CHARS)
        return rest[: end + 1], begun + end + 1

    # -- an invocation

    def _begin_invoke(self, name: str, end: int) -> bool:
        self._tool = self._tools.find(name) or self._tool
        self._text = self._text[end:]
        self._names = set()
        self._is_called = True
        self._begin_call(name, self._tool.kind)
        self._state = self._in_invoke
        return True

    def _in_invoke(self) -> bool:
        """Between two parameters."""
        self._text = self._text.lstrip()
        tag, end = self._tag(0)
        if tag is None:
            if end and not self._is_last:
                return False
            return self._end_broken() if self._text.strip() else False
        if self.syntax.invoke_end.fullmatch(tag):
            self._text = self._text[end:]
            if self._tool.kind == "function":
                self._say_arguments("}" if self._names else "{}")
            return self._end_invoke()
        found = self.syntax.parameter.fullmatch(tag)
        is_second_text = self._tool.kind == "custom" and self._names
        if found is None or found["name"] in self._names or is_second_text:
            return self._end_broken()
        self._begin_parameter(found["name"], found.groupdict().get("is_text"))
        self._text = self._text[end:]
        return True

    def _end_invoke(self) -> bool:
        self._is_called = False
        self._end_call()
        self._state = self._in_block
        return True
