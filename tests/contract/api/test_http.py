"""What clients see on the wire: status codes, envelopes, headers, bytes of a stream."""

import asyncio
import http.client
import json
import socket
import time
from typing import Any

import httpx
import pytest

from finback.services.gateway import http_protocol
from finback.services.gateway.http_server import HttpServer, listen
from support.gateway_stack import GatewayStack

MODEL = "SmolLM2-135M-Instruct"
CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "one two three"}]}


def post(stack: GatewayStack, body: Any, path: str = CHAT, **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(stack.url + path, content=content, headers=headers, timeout=20)


@pytest.mark.parametrize(
    ("body", "status", "param", "code"),
    [
        (b"{", 400, None, "invalid_json"),
        (b"", 400, None, "invalid_json"),
        (b"[" * 50_000, 400, None, "invalid_json"),
        (b'{"model": 1e999}', 400, None, "invalid_json"),
        (b'{"model": ' + b"9" * 5_000 + b"}", 400, None, "invalid_json"),
        ({**BODY, "model": "nope"}, 404, "model", "model_not_found"),
        ({"model": MODEL}, 400, "messages", "missing_required_parameter"),
        ({**BODY, "temperature": -1}, 400, "temperature", "invalid_value"),
        ({**BODY, "max_tokens": 10**30}, 400, "max_tokens", "invalid_value"),
        ({**BODY, "tools": [{}]}, 400, "tools.0.type", "missing_required_parameter"),
        ({**BODY, "max_tokens": 9000}, 400, "max_tokens", "context_length_exceeded"),
        ({**BODY, "messages": [{"role": "user", "content": "word " * 9000}]}, 400, "messages",
         "context_length_exceeded"),
        ({**BODY, "messages": [{"role": "user", "content": "a" * 3_000_000}]}, 400, "messages",
         "context_length_exceeded"),
        ({**BODY, "logit_bias": {"x": 1}}, 400, "logit_bias.x", None),
        ({**BODY, "logit_bias": {"1": 101}}, 400, "logit_bias.1", None),
        ({**BODY, "logit_bias": {"9" * 5_000: 1}}, 400, "logit_bias." + "9" * 40, None),
        ({**BODY, "messages": [{"role": "user", "content": ""}] * 20_000}, 400, "messages",
         "context_length_exceeded"),
        ({**BODY, "stop_token_ids": [50_000]}, 400, "stop_token_ids.0", None),
        ({**BODY, "top_logprobs": 1}, 400, "top_logprobs", None),
        ({**BODY, "stream_options": {}}, 400, "stream_options", None),
        ({**BODY, "min_tokens": 10, "max_tokens": 5}, 400, "min_tokens", None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_errors_have_a_real_status(
    stack: GatewayStack, body: Any, status: int, param: str | None, code: str | None, stream: bool
) -> None:
    if stream and isinstance(body, dict) and "stream_options" not in body:
        body = {**body, "stream": True}
    reply = post(stack, body)
    assert reply.status_code == status
    error = reply.json()["error"]
    assert (error["param"], error["code"]) == (param, code)
    assert isinstance(error["message"], str)
    assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")
    assert reply.headers["x-request-id"]


def test_context_error_names_the_limit(stack: GatewayStack) -> None:
    body = {**BODY, "messages": [{"role": "user", "content": "word " * 9000}]}
    assert "8192" in post(stack, body).json()["error"]["message"]


def test_too_large(stack: GatewayStack) -> None:
    assert post(stack, b" " * (9 * 2**20)).status_code == 413
    connection = http.client.HTTPConnection("127.0.0.1", stack.port, timeout=5)
    connection.putrequest("POST", CHAT)
    connection.putheader("Content-Length", str(10**12))
    connection.endheaders()
    reply = connection.getresponse()  # said before the body is read
    assert reply.status == 413
    assert json.loads(reply.read())["error"]["code"] == "request_too_large"
    connection.close()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nope", 404), ("GET", CHAT, 405), ("POST", "/v1/models", 405), ("GET", "/", 404),
     ("POST", CHAT + "/", 404)],
)  # fmt: skip
def test_unknown_routes(stack: GatewayStack, method: str, path: str, status: int) -> None:
    reply = httpx.request(method, stack.url + path)
    assert reply.status_code == status
    assert reply.json()["error"]["type"]
    assert reply.headers["x-request-id"]


@pytest.mark.parametrize(
    ("head", "code"),
    [
        (b"\x16\x03\x01 no HTTP at all\r\n\r\n", "invalid_http"),
        (b"POST / HTTP/1.1\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
         "invalid_http"),
        (b"GET / HTTP/1.1\r\nx: " + b"a" * 100_000 + b"\r\n\r\n", "headers_too_large"),
    ],
)  # fmt: skip
def test_what_is_no_http_gets_an_error_document(
    stack: GatewayStack, head: bytes, code: str
) -> None:
    with socket.create_connection(("127.0.0.1", stack.port), timeout=5) as connection:
        connection.sendall(head)
        reply = b""
        while part := connection.recv(65_536):
            reply += part
    assert reply.startswith(b"HTTP/1.1 400 ")
    assert json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["code"] == code


async def test_a_head_that_does_not_come_ends_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.1)
    listening = listen("127.0.0.1", 0)
    server = HttpServer(None, drain_timeout_s=1)
    serving = asyncio.create_task(server.serve_on(listening))
    reader, writer = await asyncio.open_connection(*listening.getsockname())
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost:")
    async with asyncio.timeout(5):
        assert await reader.read() == b""
    writer.close()
    server.close()
    await serving


def test_stream_bytes(stack: GatewayStack) -> None:
    reply = post(stack, {**BODY, "stream": True, "stream_options": {"include_usage": True}})
    assert reply.headers["content-type"].startswith("text/event-stream")
    records = reply.text.split("\n\n")
    assert records[-1] == ""
    assert records[-2] == "data: [DONE]"
    assert all(record.startswith("data: ") for record in records[:-1])
    chunks = [json.loads(record[6:]) for record in records[:-2]]
    finishes = [c for c in chunks if c["choices"] and c["choices"][0]["finish_reason"]]
    assert len(finishes) == 1
    assert finishes[0]["choices"][0]["delta"] == {}
    assert all(c["usage"] is None for c in chunks[:-1])
    assert chunks[-1]["usage"]["completion_tokens"] == 4


def test_request_ids(stack: GatewayStack) -> None:
    first = post(stack, BODY, **{"x-request-id": "my-own-id"})
    again = post(stack, BODY, **{"x-request-id": "my-own-id"})
    odd = post(stack, BODY, **{"x-request-id": "a b;c"})
    ids = [reply.headers["x-request-id"] for reply in (first, again, odd)]
    assert ids[0] == "my-own-id"
    assert len(set(ids)) == 3


def test_idempotency(stack: GatewayStack) -> None:
    key = {"idempotency-key": "k1"}
    first, second = post(stack, BODY, **key), post(stack, BODY, **key)
    assert first.json() == second.json()
    other = post(stack, {**BODY, "seed": 1}, **key)
    assert other.status_code == 422
    assert other.json()["error"]["code"] == "idempotency_key_reused"
    streamed = {**BODY, "stream": True}
    replies = [post(stack, streamed, **{"idempotency-key": "k2"}) for _ in range(2)]
    assert replies[0].content == replies[1].content
    assert b"[DONE]" in replies[0].content
    bad = {**BODY, "temperature": -1}
    assert [post(stack, bad, **{"idempotency-key": "k3"}).status_code for _ in range(2)] == [
        400
    ] * 2


def test_metrics_add_up_to_usage(stack: GatewayStack) -> None:
    before = tokens(stack)
    usage = post(stack, {**BODY, "n": 2}).json()["usage"]
    after = tokens(stack)
    assert after["completion"] - before["completion"] == usage["completion_tokens"]
    assert after["prompt"] - before["prompt"] == usage["prompt_tokens"]


def tokens(stack: GatewayStack) -> dict[str, float]:
    text = httpx.get(f"{stack.url}/metrics").text
    found = {}
    for line in text.splitlines():
        if line.startswith("finback_gateway_tokens_total{"):
            kind = line.split('kind="')[1].split('"')[0]
            found[kind] = float(line.rpartition(" ")[2])
    return {"completion": 0.0, "prompt": 0.0, **found}


def test_documents(stack: GatewayStack) -> None:
    assert httpx.get(f"{stack.url}/healthz").json() == {"status": "ok"}
    ready = httpx.get(f"{stack.url}/readyz").json()
    assert all(ready["checks"].values())
    api = httpx.get(f"{stack.url}/openapi.json").json()
    assert "/v1/chat/completions" in api["paths"]
    assert "temperature" in api["components"]["schemas"]["ChatRequest"]["properties"]
    page = httpx.get(f"{stack.url}/docs").text
    assert "<script>" in page
    assert "://" not in page  # nothing is fetched from elsewhere


def test_tokenize(stack: GatewayStack) -> None:
    made = post(stack, {"prompt": "Hello <|im_end|> world"}, "/tokenize").json()
    assert made["count"] == len(made["tokens"])
    assert 2 not in made["tokens"]
    back = post(stack, {"tokens": made["tokens"]}, "/detokenize").json()
    assert back == {"prompt": "Hello <|im_end|> world"}
    chat = post(stack, {"messages": BODY["messages"]}, "/tokenize").json()
    assert chat["tokens"][0] == 1
    assert post(stack, {}, "/tokenize").status_code == 400
    unknown = post(stack, {"tokens": [1, 10**6]}, "/detokenize")
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "tokens.1")


