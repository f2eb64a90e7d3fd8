"""The text side of the embedded model, through the gateway's own loading."""

import json
from dataclasses import replace
from functools import partial

import anyio
import pytest

from finback.services.gateway.served_model import ServedModel
from finback.services.gateway.service import load_model
from finback.shared.codec.dialogue import Conversation, Tool, ToolChoice, Turn
from finback.shared.config import StackConfig
from finback.shared.errors import ConfigError, InvalidRequest

ASKED = Conversation(turns=(Turn(role="user", content="Hi"),), tools=(Tool(name="f"),))


@pytest.fixture(scope="module")
def model() -> ServedModel:
    return load_model(StackConfig(model_name="m"))


def num_tokens(model: ServedModel, conversation: Conversation) -> int:
    return anyio.run(partial(model.encode_conversation, conversation, "")).num_tokens


def test_tools_are_in_the_prompt_unless_they_may_not_be_called(model: ServedModel) -> None:
    none = replace(ASKED, tool_choice=ToolChoice(mode="none"))
    assert num_tokens(model, none) == num_tokens(model, replace(ASKED, tools=())) == 31
    assert num_tokens(model, ASKED) > 100
    assert model.card()["output_format"] == "hermes"


def test_a_last_turn_is_answered_or_continued(model: ServedModel) -> None:
    turns = (*ASKED.turns, Turn(role="assistant", content="Hel"))
    asked = Conversation(turns=turns)
    assert num_tokens(model, asked) > num_tokens(model, replace(asked, continues_last=True))


def test_what_is_nested_too_deeply_is_refused(model: ServedModel) -> None:
    schema: dict[str, object] = {"type": "string"}
    for _ in range(3000):
        schema = {"type": "object", "properties": {"a": schema}}
    tool = Tool(name="f", parameters=schema, strict=True)
    deep = replace(ASKED, tools=(tool,), tool_choice=ToolChoice(mode="required"))
    with pytest.raises(InvalidRequest, match="too deeply"):
        num_tokens(model, deep)
    with pytest.raises(InvalidRequest, match="too deeply"):
        model.format.grammar(deep)
    with pytest.raises(RecursionError):
        json.dumps(schema)


def test_an_unknown_format_stops_the_start() -> None:
    with pytest.raises(ConfigError, match="output_format 'yaml' is not known"):
        load_model(StackConfig(model_name="m", output_format="yaml"))
