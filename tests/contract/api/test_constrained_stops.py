"""Stops beside a grammar: the engine says what it is told, the real sampler where that may end."""

import json
from typing import Any

import anthropic
import httpx
import openai
import pytest

from finback.shared.codec.load import load_tokenizer
from finback.shared.models.source import open_source
from support.gateway_stack import GatewayStack

MODEL = "SmolLM2-135M-Instruct"
SAID = '{"name": "Bo, of the hill", "ages": [3, 4]}'
JSON = {"response_format": {"type": "json_object"}}
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f=go>", "schema": {"type": "string"}, "end": "</f>"}],
    "triggers": ["<f="],
}


@pytest.fixture(scope="module")
def checked(stack: GatewayStack) -> GatewayStack:
    """When the sampler is there, however long a busy machine takes to start it."""
    if "sampler" not in stack.processes:
        stack.spawn("sampler")
    body = {"model": MODEL, "prompt": "a", "structured_outputs": {"regex": "a"}}
    for _ in range(10):
        reply = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=60)
        if reply.status_code == 200:
            return stack
    raise AssertionError(reply.text)


def ask(stack: GatewayStack, said: str, **options: Any) -> list[tuple[str, str, Any]]:
    """(text, finish reason, stop reason) of each choice, streamed as at once."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": said}], **options}
    url = f"{stack.url}/v1/chat/completions"
    reply = httpx.post(url, json=body, timeout=30)
    assert reply.status_code == 200, reply.text
    found = [
        (choice["message"]["content"], choice["finish_reason"], choice.get("stop_reason"))
        for choice in reply.json()["choices"]
    ]
    texts = [""] * len(found)
    with httpx.stream("POST", url, json={**body, "stream": True}, timeout=30) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    texts[choice["index"]] += choice["delta"].get("content") or ""
    assert texts == [text for text, _, _ in found]
    return found


@pytest.mark.parametrize("stop", [[","], ["}"], ['"'], [" of", "hill"], ["\n"], ["3, 4]}"]])
def test_json_is_whole_whatever_the_stops(checked: GatewayStack, stop: list[str]) -> None:
    assert ask(checked, SAID, stop=stop, **JSON) == [(SAID, "stop", None)]


def test_without_a_grammar_they_cut(checked: GatewayStack) -> None:
    assert ask(checked, SAID, stop=",") == [('{"name": "Bo', "stop", ",")]


def test_a_regular_expression_that_may_end_there(checked: GatewayStack) -> None:
    lines = {"structured_outputs": {"regex": "([a-z]+\n)*[a-z]{3,}"}}
    found = ask(checked, "one\ntwo\nthree", stop=["\nt", "o\nt"], **lines)
    assert found == [("one", "stop", "\nt")]
    # "tw" is too short to be the end.
    found = ask(checked, "one\ntwo\nthree", stop="o\nt", **lines)
    assert found == [("one\ntwo\nthree", "stop", None)]


def test_free_text_stops_and_islands_do_not(checked: GatewayStack) -> None:
    tag = {"structured_outputs": {"structural_tag": TAG}}
    said = 'go <f=go>"one stop"</f> and stop here'
    found = ask(checked, said, stop="stop", n=2, **tag)
    assert found == [('go <f=go>"one stop"</f> and ', "stop", "stop")] * 2


def test_a_cut_by_length_is_told(checked: GatewayStack) -> None:
    text, reason, _ = ask(checked, SAID, stop=",", max_tokens=6, **JSON)[0]
    assert SAID.startswith(text) and text != SAID and "," in text
    assert reason == "length"


def test_stop_tokens_of_the_callers(checked: GatewayStack) -> None:
    tokenizer = load_tokenizer(open_source("embedded").text)
    own = list({*tokenizer.encode(SAID), *tokenizer.encode("\n")})
    assert ask(checked, SAID, stop_token_ids=own, **JSON) == [(SAID, "stop", None)]
    newline = tokenizer.encode("\n")
    found = ask(
        checked, "one\ntwo", stop_token_ids=newline, structured_outputs={"regex": "[a-z\n]+"}
    )
    assert found == [("one", "stop", newline[0])]


def test_counts_are_those_up_to_the_stop(checked: GatewayStack) -> None:
    with openai.OpenAI(base_url=f"{checked.url}/v1", api_key="none", max_retries=0) as client:
        told = client.completions.create(
            model=MODEL,
            prompt="alpha beta gamma delta",
            stop=" gam",
            echo=True,
            max_tokens=50,
            extra_body={"structured_outputs": {"regex": "[a-z ]+"}},
        )
    assert told.choices[0].text == "alpha beta gamma delta" + "alpha beta"
    assert told.usage is not None and told.usage.completion_tokens == 3


def test_ids_are_told_up_to_the_stop_token(checked: GatewayStack) -> None:
    tokenizer = load_tokenizer(open_source("embedded").text)
    said, newline = "one two\nthree", tokenizer.encode("\n")
    body = {
        "model": MODEL,
        "prompt": said,
        "stop_token_ids": newline,
        "return_token_ids": True,
        "max_tokens": 50,
        "structured_outputs": {"regex": "[a-z \n]+"},
    }
    reply = httpx.post(f"{checked.url}/v1/completions", json=body, timeout=30)
    (choice,) = reply.json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("one two", "stop")
    assert choice["token_ids"] == tokenizer.encode("one two") + newline
    assert reply.json()["usage"]["completion_tokens"] == len(choice["token_ids"])


def test_messages_have_them_too(checked: GatewayStack) -> None:
    with anthropic.Anthropic(base_url=checked.url, api_key="none", max_retries=0) as client:
        told = client.messages.create(
            model=MODEL,
            max_tokens=100,
            messages=[{"role": "user", "content": '{"a": "x, y"}'}],
            stop_sequences=[",", "}"],
            extra_body={"structured_outputs": {"json_object": True}},
        )
    assert told.content[0].type == "text" and told.content[0].text == '{"a": "x, y"}'
    assert (told.stop_reason, told.stop_sequence) == ("end_turn", None)
