"""A sampler that serves another model than the gateway: no client's fault, and told at once."""

from collections.abc import Iterator

import httpx
import pytest

from support.babbler import babbler_folder
from support.gateway_stack import GatewayStack
from support.nats_server import NatsServer

MODEL = "SmolLM2-135M-Instruct"
ASKED = [{"role": "user", "content": "?"}]
KEPT = {"model": MODEL, "structured_outputs": {"regex": "a+"}}


@pytest.fixture(scope="module")
def divided(
    nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayStack]:
    folder = tmp_path_factory.mktemp("divided")
    made = GatewayStack(nats_server.url, "divided", folder, {"ECHO_STEP_MS": "1"})
    try:
        made.spawn("sampler", FINBACK_MODEL=str(babbler_folder(folder)))
        yield made.start()
    finally:
        made.stop()


def test_another_vocabulary(divided: GatewayStack) -> None:
    chat = {**KEPT, "messages": ASKED}
    reply = httpx.post(f"{divided.url}/v1/chat/completions", json=chat, timeout=30)
    assert reply.status_code == 503
    error = reply.json()["error"]
    assert error["code"] == "vocabulary_mismatch"
    assert "49152" in error["message"] and "320" in error["message"]
    message = {**chat, "max_tokens": 9}
    other = httpx.post(f"{divided.url}/v1/messages", json=message, timeout=30)
    assert other.status_code == 529
    assert other.json()["error"]["type"] == "overloaded_error"
    free = {"model": MODEL, "messages": ASKED}
    assert httpx.post(f"{divided.url}/v1/chat/completions", json=free).status_code == 200
