"""The request API on the bus: the same JSON, numbered replies, a final marker."""

import asyncio
import json
from typing import Any

import httpx
import nats
import pytest
from nats.aio.msg import Msg

from support.gateway_stack import GatewayStack

MODEL = "SmolLM2-135M-Instruct"
BODY: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "one two three"}]}


async def ask(stack: GatewayStack, endpoint: str, body: Any, **headers: str) -> Msg:
    connection = await nats.connect(stack.nats_url)
    try:
        payload = body if isinstance(body, bytes) else json.dumps(body).encode()
        subject = f"{stack.prefix}.v1.api.{endpoint}"
        return await connection.request(subject, payload, timeout=10, headers=headers or None)
    finally:
        await connection.close()


async def stream(stack: GatewayStack, endpoint: str, body: Any) -> list[Msg]:
    connection = await nats.connect(stack.nats_url)
    messages: list[Msg] = []
    done = asyncio.Event()

    async def take(message: Msg) -> None:
        messages.append(message)
        if (message.headers or {}).get("Finback-Final"):
            done.set()

    try:
        inbox = connection.new_inbox()
        await connection.subscribe(inbox, cb=take)
        subject = f"{stack.prefix}.v1.api.{endpoint}"
        payload = json.dumps({**body, "stream": True}).encode()
        await connection.publish(subject, payload, reply=inbox)
        async with asyncio.timeout(10):
            await done.wait()
    finally:
        await connection.close()
    return messages


async def test_one_reply(stack: GatewayStack) -> None:
    reply = await ask(stack, "chat.completions", BODY, **{"Finback-Request-Id": "from-nats"})
    answer = json.loads(reply.data)
    assert answer["choices"][0]["message"]["content"] == "one two three"
    assert (reply.headers or {})["Finback-Request-Id"] == "from-nats"
    text = json.loads((await ask(stack, "completions", {"model": MODEL, "prompt": "a b"})).data)
    assert text["choices"][0]["text"] == "a b"
    models = json.loads((await ask(stack, "models", b"")).data)
    assert models["data"][0]["id"] == MODEL


async def test_numbered_stream(stack: GatewayStack) -> None:
    messages = await stream(stack, "chat.completions", BODY)
    headers = [message.headers or {} for message in messages]
    assert [int(header["Finback-Seq"]) for header in headers] == list(range(len(messages)))
    assert messages[-1].data == b""
    assert headers[-1]["Finback-Final"] == "end"
    assert all("Finback-Final" not in header for header in headers[:-1])
    chunks = [json.loads(message.data) for message in messages[:-1]]
    deltas = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks]
    assert "".join(deltas) == "one two three"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({**BODY, "model": "x"}, "404", "model_not_found"),
        ({**BODY, "n": 0}, "400", "invalid_value"),
        (b"{", "400", "invalid_json"),
    ],
)
async def test_errors(stack: GatewayStack, body: Any, status: str, code: str) -> None:
    reply = await ask(stack, "chat.completions", body)
    headers = reply.headers or {}
    assert headers["Nats-Service-Error-Code"] == status
    assert json.loads(reply.data)["error"]["code"] == code
    if isinstance(body, dict):
        messages = await stream(stack, "chat.completions", body)
        assert len(messages) == 1
        final = messages[0].headers or {}
        assert final["Finback-Final"] == "error"
        assert final["Nats-Service-Error-Code"] == status


async def test_the_largest_body_is_read(stack: GatewayStack) -> None:
    reply = await ask(stack, "chat.completions", b" " * (8 * 2**20 - 8192) + b"{}")
    assert (reply.headers or {})["Nats-Service-Error-Code"] == "400"


async def test_every_api_answers(stack: GatewayStack) -> None:
    messages = {"model": MODEL, "max_tokens": 9, "messages": BODY["messages"]}
    answer = json.loads((await ask(stack, "messages", messages)).data)
    assert answer["content"] == [{"type": "text", "text": "one two three"}]
    counted = json.loads((await ask(stack, "messages.count_tokens",
                                    {"model": MODEL, "messages": BODY["messages"]})).data)  # fmt: skip
    assert counted["input_tokens"] == answer["usage"]["input_tokens"]
    tokens = json.loads((await ask(stack, "tokenize", {"prompt": "Hello world"})).data)["tokens"]
    text = json.loads((await ask(stack, "detokenize", {"tokens": tokens})).data)
    assert text == {"prompt": "Hello world"}
    card = json.loads((await ask(stack, "models.retrieve", {"model": MODEL})).data)
    assert card["id"] == MODEL


async def test_stream_of_messages(stack: GatewayStack) -> None:
    body = {"model": MODEL, "max_tokens": 9, "messages": BODY["messages"]}
    documents = [json.loads(m.data) for m in await stream(stack, "messages", body) if m.data]
    assert [document["type"] for document in documents][:2] == [
        "message_start",
        "content_block_start",
    ]
    assert documents[-1] == {"type": "message_stop"}
    wrong = await ask(stack, "messages", {**body, "max_tokens": 0})
    assert json.loads(wrong.data)["error"]["type"] == "invalid_request_error"


async def test_a_client_that_leaves_ends_its_stream(slow_stack: GatewayStack) -> None:
    """The server tells the gateway that nobody hears; nothing else would."""
    connection = await nats.connect(slow_stack.nats_url)
    first = asyncio.Event()

    async def take(message: Msg) -> None:
        first.set()

    inbox = connection.new_inbox()
    await connection.subscribe(inbox, cb=take)
    body = {**BODY, "stream": True, "ignore_eos": True, "max_tokens": 5000}
    subject = f"{slow_stack.prefix}.v1.api.chat.completions"
    await connection.publish(subject, json.dumps(body).encode(), reply=inbox)
    async with asyncio.timeout(10):
        await first.wait()
    await connection.close()
    for _ in range(100):
        if metric(slow_stack, "finback_gateway_disconnects_total"):
            break
        await asyncio.sleep(0.05)
    assert metric(slow_stack, "finback_gateway_disconnects_total") == 1
    assert metric(slow_stack, "finback_gateway_cancels_total") >= 1
    assert metric(slow_stack, "finback_gateway_open_requests") == 0


def metric(stack: GatewayStack, name: str) -> float:
    lines = httpx.get(f"{stack.url}/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))
