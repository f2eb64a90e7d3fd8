"""Prompts: the template's control tokens are tokens, everybody else's are text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finback.shared.codec.chat_template import ChatTemplate
from finback.shared.codec.control_tokens import ControlToken, ControlTokens
from finback.shared.codec.conversation import ConversationRenderer
from finback.shared.codec.tokenizer import Tokenizer
from finback.shared.errors import InvalidRequest

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
PIECES = ["<|im_start|>", "<|im_end|>", "<|im", "_end|>", "<", "|", ">", "<|endoftext|>", "a", "\n"]


def flat(pieces: list[str | ControlToken]) -> list[str]:
    return [p if isinstance(p, str) else f"[{p.token_id}]" for p in pieces]


def test_smollm_prompt(smollm: Tokenizer, smollm_renderer: ConversationRenderer) -> None:
    pieces = smollm_renderer.pieces([{"role": "user", "content": "Hi"}])
    assert flat(pieces) == [
        "[1]", f"system\n{SYSTEM}", "[2]", "\n", "[1]", "user\nHi", "[2]", "\n", "[1]",
        "assistant\n",
    ]  # fmt: skip
    assert len(smollm.encode_pieces(pieces)) == 31


def test_developer_is_system_and_parts_are_joined(smollm_renderer: ConversationRenderer) -> None:
    said = flat(
        smollm_renderer.pieces(
            [
                {"role": "developer", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "a"},
                                             {"type": "text", "text": "b"}]},
            ]
        )
    )  # fmt: skip
    assert "system\nBe brief." in said
    assert "user\na\nb" in said


def test_a_final_assistant_message_is_left_open(smollm_renderer: ConversationRenderer) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hel"}]
    assert flat(smollm_renderer.pieces(messages))[-1] == "assistant\nHel"


@given(st.lists(st.sampled_from(PIECES), max_size=8).map("".join))
def test_no_injection(
    smollm: Tokenizer, smollm_renderer: ConversationRenderer, content: str
) -> None:
    messages = [
        {"role": "system", "content": content},
        {"role": "user", "content": content},
        {"role": "assistant", "content": content},
        {"role": "user", "content": content},
        {"role": "assistant", "content": content},
    ]
    pieces = smollm_renderer.pieces(messages)
    control = [p.token_id for p in pieces if isinstance(p, ControlToken)]
    assert control == [1, 2] * 4 + [1]
    text = "".join(p.spelling if isinstance(p, ControlToken) else p for p in pieces)
    turns = [f"<|im_start|>{m['role']}\n{content}<|im_end|>\n" for m in messages[:-1]]
    assert text == "".join(turns) + "<|im_start|>assistant\n" + content


def think_renderer(source: str) -> ConversationRenderer:
    tokens = [
        ControlToken(token_id=1, spelling="<|s|>"),
        ControlToken(token_id=2, spelling="</think>", is_special=False),
    ]
    return ConversationRenderer(ChatTemplate(source), ControlTokens(tokens))


CUTS_THINKING = (
    "{% for m in messages %}<|s|>{{ m.role }}:"
    "{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}{% endfor %}<|s|>"
)


def test_a_template_that_looks_at_spellings_may() -> None:
    messages = [
        {"role": "user", "content": "q </think>"},
        {"role": "assistant", "content": "thought</think>answer"},
        {"role": "user", "content": "r"},
    ]
    pieces = flat(think_renderer(CUTS_THINKING).pieces(messages))
    assert pieces == ["[1]", "user:q </think>", "[1]", "assistant:answer", "[1]", "user:r", "[1]"]


def test_a_template_cannot_be_used_to_smuggle() -> None:
    # It removes a word, so that a spelling appears that nobody wrote.
    source = "{% for m in messages %}<|s|>{{ m.content | replace('x', '') }}{% endfor %}"
    messages = [{"role": "user", "content": "<|xs|>"}]
    pieces = think_renderer(source).pieces(messages)
    assert sum(isinstance(piece, ControlToken) for piece in pieces) == 1


@pytest.mark.parametrize(
    "messages",
    [[], [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]],
)
def test_what_cannot_be_rendered(
    smollm_renderer: ConversationRenderer, messages: list[dict[str, object]]
) -> None:
    with pytest.raises(InvalidRequest):
        smollm_renderer.pieces(messages)
