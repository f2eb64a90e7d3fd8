"""Which format a model writes in, from what its files say. A table, first match wins."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from finback.shared.codec.formats.base import FamilyFormat, Starts
from finback.shared.codec.formats.deepseek import (
    DSML,
    OPENS,
    DeepseekFormat,
    DsmlParser,
    DsmlSurface,
)
from finback.shared.codec.formats.hermes import OPEN as HERMES_OPEN
from finback.shared.codec.formats.hermes import HermesParser, HermesSurface
from finback.shared.codec.formats.llama3 import PYTHON_TAG, BareCallParser, BareSurface
from finback.shared.codec.formats.qwen_coder import FUNCTION as QWEN_FUNCTION
from finback.shared.codec.formats.qwen_coder import QwenCoderParser, QwenCoderSurface
from finback.shared.codec.formats.spans import Spans
from finback.shared.codec.output import OutputFormat, PlainFormat
from finback.shared.errors import ConfigError

THINK_OPEN: Final = "<think>"
THINK_CLOSE: Final = "</think>"
DEEPSEEK_V4: Final = "deepseek-v4"
DEEPSEEK_V41: Final = "deepseek-v4.1"
# The token that V4.1 has and V4 has not.
DEEPSEEK_SYSTEM: Final = "<｜System｜>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Clues:
    """What is known of a model: its templates by name, control spellings, architecture.

    `special`: those control spellings that ordinary text can never be.
    """

    templates: Mapping[str, str]
    spellings: frozenset[str] = frozenset()
    special: frozenset[str] = frozenset()
    architecture: str = ""

    def mentions(self, text: str) -> bool:
        """Does a template speak of `text`."""
        return any(text in source for source in self.templates.values())

    @property
    def knows_tools(self) -> bool:
        """Does a template know tools."""
        return self.mentions("tools")

    @property
    def writes_dsml(self) -> bool:
        """Does the vocabulary have DeepSeek's token for call blocks."""
        return DSML in self.spellings

    @property
    def is_llama3(self) -> bool:
        """Does it know tools, and have the token that Llama 3 marks calls with."""
        return self.knows_tools and PYTHON_TAG in self.spellings

    @property
    def can_think(self) -> bool:
        """Does the model write reasoning spans."""
        return THINK_OPEN in self.spellings or self.mentions(THINK_OPEN)


def _hermes(clues: Clues, starts: Starts) -> OutputFormat:
    return FamilyFormat(
        name="hermes",
        new_parser=HermesParser,
        family=HermesSurface(),
        spans=_spans(clues, HERMES_OPEN),
        starts=starts,
        is_special=clues.special.__contains__,
    )


def _qwen_coder(clues: Clues, starts: Starts) -> OutputFormat:
    return FamilyFormat(
        name="qwen3-coder",
        new_parser=QwenCoderParser,
        family=QwenCoderSurface(),
        spans=_spans(clues, HERMES_OPEN),
        starts=starts,
        is_special=clues.special.__contains__,
    )


def _deepseek(name: str, surface: DsmlSurface) -> Callable[[Clues, Starts], OutputFormat]:
    def make(clues: Clues, starts: Starts) -> OutputFormat:
        return DeepseekFormat(
            name=name,
            new_parser=DsmlParser,
            family=surface,
            spans=Spans(calls=OPENS, is_call_in_reasoning=True),
            starts=starts,
            is_special=clues.special.__contains__,
            further_markers=(DSML,),
        )

    return make


def _bare(name: str, key: str) -> Callable[[Clues, Starts], OutputFormat]:
    def make(clues: Clues, starts: Starts) -> OutputFormat:
        return FamilyFormat(
            name=name,
            new_parser=BareCallParser,
            family=BareSurface(key),
            spans=_spans(clues),
            starts=starts,
            is_special=clues.special.__contains__,
            further_markers=(PYTHON_TAG,),
        )

    return make


def _spans(clues: Clues, *calls: str) -> Spans:
    return Spans(calls=calls) if clues.can_think else Spans(think_open="", calls=calls)


# Name, what speaks for it, how it is made.
_TABLE: Final[
    tuple[tuple[str, Callable[[Clues], bool], Callable[[Clues, Starts], OutputFormat]], ...]
] = (
    (
        DEEPSEEK_V41,
        lambda clues: clues.writes_dsml and DEEPSEEK_SYSTEM in clues.spellings,
        _deepseek(DEEPSEEK_V41, DsmlSurface(block="calls", gap=" ")),
    ),
    (DEEPSEEK_V4, lambda clues: clues.writes_dsml, _deepseek(DEEPSEEK_V4, DsmlSurface())),
    ("qwen3-coder", lambda clues: clues.mentions(QWEN_FUNCTION), _qwen_coder),
    ("hermes", lambda clues: clues.mentions(HERMES_OPEN), _hermes),
    (
        "llama3",
        lambda clues: clues.mentions(PYTHON_TAG) or clues.is_llama3,
        _bare("llama3", "parameters"),
    ),
    ("hermes", lambda clues: bool(clues.templates) and not clues.knows_tools, _hermes),
    ("json", lambda clues: clues.knows_tools, _bare("json", "arguments")),
)
NAMES: Final = tuple(dict.fromkeys((*(name for name, _, _ in _TABLE), "plain")))


def format_name(clues: Clues, wanted: str = "auto") -> str:
    """The name of the format: the `wanted` one, or what the clues speak for."""
    if wanted != "auto":
        if wanted not in NAMES:
            raise ConfigError(
                f"output_format {wanted!r} is not known; use auto, {', '.join(NAMES)}"
            )
        return wanted
    return next((name for name, speaks, _ in _TABLE if speaks(clues)), "plain")


def select_format(clues: Clues, starts: Starts, wanted: str = "auto") -> OutputFormat:
    """The format itself. Raises `ConfigError` for a name that is not known."""
    found = format_name(clues, wanted)
    make = next((make for name, _, make in _TABLE if name == found), None)
    return PlainFormat() if make is None else make(clues, starts)
