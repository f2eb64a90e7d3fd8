"""Chat templates: what we render is what transformers' apply_chat_template renders."""

import json
import random
from typing import Any, Final

import pytest
from tokenizers import Tokenizer as FastTokenizer
from transformers import PreTrainedTokenizerFast

from finback.shared.codec.control_tokens import ControlToken
from finback.shared.codec.dialogue import Conversation, Tool, ToolCall, Turn
from finback.shared.codec.load import Codec, load_codec
from finback.shared.models.source import open_source
from support.byte_tokenizer import byte_tokenizer_json, text_files
from support.chat_templates import HERMES, LLAMA3, QWEN3

SPECIAL: Final = (
    "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "<|python_tag|>",
)  # fmt: skip
PLAIN: Final = ("<think>", "</think>", "<tool_call>", "</tool_call>")
TEMPLATES: Final[dict[str, dict[str, str]]] = {
    "qwen3": {"default": QWEN3},
    "llama3": {"default": LLAMA3},
    "hermes": HERMES,
}
WORDS: Final = (
    "Hi",
    " naïve ",
    "天気",
    "😀",
    "\n",
    "<b>&amp;</b>",
    '"q"',
    "\\",
    "a\tb",
    "'",
    "{x}",
)
PARAMETERS: Final = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "Wo? <市>"},
        "n": {"type": ["integer", "null"]},
    },
    "required": ["city"],
}
NUM_DRAWS: Final = 150


def codec_of(name: str) -> Codec:
    return load_codec(text_files(byte_tokenizer_json(SPECIAL, PLAIN), TEMPLATES[name], 257))


def transformers_of(name: str) -> Any:
    fast = FastTokenizer.from_str(byte_tokenizer_json(SPECIAL, PLAIN))
    found = TEMPLATES[name]
    return tokenizer_of(fast, found if len(found) > 1 else found["default"])


def tokenizer_of(fast: FastTokenizer, template: Any) -> Any:
    made: Any = PreTrainedTokenizerFast(tokenizer_object=fast)  # type: ignore[no-untyped-call]  # untyped upstream
    made.chat_template = template
    return made


def draw(seed: int, *, max_calls: int) -> tuple[Conversation, list[dict[str, Any]], dict[str, Any]]:
    """A conversation, and the same as messages and arguments of apply_chat_template."""
    dice = random.Random(seed)

    def text() -> str:
        return "".join(dice.choices(WORDS, k=dice.randint(1, 5))) + "."

    turns: list[Turn] = []
    messages: list[dict[str, Any]] = []

    def say(role: Any) -> None:
        turns.append(Turn(role=role, content=text()))
        messages.append({"role": role, "content": turns[-1].content})

    tools: list[dict[str, Any]] = []
    fields: dict[str, Any] = {}
    arguments: dict[str, Any] = {"add_generation_prompt": True}
    if dice.random() < 0.5:
        say("system")
    if dice.random() < 0.6:
        described = {"description": text()} if dice.random() < 0.7 else {}
        function = {"name": "f", **described, "parameters": PARAMETERS}
        tools = [{"type": "function", "function": function}]
        fields["tools"] = (
            Tool(name="f", description=described.get("description", ""), parameters=PARAMETERS),
        )
        arguments["tools"] = tools
    for _ in range(dice.randint(1, 3)):
        say("user")
        if tools and dice.random() < 0.6:
            calls = [
                {"city": text(), "n": 1.0, "é": None} for _ in range(dice.randint(1, max_calls))
            ]
            reasoning = {"reasoning_content": text()} if dice.random() < 0.5 else {}
            messages.append(
                {"role": "assistant", "content": "", **reasoning, "tool_calls": [
                    {"id": f"c{i}", "type": "function", "function": {"name": "f", "arguments": call}}
                    for i, call in enumerate(calls)
                ]}
            )  # fmt: skip
            turns.append(
                Turn(
                    role="assistant",
                    reasoning=reasoning.get("reasoning_content", ""),
                    tool_calls=tuple(
                        ToolCall(call_id=f"c{i}", name="f", arguments=json.dumps(call))
                        for i, call in enumerate(calls)
                    ),
                )
            )
            for index in range(len(calls)):
                answer = text()
                messages.append(
                    {"role": "tool", "tool_call_id": f"c{index}", "name": "f", "content": answer}
                )
                turns.append(Turn(role="tool", content=answer, call_id=f"c{index}", name="f"))
        say("assistant")
    if dice.random() < 0.3:
        fields["continues_last"] = True
        arguments |= {"continue_final_message": True, "add_generation_prompt": False}
    else:
        say("user")
    if dice.random() < 0.5:
        fields["is_thinking"] = arguments["enable_thinking"] = arguments["thinking"] = (
            dice.random() < 0.5
        )
    if dice.random() < 0.3:
        fields["documents"] = ({"title": "T", "text": text()}, {"title": "", "text": text()})
        arguments["documents"] = list(fields["documents"])
    if dice.random() < 0.3:
        fields["variables"] = {"style": text()}
        arguments["style"] = fields["variables"]["style"]
    return Conversation(turns=tuple(turns), **fields), messages, arguments


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_same_prompt_as_transformers(name: str) -> None:
    ours, theirs = codec_of(name), transformers_of(name)
    assert ours.prompt is not None
    for seed in range(NUM_DRAWS):
        asked, messages, arguments = draw(seed, max_calls=1 if name == "llama3" else 3)
        pieces = ours.prompt.render(asked)
        text = "".join(p.spelling if isinstance(p, ControlToken) else p for p in pieces)
        wanted = theirs.apply_chat_template(messages, tokenize=False, **arguments)
        assert text == wanted
        ids = theirs.encode(wanted, add_special_tokens=False)
        assert ours.tokenizer.encode_pieces(pieces) == ids


def test_the_embedded_model_without_tools() -> None:
    source = open_source("embedded")
    ours = load_codec(source.text)
    theirs = tokenizer_of(
        FastTokenizer.from_str(ours.tokenizer.to_json()), source.text.chat_template
    )
    assert ours.prompt is not None
    for seed in range(40):
        asked, messages, arguments = draw(seed, max_calls=1)
        if asked.tools:
            continue
        pieces = ours.prompt.render(asked)
        wanted = theirs.apply_chat_template(messages, tokenize=False, **arguments)
        assert ours.tokenizer.encode_pieces(pieces) == theirs.encode(
            wanted, add_special_tokens=False
        )