def test_many_at_once(stack: GatewayStack) -> None:
    """A pipelined connection and fifty parallel ones: every answer is its own."""
    payload = json.dumps(BODY).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(payload)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", stack.port), timeout=10) as connection:
        connection.sendall((head + payload) * 3)
        got, end_s = b"", time.monotonic() + 10
        while got.count(b"chat.completion") < 3 and time.monotonic() < end_s:
            got += connection.recv(65536)
        assert got.count(b"HTTP/1.1 200") == 3
    connections = []
    for index in range(50):
        connection = socket.create_connection(("127.0.0.1", stack.port), timeout=10)
        body = {**BODY, "messages": [{"role": "user", "content": f"number {index} ends"}]}
        payload = json.dumps(body).encode()
        length = f"Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n".encode()
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\n".encode() + length + payload)
        connections.append(connection)
    for index, connection in enumerate(connections):
        got = b""
        while part := connection.recv(65536):
            got += part
        connection.close()
        assert f"number {index} ends".encode() in got


def test_grammars_are_checked_by_the_sampler(stack: GatewayStack) -> None:
    if "sampler" not in stack.processes:
        stack.spawn("sampler")
    good = {**BODY, "structured_outputs": {"regex": "[a-z]+"}}
    assert post(stack, good).status_code == 200  # waits until the sampler is there
    for field, value, param in (
        ("structured_outputs", {"regex": "[a-z"}, "structured_outputs.regex"),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "nonsense"}}},
            "response_format.json_schema.schema",
        ),
    ):
        reply = post(stack, {**BODY, field: value})
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == param
        assert reply.json()["error"]["code"] == "invalid_grammar"


def test_one_trace_a_request(stack: GatewayStack) -> None:
    trace_id = f"{time.time_ns():032x}"
    reply = post(stack, BODY, traceparent=f"00-{trace_id}-00f067aa0ba902b7-01")
    request_id = reply.headers["x-request-id"]
    wanted = {"gateway chat.completions", "gateway encode", "gateway route", "router route",
              "prefill generate", "gateway detokenise"}  # fmt: skip
    found: dict[str, dict[str, Any]] = {}
    end_s = time.monotonic() + 15
    while not wanted <= found.keys() and time.monotonic() < end_s:
        time.sleep(0.2)
        for path in (stack.folder / "traces").glob("*.jsonl"):
            for line in path.read_text().splitlines():
                if trace_id in line:
                    span = json.loads(line)
                    found[span["name"]] = span
    assert wanted <= found.keys()
    root = found["gateway chat.completions"]["attributes"]
    assert root["finback.request_id"] == request_id
    assert root["gen_ai.usage.output_tokens"] == reply.json()["usage"]["completion_tokens"]
    assert root["gen_ai.response.time_to_first_token"] > 0
