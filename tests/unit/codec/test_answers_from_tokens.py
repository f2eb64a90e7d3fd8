"""From token ids to events, as the gateway does it: bytes, characters and markers split anywhere."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finback.shared.codec.answer_text import AnswerText
from finback.shared.codec.dialogue import Conversation, Tool, Turn
from finback.shared.codec.load import Codec, load_codec
from finback.shared.codec.output import OutputEvent
from support.byte_tokenizer import byte_tokenizer_json, text_files
from support.chat_templates import QWEN3
from support.parsed import parts_of

MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
ASKED = Conversation(turns=(Turn(role="user", content="?"),), tools=(Tool(name="f"),))


@cache
def codec(*, are_special: bool) -> Codec:
    ends = ("<|im_start|>", "<|im_end|>")
    special, plain = ((*ends, *MARKERS), ()) if are_special else (ends, MARKERS)
    return load_codec(text_files(byte_tokenizer_json(special, plain), {"default": QWEN3}, 257))


def ids_of(made: Codec, text: str) -> list[int]:
    """Bytes, and the markers by id, as the model writes them."""
    ids: list[int] = []
    for piece in made.tokenizer.control.split(text):
        ids += list(piece.encode()) if isinstance(piece, str) else [piece.token_id]
    return ids


@pytest.mark.parametrize("are_special", [True, False])
@settings(max_examples=60)
@given(
    thought=st.text(st.characters(codec="utf-8", categories=("L", "So")), max_size=8),
    city=st.text(
        st.characters(codec="utf-8", exclude_characters='"\\', min_codepoint=32), max_size=8
    ),
    cuts=st.lists(st.integers(0, 200), max_size=12),
)
def test_events_from_ids(are_special: bool, thought: str, city: str, cuts: list[int]) -> None:
    made = codec(are_special=are_special)
    known = made.tokenizer.control.by_spelling
    shown = {known[mark].token_id: mark.encode() for mark in made.output.markers if mark in known}
    parser = made.output.parser(ASKED)
    arguments = f'{{"city": "{city}"}}'
    ids = ids_of(
        made,
        f"<think>\n{thought}\n</think>\n\nSo.\n<tool_call>\n"
        f'{{"name": "f", "arguments": {arguments}}}\n</tool_call>',
    )
    text = AnswerText[None](made.tokenizer, (), shown=shown)
    events: list[OutputEvent] = []
    last = 0
    for cut in [*sorted(cuts), len(ids)]:
        events += parser.push(text.push(ids[last:cut]).text)
        last = max(last, cut)
    events += [*parser.push(text.finish().text), *parser.finish()]
    wanted = [("reasoning", thought)] if thought else []
    assert parts_of(events) == [*wanted, ("text", "So."), ("call", "f", arguments, True)]
