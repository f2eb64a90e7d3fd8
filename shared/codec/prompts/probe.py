"""Where a model's answers start: found out by rendering a prompt with each thinking setting."""

from typing import Final

from finback.shared.codec.dialogue import Conversation, Turn
from finback.shared.codec.formats.base import Starts
from finback.shared.codec.formats.spans import Start
from finback.shared.codec.prompts.prompt_format import PromptFormat
from finback.shared.errors import InvalidRequest

_TURN: Final = Turn(role="user", content="?")
_TAIL_CHARS: Final = 64


def probe_starts(prompt: PromptFormat, think_open: str, think_close: str) -> Starts:
    """`opened`: the prompt ends inside a span. `expected`: the template lets the model open one.

    A template that can close the span itself (thinking off) expects one where it does not.
    """
    tails = {thinking: _tail(prompt, thinking) for thinking in (None, True, False)}
    is_switch = tails[True] != tails[False]
    starts: dict[bool | None, Start] = {}
    for thinking, tail in tails.items():
        if tail.rstrip().endswith(think_open):
            starts[thinking] = "opened"
        elif tail.rstrip().endswith(think_close) or not is_switch:
            starts[thinking] = "answer"
        else:
            starts[thinking] = "answer" if thinking is False else "expected"
    return Starts(starts)


def _tail(prompt: PromptFormat, thinking: bool | None) -> str:
    try:
        pieces = prompt.render(Conversation(turns=(_TURN,), is_thinking=thinking))
    except InvalidRequest:
        return ""
    text = "".join(piece if isinstance(piece, str) else piece.spelling for piece in pieces)
    return text[-_TAIL_CHARS:]
