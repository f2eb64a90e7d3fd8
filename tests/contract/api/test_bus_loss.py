"""The NATS server dies and comes back in the middle of a stream: no token is lost or doubled."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import httpx

from support.gateway_stack import GatewayStack
from support.nats_server import NatsServer

WORDS = " ".join(f"w{index}" for index in range(60))
BODY: dict[str, Any] = {
    "model": "gpt-4o",
    "messages": [{"role": "user", "content": WORDS}],
    "stream": True,
}


def test_a_stream_survives_the_server(own_nats_server: NatsServer, tmp_path: Path) -> None:
    stack = GatewayStack(own_nats_server.url, "loss", tmp_path, {"ECHO_STEP_MS": "20"})
    text: list[str] = []
    outcome: list[str] = []

    def read() -> None:
        with httpx.stream("POST", f"{stack.url}/v1/chat/completions", json=BODY, timeout=30) as r:
            for line in r.iter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line[6:])
                    outcome.extend(["error"] if "error" in chunk else [])
                    deltas = [choice["delta"] for choice in chunk.get("choices", ())]
                    text.extend(delta.get("content") or "" for delta in deltas)
                elif line == "data: [DONE]":
                    outcome.append("done")

    try:
        stack.start()
        reader = threading.Thread(target=read)
        reader.start()
        while len(text) < 10:
            time.sleep(0.01)
        own_nats_server.kill()
        time.sleep(0.4)
        own_nats_server.start()
        reader.join(30)
        assert not reader.is_alive()
        assert outcome == ["done"]
        assert "".join(text) == WORDS
    finally:
        stack.stop()
