"""DeepSeek prompts: what we render is what deepseek-recipe makes of the same request, to the id."""

import json
import random
from typing import Any, Final

import deepseek_recipe
import pytest

from finback.shared.codec.control_tokens import ControlToken
from finback.shared.codec.dialogue import Conversation, Tool, ToolCall, ToolChoice, Turn
from finback.shared.codec.load import Codec, load_codec
from finback.shared.errors import ConfigError, InvalidRequest
from finback.shared.wire.messages.generate import GrammarSpec
from support.byte_tokenizer import byte_tokenizer_json, text_files

NUM_CONVERSATIONS: Final = 2000
SPECIAL: Final = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜image｜>")
ADDED: Final = ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜")
VERSIONS: Final = {"deepseek-v4": "DeepSeek-V4-Pro", "deepseek-v4.1": "DeepSeek-V4.1-Flash"}
WORDS: Final = (
    "Hello", "naïve café", "天気はどう", "😀👩‍👩‍👧", "<think>", "</think>", "<｜User｜>", "｜DSML｜", "\n\n", "  ", "\t",
    "<｜end▁of▁sentence｜>", "</｜DSML｜parameter>", '"quoted" \\ back', "e\u0301", "json", "{}", "<tool_result>", "\u2028",
)  # fmt: skip
SCHEMA: Final = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "Wo? 市"},
        "days": {"type": "integer"},
    },
    "required": ["city"],
}


def tokenizer_json(version: str) -> str:
    system = ("<｜System｜>",) if version == "deepseek-v4.1" else ()
    return byte_tokenizer_json(SPECIAL, (*ADDED, *system))


def codec(version: str) -> Codec:
    return load_codec(text_files(tokenizer_json(version), {}, 257))


