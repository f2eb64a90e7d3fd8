"""Qwen3-Coder: `<tool_call>` blocks with a `<function=...>` element and its `<parameter=...>`s.

The tags do not say whether a value is text or JSON: the tool's schema does.
"""

import re
from collections.abc import Sequence
from typing import Final

from finback.shared.codec.dialogue import Tool
from finback.shared.codec.formats.hermes import CLOSE, OPEN
from finback.shared.codec.formats.surface import Surface, quote
from finback.shared.codec.formats.tag_calls import TagCallParser
from finback.shared.codec.formats.tag_surface import TagSpelling, invoke_rule
from finback.shared.codec.formats.tag_values import TagSyntax

FUNCTION: Final = "<function="
_SPELLING: Final = TagSpelling(
    invoke="<function={}>\n",
    invoke_end="</function>\n",
    text="<parameter={}>\n",
    json="<parameter={}>\n",
    end="</parameter>",
    line_end="\n",
    tells_kind=False,
)


class QwenCoderParser(TagCallParser):
    """One block a call, or several functions in one block."""

    syntax = TagSyntax(
        starts=(FUNCTION, "</function>", "<parameter=", CLOSE),
        invoke=re.compile(r"<function=(?P<name>[^>\n]+)>"),
        invoke_end=re.compile(r"</function>"),
        parameter=re.compile(r"<parameter=(?P<name>[^>\n]+)>"),
        parameter_end="</parameter>",
        block_end=re.compile(CLOSE),
        trims_line=True,
    )


class QwenCoderSurface:
    """Calls as the model is shown them."""

    def calls(self, surface: Surface, tools: Sequence[Tool], is_parallel: bool) -> str:
        """See `CallSurface`."""
        call = surface.rule("call", f"{surface.mark(OPEN)} {self._body(surface, tools)}")
        return surface.rule("calls", f'{call} ("\\n"? {call})*' if is_parallel else call)

    def mixed(self, surface: Surface, tools: Sequence[Tool], is_parallel: bool) -> str:
        """See `CallSurface`."""
        head = surface.until("head", OPEN)
        call = surface.rule("call", f"{head} {self._body(surface, tools)}")
        return surface.rule("mixed", f"{call}* TEXT" if is_parallel else f"{call} | TEXT")

    def in_thought(self, surface: Surface) -> str | None:
        """See `CallSurface`: calls are looked for behind reasoning only."""
        return None

    def _body(self, surface: Surface, tools: Sequence[Tool]) -> str:
        rules = [invoke_rule(surface, _SPELLING, tool, index) for index, tool in enumerate(tools)]
        function = surface.rule("function", " | ".join(rules))
        return f"{quote(chr(10))} {function} {surface.mark(CLOSE)}"
