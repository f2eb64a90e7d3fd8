"""Gateways over DeepSeek V4 folders: one without a tokenizer, one with DeepSeek's special tokens."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from safetensors.numpy import save_file

from support import v4_tiny
from support.byte_tokenizer import byte_tokenizer_json
from support.gateway_stack import GatewayStack
from support.nats_server import NatsServer
from support.said import ADD, NOW, user

SPECIAL = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜image｜>")
ADDED = ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜")
# What the echo engine ends its answers with, and the ids of the first two of ADDED.
END, TURN = 2, "259:260"
CALL = (
    '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="add">\n'
    '<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="b" string="false">2</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
)


def folder_of(path: Path, tokenizer: str = "") -> Path:
    """No weights: a gateway reads none."""
    path.mkdir()
    raw = v4_tiny.published_config(
        v4_tiny.tiny_config(vocab_size=320, max_position_embeddings=4096), eos_token_id=[END, 257]
    )
    (path / "config.json").write_text(json.dumps(raw))
    if tokenizer:
        (path / "tokenizer.json").write_text(tokenizer)
    save_file({"none": np.zeros(1, np.float32)}, path / "model.safetensors")
    return path


def started(nats: NatsServer, folder: Path, name: str, **env: str) -> Iterator[GatewayStack]:
    settings = {"ECHO_STEP_MS": "1", "FINBACK_MODEL": str(folder), **env}
    made = GatewayStack(nats.url, name, folder.parent, settings)
    try:
        made.spawn("sampler")
        yield made.start()
    finally:
        made.stop()


@pytest.fixture(scope="module")
def bare(
    nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayStack]:
    folder = folder_of(tmp_path_factory.mktemp("bare") / "v4")
    yield from started(nats_server, folder, "v4bare", ECHO_TURN="300:301")


@pytest.fixture(scope="module")
def recipe(
    nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayStack]:
    tokenizer = byte_tokenizer_json(SPECIAL, ADDED)
    folder = folder_of(tmp_path_factory.mktemp("recipe") / "v4", tokenizer)
    yield from started(nats_server, folder, "v4recipe", ECHO_TURN=TURN)


def post(stack: GatewayStack, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{stack.url}{path}", json={"model": "v4", **body}, timeout=30)


def test_ids_in_and_ids_out_without_a_tokenizer(bare: GatewayStack) -> None:
    prompt = [5, 77, 319]
    reply = post(bare, "/v1/completions", prompt=prompt, max_tokens=8, logprobs=1)
    assert reply.status_code == 200, reply.text
    choice = reply.json()["choices"][0]
    assert (choice["text"], choice["token_ids"]) == ("", [*prompt, END])
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"]["tokens"][:3] == [f"<token {token}>" for token in prompt]
    with httpx.stream(
        "POST",
        f"{bare.url}/v1/completions",
        json={"model": "v4", "prompt": prompt, "max_tokens": 2, "stream": True},
        timeout=30,
    ) as stream:
        lines = [line[6:] for line in stream.iter_lines() if line.startswith("data: {")]
    told = [choice for line in lines for choice in json.loads(line)["choices"]]
    assert [token for choice in told for token in choice.get("token_ids", [])] == prompt[:2]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "a text"}, "prompt"),
        ("/v1/completions", {"prompt": [5], "stop": ["x"]}, "stop"),
        ("/v1/completions", {"prompt": [5], "echo": True}, "echo"),
        (
            "/v1/completions",
            {"prompt": [5], "structured_outputs": {"regex": "a+"}},
            "structured_outputs.regex",
        ),
        ("/v1/chat/completions", {"messages": user("hello")}, "messages"),
        ("/v1/messages", {"messages": user("hello"), "max_tokens": 4}, None),
        ("/v1/responses", {"input": "hello"}, None),
        ("/tokenize", {"prompt": "hello"}, "prompt"),
        ("/tokenize", {"messages": user("hello")}, "messages"),
        ("/detokenize", {"tokens": [5]}, "tokens"),
    ],
)
def test_text_is_refused_without_a_tokenizer(
    bare: GatewayStack, path: str, body: dict[str, Any], param: str | None
) -> None:
    reply = post(bare, path, **body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert "has no tokenizer" in error["message"]
    if param is not None:
        assert (error["param"], error["code"]) == (param, "no_tokenizer")


def test_deepseek_prompts_and_answers_are_chosen_by_the_vocabulary(recipe: GatewayStack) -> None:
    """Thinking and calls of the recipe's format, parsed; the echo says what the user says."""
    with openai.OpenAI(base_url=f"{recipe.url}/v1", api_key="none", max_retries=0) as client:
        create: Any = client.chat.completions.create
        assert client.models.retrieve("v4").model_dump()["output_format"] == "deepseek-v4"
        said = f"two sums</think>Adding.\n\n{CALL}"
        answer = create(model="v4", messages=user(said), tools=[ADD, NOW])
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.reasoning_content == "two sums"
    assert choice.message.content == "Adding."
    (call,) = choice.message.tool_calls
    assert call.function.name == "add"
    assert json.loads(call.function.arguments) == {"a": 1, "b": 2}
    tokens = post(recipe, "/tokenize", messages=user("Hi")).json()["tokens"]
    assert tokens[0] == 256
    assert tokens[-5:] == [259, *b"Hi", 260, 261]
