"""What sets the parts of an answer apart in one family, and where an answer starts."""

from dataclasses import dataclass
from typing import Literal

# `opened`: the prompt ends inside a reasoning span. `expected`: the model opens one. `answer`: there
# need not be any.
Start = Literal["opened", "expected", "answer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """Markers of a family. Empty `think_open`: it writes no reasoning.

    `calls`: what opens a call block. `is_call_in_reasoning`: such a block also ends reasoning.
    """

    think_open: str = "<think>"
    think_close: str = "</think>"
    calls: tuple[str, ...] = ()
    is_call_in_reasoning: bool = False
