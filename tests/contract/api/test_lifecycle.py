"""Requests whose engine, router or client goes away; queues that are full; waiting that shows."""

import json
import signal
import socket
import threading
import time
from typing import Any

import httpx
import pytest

from support.gateway_stack import GatewayStack

MODEL = "SmolLM2-135M-Instruct"
CHAT = "/v1/chat/completions"
WORDS = " ".join(f"w{index}" for index in range(30))
BODY: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": WORDS}]}


def metric(stack: GatewayStack, name: str) -> float:
    """The sum of a counter over its labels."""
    text = httpx.get(f"{stack.url}/metrics").text
    lines = [line for line in text.splitlines() if line.startswith(name)]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def wait_for(condition: Any, timeout_s: float = 5.0) -> float:
    begun_s = time.monotonic()
    while time.monotonic() - begun_s < timeout_s:
        if condition():
            return time.monotonic() - begun_s
        time.sleep(0.02)
    raise AssertionError("it did not happen in time")


class Stream:
    """Reads a stream on a thread, so that the test can break things meanwhile."""

    def __init__(self, stack: GatewayStack) -> None:
        self.lines: list[str] = []
        self.ended_s = 0.0
        self._url = stack.url + CHAT
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        body = {**BODY, "stream": True}
        with httpx.stream("POST", self._url, json=body, timeout=30) as reply:
            self.lines.append(f"status {reply.status_code}")
            for line in reply.iter_lines():
                self.lines.append(line)
        self.ended_s = time.monotonic()

    @property
    def text(self) -> str:
        chunks = [json.loads(line[6:]) for line in self.lines if line.startswith("data: {")]
        deltas = [c["choices"][0]["delta"] for c in chunks if c.get("choices")]
        return "".join(delta.get("content") or "" for delta in deltas)

    def join(self) -> None:
        self._thread.join(20)
        assert not self._thread.is_alive()


def test_waiting_is_shown_by_comments(slow_stack: GatewayStack) -> None:
    stream = Stream(slow_stack)
    stream.join()
    first = next(index for index, line in enumerate(stream.lines) if line.startswith("data:"))
    assert sum(line.startswith(":") for line in stream.lines[:first]) >= 2
    assert stream.text == WORDS
    assert stream.lines[-2] == "data: [DONE]"


def test_disconnect_cancels_within_a_second(slow_stack: GatewayStack) -> None:
    for delay_s in (0.2, 1.2):  # while prefilling, while decoding
        before = metric(slow_stack, "finback_gateway_cancels_total")
        payload = json.dumps({**BODY, "stream": True}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(payload)}\r\n\r\n"
        connection = socket.create_connection(("127.0.0.1", slow_stack.port))
        connection.sendall(head.encode() + payload)
        time.sleep(delay_s)
        connection.close()
        took_s = wait_for(
            lambda before=before: metric(slow_stack, "finback_gateway_cancels_total") > before
        )
        assert took_s < 1.0
        assert metric(slow_stack, "finback_gateway_open_requests") == 0
    whole = socket.create_connection(("127.0.0.1", slow_stack.port))
    payload = json.dumps(BODY).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(payload)}\r\n\r\n"
    before = metric(slow_stack, "finback_gateway_cancels_total")
    whole.sendall(head.encode() + payload)
    time.sleep(0.3)
    whole.close()
    wait_for(lambda: metric(slow_stack, "finback_gateway_cancels_total") > before, 1.0)


def test_too_many_open_requests(slow_stack: GatewayStack) -> None:
    streams = [Stream(slow_stack) for _ in range(4)]
    wait_for(lambda: metric(slow_stack, "finback_gateway_open_requests") == 4)
    reply = httpx.post(slow_stack.url + CHAT, json=BODY)
    assert reply.status_code == 429
    assert int(reply.headers["retry-after"]) >= 1
    assert reply.json()["error"]["type"] == "rate_limit_error"
    for stream in streams:
        stream.join()
        assert stream.text == WORDS


def test_router_death_does_not_end_a_stream(slow_stack: GatewayStack) -> None:
    stream = Stream(slow_stack)
    wait_for(lambda: stream.text)
    slow_stack.kill("router")
    late = Stream(slow_stack)  # waits for the router to come back
    time.sleep(0.5)
    slow_stack.spawn("router")
    stream.join()
    late.join()
    assert stream.text == late.text == WORDS


def test_engine_death_before_the_first_token_is_not_seen(slow_stack: GatewayStack) -> None:
    stream = Stream(slow_stack)
    wait_for(lambda: metric(slow_stack, "finback_gateway_open_requests") == 1)
    time.sleep(0.2)
    slow_stack.kill("echo")
    slow_stack.spawn("echo")
    stream.join()
    assert stream.text == WORDS
    assert metric(slow_stack, "finback_gateway_retries_total") >= 1


def test_engine_death_in_the_middle_is_not_seen(slow_stack: GatewayStack) -> None:
    stream = Stream(slow_stack)
    wait_for(lambda: len(stream.text) > 5)
    slow_stack.kill("echo")
    slow_stack.spawn("echo")
    stream.join()
    assert stream.text == WORDS
    assert "data: [DONE]" in stream.lines


def test_without_another_engine_a_stream_ends_with_an_error(slow_stack: GatewayStack) -> None:
    stream = Stream(slow_stack)
    wait_for(lambda: len(stream.text) > 5)
    slow_stack.kill("echo")
    stream.join()
    errors = [line for line in stream.lines if '"error"' in line]
    assert len(errors) == 1
    assert json.loads(errors[0][6:])["error"]["type"] == "server_error"
    assert "data: [DONE]" not in stream.lines
    assert WORDS.startswith(stream.text)


def test_a_hanging_engine_is_left(slow_stack: GatewayStack) -> None:
    stream = Stream(slow_stack)
    wait_for(lambda: len(stream.text) > 5)
    slow_stack.processes["echo"].send_signal(signal.SIGSTOP)
    slow_stack.spawn("echo2")
    stream.join()
    slow_stack.processes["echo"].send_signal(signal.SIGCONT)
    slow_stack.kill("echo2")
    assert stream.text == WORDS


def test_without_engines_the_answer_is_503(slow_stack: GatewayStack) -> None:
    slow_stack.kill("echo")
    wait_for(lambda: httpx.get(f"{slow_stack.url}/readyz").status_code == 503, 8)
    reply = httpx.post(slow_stack.url + CHAT, json=BODY, timeout=20)
    assert reply.status_code == 503
    assert reply.json()["error"]["type"] == "server_error"


def test_drain_finishes_open_requests(slow_stack: GatewayStack) -> None:
    stream = Stream(slow_stack)
    wait_for(lambda: stream.text)
    gateway = slow_stack.processes.pop("gateway")
    gateway.terminate()
    time.sleep(0.3)
    with pytest.raises(httpx.TransportError):
        httpx.post(slow_stack.url + CHAT, json=BODY, timeout=2)
    stream.join()
    assert stream.text == WORDS
    assert gateway.wait(10) == 0