class Draw:
    """A random conversation, as ours and as the body of a Chat Completions request."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.messages: list[dict[str, Any]] = []
        self.turns: list[Turn] = []
        self.body: dict[str, Any] = {"messages": self.messages}
        self.fields: dict[str, Any] = {}
        self._tools()
        self._thinking()
        self._answer()
        if self._random.random() < 0.6:
            self._add("system")
        for _ in range(self._random.randint(1, 5)):
            self._round()
        self._add("user")
        # The recipe refuses a prefix where there are tools or calls.
        has_calls = "tools" in self.fields or any(turn.tool_calls for turn in self.turns)
        if not has_calls and self._random.random() < 0.5:
            text = self._text() or "So"
            self.messages.append({"role": "assistant", "content": text, "prefix": True})
            self.turns.append(Turn(role="assistant", content=text))
            self.fields["continues_last"] = True

    @property
    def conversation(self) -> Conversation:
        return Conversation(turns=tuple(self.turns), **self.fields)

    def _text(self) -> str:
        words = self._random.choices(WORDS, k=self._random.randint(0, 5))
        return self._random.choice(["", " "]).join(words)

    def _add(self, role: Any) -> None:
        text = self._text() or "x"
        self.messages.append({"role": role, "content": text})
        self.turns.append(Turn(role=role, content=text))

    def _round(self) -> None:
        self._add("user")
        if self._random.random() < 0.2:
            self._add("user")
        if self._random.random() < 0.1:
            self._add("system")
        calls = self._calls() if self._random.random() < 0.4 else ()
        self._assistant(calls)
        for call in self._random.sample(calls, len(calls)):
            text = self._text()
            self.messages.append({"role": "tool", "tool_call_id": call.call_id, "content": text})
            self.turns.append(Turn(role="tool", content=text, call_id=call.call_id))
        if calls:
            self._assistant(())

    def _assistant(self, calls: tuple[ToolCall, ...]) -> None:
        text = self._text()
        reasoning = self._text() if self._random.random() < 0.6 else ""
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = [
                {"id": call.call_id, "type": "function",
                 "function": {"name": call.name, "arguments": call.arguments}}
                for call in calls
            ]  # fmt: skip
        self.messages.append(message)
        self.turns.append(
            Turn(role="assistant", content=text, reasoning=reasoning, tool_calls=calls)
        )

    def _calls(self) -> tuple[ToolCall, ...]:
        number = self._random.randint(1, 3)
        return tuple(
            ToolCall(
                call_id=f"c{len(self.turns)}_{index}", name=f"f{index}", arguments=self._json()
            )
            for index in range(number)
        )

    def _json(self) -> str:
        values: dict[str, Any] = {"city": self._text(), "days": self._random.randint(-9, 99)}
        values |= {"list": [1.5, None, {"a": self._text()}], "yes": True}
        kept = self._random.sample(sorted(values), self._random.randint(0, 4))
        return json.dumps({key: values[key] for key in kept}, ensure_ascii=False)

    def _tools(self) -> None:
        number = self._random.choice([0, 0, 1, 3])
        tools = tuple(
            Tool(name=f"f{index}", description=self._text(), parameters=SCHEMA)
            for index in range(number)
        )
        if not tools:
            return
        self.fields["tools"] = tools
        self.body["tools"] = [{"type": "function", "function": _function(tool)} for tool in tools]
        if self._random.random() < 0.3:
            self.body["tool_choice"] = "none"
            self.fields["tool_choice"] = ToolChoice(mode="none")

    def _thinking(self) -> None:
        efforts = [None, "none", "minimal", "low", "medium", "high", "xhigh", "max"]
        effort = self._random.choice(efforts)
        if effort is not None:
            self.body["reasoning_effort"] = effort
            self.fields["effort"] = effort
        elif self._random.random() < 0.5:
            self.body["thinking"] = {"type": "disabled"}
            self.fields["is_thinking"] = False
        is_off = effort == "none" or "is_thinking" in self.fields
        if is_off and self.fields.get("tools") and self._random.random() < 0.5:
            named = self._random.random() < 0.5
            function = {"type": "function", "function": {"name": "f0"}}
            self.body["tool_choice"] = function if named else "required"
            names = ("f0",) if named else ()
            self.fields["tool_choice"] = ToolChoice(mode="required", names=names)

    def _answer(self) -> None:
        kind = self._random.choice(["text", "text", "json_schema", "regex"])
        if kind == "json_schema":
            schema = {"name": "a", "schema": SCHEMA}
            self.body["response_format"] = {"type": kind, "json_schema": schema}
            self.fields["answer"] = GrammarSpec(kind=kind, text=json.dumps(SCHEMA))


def _function(tool: Tool) -> dict[str, Any]:
    found: dict[str, Any] = {"name": tool.name, "parameters": tool.parameters}
    return found | ({"description": tool.description} if tool.description else {})


def _encoding(version: str) -> Any:
    is_v41 = version == "deepseek-v4.1"
    name = "DeepseekV41Encoding" if is_v41 else "DeepseekV4Encoding"
    tokenizer = deepseek_recipe.Tokenizer.from_str(tokenizer_json(version))
    return getattr(deepseek_recipe, name)().with_tokenizer(tokenizer)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_same_prompt_as_the_recipe(version: str) -> None:
    ours = codec(version)
    assert ours.output.name == version
    assert ours.prompt is not None
    encoding = _encoding(version)
    options = deepseek_recipe.ConversionOptions()
    for seed in range(NUM_CONVERSATIONS):
        draw = Draw(seed)
        request = deepseek_recipe.ChatCompletionRequest(draw.body | {"model": VERSIONS[version]})
        theirs = request.convert(options).conversation
        pieces = ours.prompt.render(draw.conversation)
        text = "".join(p.spelling if isinstance(p, ControlToken) else p for p in pieces)
        assert text == encoding.render_conversation(theirs).prompt, draw.body
        if seed % 10 == 0:
            assert ours.tokenizer.encode_pieces(pieces) == encoding.encode(theirs), draw.body


def test_json_object_mode_is_told_in_the_prompt() -> None:
    ours = codec("deepseek-v4")
    assert ours.prompt is not None
    turns = (Turn(role="user", content="as json"),)
    asked = Conversation(turns=turns, answer=GrammarSpec(kind="json_object"))
    body = {
        "model": "DeepSeek-V4-Pro",
        "messages": [{"role": "user", "content": "as json"}],
        "response_format": {"type": "json_object"},
    }
    request = deepseek_recipe.ChatCompletionRequest(body)
    theirs = request.convert(deepseek_recipe.ConversionOptions()).conversation
    prompt = deepseek_recipe.DeepseekV4Encoding().render_conversation(theirs).prompt
    pieces = ours.prompt.render(asked)
    assert "".join(p.spelling if isinstance(p, ControlToken) else p for p in pieces) == prompt


def test_a_forced_call_while_thinking_is_left_to_the_grammar() -> None:
    ours = codec("deepseek-v4")
    assert ours.prompt is not None
    asked = Conversation(
        turns=(Turn(role="user", content="?"),),
        tools=(Tool(name="f"),),
        tool_choice=ToolChoice(mode="required"),
    )
    last = ours.prompt.render(asked)[-1]
    assert isinstance(last, ControlToken)
    assert last.spelling == "<think>"
    assert ours.output.grammar(asked) is not None


def test_what_it_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = codec("deepseek-v4")
    assert ours.prompt is not None
    with pytest.raises(InvalidRequest, match="documents"):
        ours.prompt.render(
            Conversation(turns=(Turn(role="user", content="?"),), documents=({"text": "a"},))
        )
    lacking = text_files(byte_tokenizer_json(SPECIAL, ADDED), {}, 257)
    with pytest.raises(ConfigError, match=r"the vocabulary lacks <｜System｜>"):
        load_codec(lacking, output_format="deepseek-v4.1")
    monkeypatch.setitem(__import__("sys").modules, "deepseek_recipe", None)
    with pytest.raises(ConfigError, match=r"finback\[deepseek\]"):
        codec("deepseek-v4")
