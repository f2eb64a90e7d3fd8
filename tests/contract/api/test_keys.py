"""API keys over HTTP and NATS, and the refusal to serve the world without one."""

import hashlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from support.gateway_stack import GatewayStack
from support.nats_server import NatsServer


@pytest.fixture
def keyed(nats_server: NatsServer, subject_prefix: str, tmp_path: Path) -> Iterator[GatewayStack]:
    made = GatewayStack(
        nats_server.url,
        f"k{subject_prefix}",
        tmp_path,
        {"FINBACK_API_KEYS_FILE": str(tmp_path / "keys.jsonl")},
    )
    write(tmp_path, "good", is_revoked=False)
    try:
        yield made.start()
    finally:
        made.stop()


def write(folder: Path, key: str, *, is_revoked: bool) -> None:
    path = folder / "keys.jsonl"
    digest = hashlib.sha256(key.encode()).hexdigest()
    line = {"id": "k1", "hash": digest, "name": "n", "created": 0, "revoked": is_revoked}
    stamp = path.stat().st_mtime_ns + 1_000_000 if path.exists() else None
    path.write_text(json.dumps(line) + "\n")
    if stamp is not None:
        os.utime(path, ns=(stamp, stamp))


def test_keys(keyed: GatewayStack, tmp_path: Path) -> None:
    body = {"model": "gpt-4o", "messages": [{"role": "user", "content": "hi"}]}

    def ask(path: str, key: str | None) -> httpx.Response:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        if path == "/v1/models":
            return httpx.get(keyed.url + path, headers=headers)
        return httpx.post(keyed.url + path, json=body, headers=headers)

    for path in ("/v1/chat/completions", "/v1/models"):
        assert ask(path, "good").status_code == 200
        for key in (None, "bad"):
            reply = ask(path, key)
            assert reply.status_code == 401
            assert reply.json()["error"]["code"] == "invalid_api_key"
    write(tmp_path, "good", is_revoked=True)
    assert ask("/v1/models", "good").status_code == 401
    assert httpx.get(f"{keyed.url}/healthz").status_code == 200


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"FINBACK_HTTP_HOST": "0.0.0.0"}, "without API keys"),
        ({"FINBACK_MODEL": "/no/such.gguf"}, "/no/such.gguf"),
    ],
)
def test_a_start_that_cannot_be(
    nats_server: NatsServer,
    subject_prefix: str,
    tmp_path: Path,
    setting: dict[str, str],
    says: str,
) -> None:
    stack = GatewayStack(nats_server.url, f"b{subject_prefix}", tmp_path, setting)
    process = stack.spawn("gateway")
    assert process.wait(20) == 2
    log = (tmp_path / "gateway.log").read_text()
    lines = [line for line in log.splitlines() if not line.startswith("{")]
    assert len(lines) == 1
    assert says in lines[0]


def test_a_taken_port(nats_server: NatsServer, stack: GatewayStack, tmp_path: Path) -> None:
    other = GatewayStack(nats_server.url, "taken", tmp_path, port=stack.port)
    process: subprocess.Popen[bytes] = other.spawn("gateway")
    assert process.wait(20) == 2
    assert "is taken" in (tmp_path / "gateway.log").read_text()
