"""Random answers that a grammar allows, drawn token by token through the real grammar engine."""

import random

from llguidance import LLMatcher

from finback.services.sampler.compiler import Vocabulary
from finback.services.sampler.grammar_source import engine_text
from finback.services.sampler.model_vocabulary import TokenTable, engine_tokenizer
from finback.shared.wire.messages.generate import GrammarSpec

# Tokens that cross the borders of the parts of a grammar.
_LONG = (
    '"}', "}}", '": {"', "}\n</tool_call>", '"}}', '":', '", "', '{"', "<tool", "</tool_call>",
    "<tool_call>", "}\n", "\n{", "name", '{"name": "', ">\n", "</think>", "hink>\n\n{", "<tool_call>\n{",
    "<｜DSML｜tool_calls>", "<｜DSML｜ calls>", "\n\n<｜", "｜DSML｜", '">', "</｜DSML｜", '" string="true">',
    "</｜DSML｜parameter>", "</｜DSML｜ parameter>", "parameter", "invoke", "ing", '}\n{"', "; ",
    "<function=", "<parameter=", "\n</parameter>", "</function>\n", "get", "get_weather", "query", "_weather",
)  # fmt: skip
CONTROL = ("<|end|>", "<|python_tag|>")
TOKENS = [bytes([value]) for value in range(256)] + [text.encode() for text in (*_LONG, *CONTROL)]
SIZE = len(TOKENS)
END = SIZE - 2
MAX_TOKENS = 1500


def vocabulary(special: frozenset[str] = frozenset()) -> Vocabulary:
    """All bytes, some longer tokens, an end token and one more control token.

    `special`: those of the longer ones that are control tokens too.
    """
    control = [index for index, token in enumerate(TOKENS) if token.decode("latin-1") in special]
    table = TokenTable(tokens=TOKENS, control_ids=[*control, END, SIZE - 1], eos_ids=[END])
    made = engine_tokenizer(table, SIZE, _ByteTokenizer)  # type: ignore[arg-type]  # all that is used of it
    return Vocabulary(made, SIZE, (END,))


class _ByteTokenizer:
    """Encodes what a grammar forces, a token a byte."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


class Walk:
    """Draws answers of one grammar."""

    def __init__(self, vocabulary: Vocabulary, grammar: GrammarSpec) -> None:
        self._vocabulary = vocabulary
        self._start = LLMatcher(vocabulary.tokenizer, engine_text(grammar), log_level=0)
        assert not self._start.get_error(), self._start.get_error()

    def draw(self, seed: int) -> str | None:
        """One whole answer, or None where it became too long."""
        matcher, draw, answer = self._start.deep_copy(), random.Random(seed), b""
        for _ in range(MAX_TOKENS):
            mask = int.from_bytes(self._vocabulary.bitmask(matcher), "little")
            allowed = [token for token in range(SIZE) if mask >> token & 1]
            assert allowed, answer
            token = draw.choices(allowed, [_weight(token) for token in allowed])[0]
            if token == END:
                return answer.decode()
            assert matcher.consume_token(token), matcher.get_error()
            answer += TOKENS[token]
        return None

    def accepts(self, text: str) -> bool:
        """Is `text`, byte by byte, a whole answer."""
        matcher = self._start.deep_copy()
        is_taken = all(matcher.consume_token(value) for value in text.encode())
        return is_taken and matcher.is_accepting()


def _weight(token: int) -> float:
    """Mostly what ends things, so that answers stay short."""
    if token == END:
        return 60
    if token >= 256:
        return 30
    if chr(token) in '"}],:>':
        return 20
    return 3 if chr(token) in "abc12 \n" else 0.05 if token >= 128 else 0.3
