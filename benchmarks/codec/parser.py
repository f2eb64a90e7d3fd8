"""What parsing an answer costs a token, family by family: reasoning, content and calls.

    python benchmarks/codec/parser.py

Texts are cut into pieces of 1 to 8 characters, 4 on average, as tokens are; each is pushed alone. The
least of several rounds counts. Beside it: plain content through a format with tools, and without.
"""

import json
import random
import time
from collections.abc import Callable

from finback.shared.codec.dialogue import Conversation, Tool, Turn
from finback.shared.codec.formats.base import Starts
from finback.shared.codec.formats.select import Clues, select_format
from finback.shared.codec.output import OutputParser

ROUNDS = 7
TOOL = Tool(name="get_weather", parameters={"type": "object"})
PROSE = "The quick brown fox, who was 7 years old, jumped <b>over</b> the lazy dog's back.\n" * 40
ARGUMENTS = {
    "city": "Paris \\ Île-de-France",
    "query": "select * from weather where day > 3 and name = 'x'\n" * 20,
    "days": list(range(60)),
    "options": {"unit": "C", "nested": [{"a": True, "b": None, "c": 1.5e-3}] * 20},
}


def pieces(text: str) -> list[str]:
    """Token-like pieces."""
    dice, cut, at = random.Random(1), [], 0
    while at < len(text):
        size = dice.randint(1, 7)
        cut.append(text[at : at + size])
        at += size
    return cut


def block(family: str, *, num_calls: int = 4) -> str:
    """Calls as the family writes them."""
    arguments = json.dumps(ARGUMENTS, ensure_ascii=False)
    if family == "hermes":
        call = f'<tool_call>\n{{"name": "get_weather", "arguments": {arguments}}}\n</tool_call>\n'
        return call * num_calls
    if family.startswith("deepseek"):
        elements = "".join(
            f'<｜DSML｜parameter name="{name}" string="{"true" if isinstance(value, str) else "false"}">'
            f"{value if isinstance(value, str) else json.dumps(value)}</｜DSML｜parameter>\n"
            for name, value in ARGUMENTS.items()
        )
        call = f'<｜DSML｜invoke name="get_weather">\n{elements}</｜DSML｜invoke>\n'
        return f"<｜DSML｜tool_calls>\n{call * num_calls}</｜DSML｜tool_calls>"
    return "; ".join([f'{{"name": "get_weather", "arguments": {arguments}}}'] * num_calls)


def us_per_token(new_parser: Callable[[], OutputParser], text: str) -> float:
    """Microseconds a piece, events included, the best of some rounds."""
    cut, best = pieces(text), float("inf")
    for _ in range(ROUNDS):
        parser = new_parser()
        push = parser.push
        started = time.perf_counter()
        for piece in cut:
            push(piece)
        parser.finish()
        best = min(best, time.perf_counter() - started)
    return best / len(cut) * 1e6


def main() -> None:
    """Print a table."""
    with_tools = Conversation(turns=(Turn(role="user", content="?"),), tools=(TOOL,))
    without = Conversation(turns=with_tools.turns)
    clues = Clues(templates={"default": "tools <think>"})
    starts = Starts({None: "opened"})
    print(
        f"{'us a token':15}{'reasoning':>11}{'content':>11}{'calls':>11}{'all':>11}{'no tools':>11}"
    )
    for family in ("hermes", "deepseek-v4", "llama3", "json"):
        made = select_format(clues, starts, family)
        thought = PROSE + "\n</think>\n\n"
        texts = {
            "reasoning": thought,
            "content": "</think>" + PROSE,
            "calls": "</think>" + block(family),
            "all": thought + ("" if family in ("llama3", "json") else PROSE) + block(family),
        }
        row = [us_per_token(lambda: made.parser(with_tools), text) for text in texts.values()]  # noqa: B023 -- called at once
        row.append(us_per_token(lambda: made.parser(without), "</think>" + PROSE))  # noqa: B023 -- called at once
        print(f"{family:15}" + "".join(f"{value:11.2f}" for value in row))


if __name__ == "__main__":
    main()
