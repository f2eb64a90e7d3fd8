"""Prompt formats: which is taken, where answers start, and that supplied text stays text."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finback.shared import config
from finback.shared.codec.control_tokens import ControlToken
from finback.shared.codec.dialogue import Conversation, Tool, ToolCall, ToolChoice, Turn
from finback.shared.codec.formats.select import NAMES, Clues, format_name
from finback.shared.codec.load import Codec, load_codec
from finback.shared.errors import ConfigError, InvalidRequest
from finback.shared.models.source import ModelSource
from support.byte_tokenizer import byte_tokenizer_json, text_files
from support.chat_templates import HERMES, LLAMA3, QWEN3
from support.parsed import parsed

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>",
           "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>")  # fmt: skip
PLAIN = ("<think>", "</think>", "<tool_call>", "</tool_call>")
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
QUESTION = Turn(role="user", content="?")


def codec(templates: dict[str, str] | str, **options: Any) -> Codec:
    given = {"default": templates} if isinstance(templates, str) else templates
    return load_codec(text_files(byte_tokenizer_json(SPECIAL, PLAIN), given, 257), **options)


def rendered(made: Codec, asked: Conversation) -> str:
    assert made.prompt is not None
    pieces = made.prompt.render(asked)
    return "".join(p.spelling if isinstance(p, ControlToken) else p for p in pieces)


def control(made: Codec, asked: Conversation) -> list[str]:
    assert made.prompt is not None
    return [p.spelling for p in made.prompt.render(asked) if isinstance(p, ControlToken)]


@pytest.mark.parametrize(
    ("clues", "name"),
    [
        (Clues(templates={}), "plain"),
        (Clues(templates={"default": CHATML}), "hermes"),
        (Clues(templates={"default": QWEN3}), "hermes"),
        (Clues(templates=HERMES), "hermes"),
        (Clues(templates={"default": LLAMA3}), "json"),
        (Clues(templates={"default": LLAMA3}, spellings=frozenset({"<|python_tag|>"})), "llama3"),
        (Clues(templates={"default": "tools <tool_call>\n<function=f>"}), "qwen3-coder"),
        (Clues(templates={"default": "{{ tools }}"}), "json"),
        (Clues(templates={}, spellings=frozenset({"｜DSML｜"})), "deepseek-v4"),
        (Clues(templates={}, spellings=frozenset({"｜DSML｜", "<｜System｜>"})), "deepseek-v4.1"),
    ],
)
def test_the_format_follows_from_the_files(clues: Clues, name: str) -> None:
    assert format_name(clues) == name
    assert format_name(clues, "plain") == "plain"


def test_a_format_can_be_forced_and_must_be_known() -> None:
    assert codec(CHATML, output_format="json").output.name == "json"
    assert codec({}, output_format="plain").output.name == "plain"
    with pytest.raises(ConfigError, match="use auto, "):
        codec(CHATML, output_format="yaml")
    assert set(config.settings()["output_format"][1].choices) == {"auto", *NAMES}


@pytest.mark.parametrize(
    ("template", "starts"),
    [
        (QWEN3, {None: "expected", True: "expected", False: "answer"}),
        (LLAMA3, {None: "answer", True: "answer", False: "answer"}),
        (CHATML + "<|im_start|>assistant\n<think>\n", dict.fromkeys((None, True, False), "opened")),
        ("{{ '<think>' if thinking else '</think>' }}", {None: "answer", True: "opened", False: "answer"}),
    ],
)  # fmt: skip
def test_where_answers_start(template: str, starts: dict[bool | None, str]) -> None:
    made = codec(template)
    answer = "thought</think>said"
    for thinking, start in starts.items():
        asked = Conversation(turns=(QUESTION,), is_thinking=thinking)
        found = parsed(made.output.parser(asked), answer)
        is_opened = start == "opened"
        wanted = [("reasoning", "thought"), ("text", "said")] if is_opened else [("text", answer)]
        assert found == wanted


def test_what_the_caller_sets_for_the_template_counts() -> None:
    made = codec("{{ '<think>' if enable_thinking else '</think>' }}")
    asked = Conversation(turns=(QUESTION,), is_thinking=False, variables={"enable_thinking": True})
    assert rendered(made, asked) == "<think>"
    assert parsed(made.output.parser(asked), "a") == [("reasoning", "a")]
    effort = Conversation(turns=(QUESTION,), effort="none")
    assert rendered(made, effort) == "</think>"
    assert parsed(made.output.parser(effort), "a") == [("text", "a")]


def test_tools_are_not_shown_under_none() -> None:
    made = codec(QWEN3)
    asked = Conversation(turns=(QUESTION,), tools=(Tool(name="f"),))
    assert '"f"' in rendered(made, asked)
    none = ToolChoice(mode="none")
    assert '"f"' not in rendered(made, replace(asked, tool_choice=none))


@st.composite
def conversations(draw: st.DrawFn) -> Conversation:
    """One conversation with text from `draw` wherever a caller can put text."""
    text = draw(st.lists(st.sampled_from([*SPECIAL, *PLAIN, "<|im_", "end|>", "x", "\n", '"', "é"]),
                         min_size=1, max_size=6).map("".join))  # fmt: skip
    return conversation_of(text)


def conversation_of(text: str) -> Conversation:
    schema = {"type": "object", "properties": {text: {"description": text, "enum": [text]}}}
    call = ToolCall(call_id="c", name="f", arguments=json.dumps({text: [text]}))
    return Conversation(
        turns=(
            Turn(role="system", content="s" + text),
            Turn(role="user", content="u" + text),
            Turn(role="assistant", content="", tool_calls=(call,)),
            Turn(role="tool", content="t" + text, call_id="c", name="f"),
            Turn(role="assistant", content="a" + text),
            Turn(role="user", content="u" + text + "."),
        ),
        tools=(Tool(name="f", description="d" + text, parameters=schema),),
        documents=({"title": "d" + text, "text": "d" + text},),
        variables={"style": "v" + text},
    )


@pytest.mark.parametrize("templates", [QWEN3, LLAMA3, HERMES, CHATML], ids=["qwen", "llama", "hermes", "chatml"])  # fmt: skip
@settings(max_examples=25)
@given(asked=conversations())
def test_nothing_supplied_becomes_a_control_token(
    templates: dict[str, str] | str, asked: Conversation
) -> None:
    made = codec(templates)
    assert control(made, asked) == control(made, conversation_of("x"))
    assert not any(0xF700 <= ord(char) < 0xF800 for char in rendered(made, asked))


def test_marks_written_as_json_escapes_are_taken_out() -> None:
    made = codec("{{ messages[0].content | tojson(ensure_ascii=true) }} tools")
    turns = (Turn(role="user", content="<|im_end|>"),)
    assert rendered(made, Conversation(turns=turns)) == '"<|im_end|>" tools'
    assert control(made, Conversation(turns=turns)) == []


def test_private_characters_of_the_user_are_kept() -> None:
    made = codec(CHATML)
    every = "".join(map(chr, range(0xF700, 0xF7FE)))
    turns = (Turn(role="user", content=every + "<|im_end|>"),)
    assert every in rendered(made, Conversation(turns=turns))
    everything = (Turn(role="user", content=every + "\uf7fe\uf7ff<|im_end|>"),)
    with pytest.raises(InvalidRequest, match="private-use"):
        rendered(made, Conversation(turns=everything))
    # Where nothing has to be marked, nothing is lacking.
    harmless = (Turn(role="user", content=every + "\uf7fe\uf7ff"),)
    assert every in rendered(made, Conversation(turns=harmless))


def test_the_embedded_model_can_be_given_tools(smollm_source: ModelSource) -> None:
    made = load_codec(smollm_source.text)
    assert made.output.name == "hermes"
    call = ToolCall(call_id="c", name="f", arguments='{"a": "é"}')
    asked = Conversation(
        turns=(
            Turn(role="system", content="Be brief."),
            QUESTION,
            Turn(role="assistant", content="Let me see.", tool_calls=(call, call)),
            Turn(role="tool", content="1", call_id="c"),
            Turn(role="tool", content="2", call_id="d"),
        ),
        tools=(Tool(name="f", description="Does."),),
    )
    text = rendered(made, asked)
    assert text.startswith("<|im_start|>system\nBe brief.\n\nYou may call functions")
    assert '{"name": "f", "description": "Does.", "parameters": {"type": "object"' in text
    one = '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>'
    assert f"<|im_start|>assistant\nLet me see.\n{one}\n{one}<|im_end|>" in text
    assert text.endswith(
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n"
        "</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert parsed(made.output.parser(asked), one) == [("call", "f", '{"a": "é"}', True)]
    # The default system turn of its template gives way to the tools.
    assert "SmolLM" not in rendered(made, Conversation(turns=(QUESTION,), tools=asked.tools))
