"""DeepSeek's DSML blocks, in the spelling of V3.2 and V4 and in that of V4.1: both are read.

The form is the one that deepseek-recipe 0.2 renders and documents in its tool instructions.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from finback.shared.codec.dialogue import Conversation, Tool
from finback.shared.codec.formats.base import FamilyFormat, is_thinking
from finback.shared.codec.formats.surface import Surface, quote
from finback.shared.codec.formats.tag_calls import TagCallParser
from finback.shared.codec.formats.tag_surface import TagSpelling, invoke_rule
from finback.shared.codec.formats.tag_values import TagSyntax
from finback.shared.codec.formats.toolbox import Toolbox
from finback.shared.codec.output import OutputParser
from finback.shared.wire.messages.generate import GrammarSpec

DSML: Final = "｜DSML｜"
OPENS: Final = (f"<{DSML}tool_calls>", f"<{DSML} calls>", f"<{DSML}function_calls>")


def _syntax(gap: str) -> TagSyntax:
    return TagSyntax(
        starts=(f"<{DSML}", f"</{DSML}"),
        invoke=re.compile(rf'<{DSML}{gap}invoke\s+name="(?P<name>[^"]*)"\s*>'),
        invoke_end=re.compile(rf"</{DSML}{gap}invoke\s*>"),
        parameter=re.compile(
            rf'<{DSML}{gap}parameter\s+name="(?P<name>[^"]*)"'
            r'(?:\s+string="(?P<is_text>true|false)")?\s*>'
        ),
        parameter_end=f"</{DSML}{gap}parameter>",
        block_end=re.compile(rf"</{DSML}{gap}(?:tool_calls|calls|function_calls)\s*>"),
    )


_PLAIN: Final = _syntax("")
_SPACED: Final = _syntax(" ")


class DsmlParser(TagCallParser):
    """Reads blocks of `invoke` elements, each block in the spelling that it was opened in."""

    syntax = _PLAIN

    def _open_call(self) -> None:
        self.syntax = _SPACED if self._marker.startswith(f"<{DSML} ") else _PLAIN
        super()._open_call()

    def enter_block(self, gap: str = "") -> None:
        """See `TagCallParser`. `gap`: stands before the names of tags."""
        self.syntax = _SPACED if gap else _PLAIN
        super().enter_block()


@dataclass(frozen=True, slots=True)
class DsmlSurface:
    """Blocks as one version of the model is shown them. `gap` stands before every tag's name."""

    block: str = "tool_calls"
    gap: str = ""
    # The prompt has opened the block already.
    is_open: bool = False

    @property
    def open(self) -> str:
        """The tag that opens a block."""
        return f"<{DSML}{self.gap}{self.block}>"

    def calls(self, surface: Surface, tools: Sequence[Tool], is_parallel: bool) -> str:
        """See `CallSurface`."""
        opening = "" if self.is_open else f'"\\n\\n"? {quote(self.open)} "\\n" '
        return surface.rule("calls", opening + self._block(surface, tools, is_parallel))

    def mixed(self, surface: Surface, tools: Sequence[Tool], is_parallel: bool) -> str:
        """See `CallSurface`. There is one block at most, at the end."""
        head = surface.until("head", self.open)
        block = self._block(surface, tools, is_parallel)
        return surface.rule("mixed", f'{head} "\\n" {block} | TEXT')

    def in_thought(self, surface: Surface) -> str | None:
        """See `CallSurface`."""
        return f'{surface.until("thought_end", self.open)} "\\n" block'

    def _block(self, surface: Surface, tools: Sequence[Tool], is_parallel: bool) -> str:
        spelling = self.spelling
        rules = [invoke_rule(surface, spelling, tool, index) for index, tool in enumerate(tools)]
        call = surface.rule("call", " | ".join(rules))
        end = quote(f"</{DSML}{self.gap}{self.block}>")
        return surface.rule("block", f"{call}{'+' if is_parallel else ''} {end}")

    @property
    def spelling(self) -> TagSpelling:
        """How the elements are spelled."""
        dsml = f"{DSML}{self.gap}"
        return TagSpelling(
            invoke=f'<{dsml}invoke name="{{}}">\n',
            invoke_end=f"</{dsml}invoke>\n",
            text=f'<{dsml}parameter name="{{}}" string="true">',
            json=f'<{dsml}parameter name="{{}}" string="false">',
            end=f"</{dsml}parameter>",
        )


def opens_block(conversation: Conversation) -> bool:
    """Does the prompt open a tool block: calls are forced and the model does not think."""
    choice = conversation.tool_choice
    is_forced = choice.mode == "required" and bool(conversation.tools)
    return is_forced and not thinks(conversation) and not conversation.continues_last


def thinks(conversation: Conversation) -> bool:
    """DeepSeek thinks unless told not to."""
    return is_thinking(conversation) is not False


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekFormat(FamilyFormat):
    """Where calls are forced without thinking, the answer begins inside a block."""

    def parser(self, conversation: Conversation) -> OutputParser:
        """See `OutputFormat`."""
        start = self.starts.of(conversation)
        parser = DsmlParser(self.spans_of(conversation), Toolbox(conversation), start)
        if opens_block(conversation):
            parser.enter_block(self.surface.gap)
        return parser

    def grammar(self, conversation: Conversation) -> GrammarSpec | None:
        """See `OutputFormat`."""
        if not opens_block(conversation):
            return FamilyFormat.grammar(self, conversation)
        surface = Surface(self.is_special)
        inside = DsmlSurface(self.surface.block, self.surface.gap, is_open=True)
        tools = Toolbox(conversation).tools
        return surface.done(inside.calls(surface, tools, conversation.tool_choice.is_parallel))

    @property
    def surface(self) -> DsmlSurface:
        """The family, by its own type."""
        if not isinstance(self.family, DsmlSurface):
            raise TypeError("a DeepSeek format needs a DSML surface")
        return self.family
