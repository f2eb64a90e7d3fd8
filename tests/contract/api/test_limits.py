"""Tenants' limits and usage through a real gateway, a real router and a real server."""

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import anthropic
import httpx
import nats
import openai
import pytest

from finback.services.supervisor import key_file
from support.gateway_stack import GatewayStack
from support.nats_server import NatsServer

BODY: dict[str, Any] = {
    "model": "gpt-4o",
    "messages": [{"role": "user", "content": "one two three"}],
    "max_tokens": 4,
}


class Shop:
    """A stack, and keys that are made while it runs."""

    def __init__(self, stack: GatewayStack, keys: Path) -> None:
        self.stack = stack
        self.keys = keys
        self.clients: list[openai.OpenAI | anthropic.Anthropic] = []

    def key(self, **values: Any) -> str:
        return key_file.create(self.keys, "n", **values)[0]

    def id_of(self, key: str) -> str:
        return key.split("-")[1]

    def client(self, key: str) -> openai.OpenAI:
        made = openai.OpenAI(base_url=f"{self.stack.url}/v1", api_key=key, max_retries=0)
        self.clients.append(made)
        return made

    def ask(self, key: str, url: str = "", **more: Any) -> httpx.Response:
        return httpx.post(
            f"{url or self.stack.url}/v1/chat/completions",
            json={**BODY, **more},
            headers={"authorization": f"Bearer {key}"},
            timeout=30,
        )

    def usage(self, key: str, **query: str) -> dict[str, Any]:
        reply = httpx.get(
            f"{self.stack.url}/v1/usage", headers={"authorization": f"Bearer {key}"}, params=query
        )
        assert reply.status_code == 200, reply.text
        found: dict[str, Any] = reply.json()
        return found


@pytest.fixture(scope="module")
def shop(nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    folder = tmp_path_factory.mktemp("shop")
    keys = folder / "keys.jsonl"
    env = {"FINBACK_API_KEYS_FILE": str(keys), "ECHO_STEP_MS": "5"}
    stack = GatewayStack(nats_server.url, "shop", folder, env)
    key_file.create(keys, "first")
    try:
        made = Shop(stack.start(), keys)
        yield made
        for client in made.clients:
            client.close()
    finally:
        stack.stop()


@pytest.fixture
def other_url(shop: Shop, tmp_path: Path) -> Iterator[str]:
    """A second gateway of the same stack."""
    stack = shop.stack
    more = GatewayStack(stack.nats_url, stack.prefix, tmp_path, stack.env)
    more.spawn("gateway")
    try:
        more.wait_ready()
        yield more.url
    finally:
        more.stop()


def test_openais_client_sees_each_refusal(shop: Shop) -> None:
    with pytest.raises(openai.AuthenticationError) as unknown:
        shop.client("wrong").models.list()
    assert unknown.value.response.headers["www-authenticate"] == "Bearer"
    client = shop.client(shop.key(requests_per_min=2))
    for left in (1, 0):
        raw = client.chat.completions.with_raw_response.create(**BODY)
        assert raw.headers["x-ratelimit-limit-requests"] == "2"
        assert raw.headers["x-ratelimit-remaining-requests"] == str(left)
        assert raw.headers["x-request-id"]
    with pytest.raises(openai.RateLimitError) as limited:
        client.chat.completions.create(**BODY)
    headers = limited.value.response.headers
    assert limited.value.code == "rate_limit_exceeded"
    assert "2 requests per minute" in limited.value.message
    assert headers["x-ratelimit-remaining-requests"] == "0"
    assert 28 <= int(headers["retry-after"]) <= 30
    assert 28_000 < int(headers["retry-after-ms"]) <= 30_000
    assert headers["x-ratelimit-reset-requests"].startswith(("59", "58", "1m0s"))


def test_anthropics_client_sees_each_refusal(shop: Shop) -> None:
    body: Any = {name: BODY[name] for name in ("model", "messages", "max_tokens")}

    def client(key: str) -> anthropic.Anthropic:
        made = anthropic.Anthropic(base_url=shop.stack.url, api_key=key, max_retries=0)
        shop.clients.append(made)
        return made

    with pytest.raises(anthropic.AuthenticationError) as unknown:
        client("wrong").messages.create(**body)
    assert unknown.value.body == {
        "type": "error",
        "error": {"type": "authentication_error", "message": _message(unknown.value)},
        "request_id": unknown.value.request_id,
    }
    with pytest.raises(anthropic.PermissionDeniedError):
        client(shop.key(scopes=("usage",))).messages.create(**body)
    key = shop.key(requests_per_min=1, tokens_per_min=500)
    raw = client(key).messages.with_raw_response.create(**body)
    assert raw.headers["anthropic-ratelimit-requests-limit"] == "1"
    assert raw.headers["anthropic-ratelimit-requests-remaining"] == "0"
    assert 0 < int(raw.headers["anthropic-ratelimit-tokens-remaining"]) < 500
    with pytest.raises(anthropic.RateLimitError) as limited:
        client(key).messages.create(**body)
    headers = limited.value.response.headers
    assert "1 requests per minute" in _message(limited.value)
    assert limited.value.request_id == headers["request-id"]
    assert 0 < int(headers["retry-after"]) <= 60
    reset = datetime.strptime(headers["anthropic-ratelimit-requests-reset"], "%Y-%m-%dT%H:%M:%S%z")
    assert 0 < (reset - datetime.now(UTC)).total_seconds() <= 61
    assert shop.ask(key).status_code == 429, "the limits are those of all APIs together"


def test_responses_are_limited_too(shop: Shop) -> None:
    client = shop.client(shop.key(requests_per_min=1))
    raw = client.responses.with_raw_response.create(model="gpt-4o", input="hi")
    assert raw.headers["x-ratelimit-remaining-requests"] == "0"
    with pytest.raises(openai.RateLimitError):
        client.responses.create(model="gpt-4o", input="hi")


def _message(error: anthropic.APIStatusError) -> str:
    body: Any = error.body
    return str(body["error"]["message"])


def test_scopes_models_and_expiry(shop: Shop) -> None:
    reader = shop.client(shop.key(scopes=("usage",)))
    with pytest.raises(openai.PermissionDeniedError, match="not inference"):
        reader.chat.completions.create(**BODY)
    assert reader.models.list().data
    with pytest.raises(openai.PermissionDeniedError) as wrong:
        shop.client(shop.key(models=("other",))).chat.completions.create(**BODY)
    assert (wrong.value.param, wrong.value.code) == ("model", "model_not_allowed")
    assert shop.ask(shop.key(models=("gpt-4o",))).status_code == 200
    assert shop.ask(shop.key(models=("SmolLM2-135M-Instruct",))).status_code == 200
    expired = shop.ask(shop.key(expires=1))
    assert expired.status_code == 401
    assert "expired" in expired.json()["error"]["message"]


def test_changes_need_no_restart_and_a_tenants_keys_share_its_limits(shop: Shop) -> None:
    key = shop.key(tenant="acme", requests_per_min=1)
    sister = shop.key(tenant="acme")
    assert shop.ask(key).status_code == 200
    assert shop.ask(sister).status_code == 429
    key_file.change(shop.keys, shop.id_of(sister), requests_per_min=2)
    assert shop.ask(key).status_code == 200
    assert shop.ask(key).status_code == 429
    key_file.change(shop.keys, shop.id_of(key), requests_per_min=0)
    assert "x-ratelimit-limit-requests" not in shop.ask(sister).headers
    key_file.revoke(shop.keys, shop.id_of(key))
    assert shop.ask(key).status_code == 401


def test_tokens_are_reserved_and_what_is_not_used_comes_back(shop: Shop) -> None:
    key = shop.key(tokens_per_min=2000)
    first = shop.ask(key, max_tokens=1000)
    reserved = 2000 - int(first.headers["x-ratelimit-remaining-tokens"])
    usage = first.json()["usage"]
    assert reserved == usage["prompt_tokens"] + 1000
    assert usage["completion_tokens"] < 100
    second = shop.ask(key, max_tokens=1000)
    used = 2000 - int(second.headers["x-ratelimit-remaining-tokens"]) - reserved
    assert 0 <= used <= usage["total_tokens"]
    hopeless = shop.ask(shop.key(tokens_per_min=5))
    assert hopeless.status_code == 429
    assert hopeless.headers["x-should-retry"] == "false"
    assert "make it shorter" in hopeless.json()["error"]["message"]


def test_requests_at_once_through_both_gateways(shop: Shop, other_url: str) -> None:
    key = shop.key(max_concurrency=1)
    for _ in range(10):  # whoever has seen an answer's end may send the next
        assert shop.ask(key).status_code == 200
        assert shop.ask(key, stream=True).text.endswith("[DONE]\n\n")
    with _stream(shop, key) as lines:
        next(lines)
        for url in (other_url, shop.stack.url):
            refused = shop.ask(key, url)
            assert refused.status_code == 429
            assert "1 requests at once" in refused.json()["error"]["message"]
            assert refused.headers["retry-after"] == "1"
    _until_200(shop, key, other_url)  # the client has left: its place is free again


def test_what_a_gateway_and_a_router_held_when_they_died(
    shop: Shop, nats_server: NatsServer, tmp_path: Path
) -> None:
    """A new router hears what is open; a gateway's places come back when it is silent."""
    key = shop.key(max_concurrency=1)
    stack = shop.stack
    more = GatewayStack(nats_server.url, stack.prefix, tmp_path, stack.env)
    gateway = more.spawn("gateway")
    more.wait_ready()
    try:
        with _stream(shop, key, more.url) as lines:
            next(lines)
            stack.kill("router")
            stack.spawn("router")
            end_s = time.monotonic() + 20
            while "1 requests at once" not in (reply := shop.ask(key)).text:
                assert time.monotonic() < end_s, reply.text
            gateway.kill()
            gateway.wait()
    finally:
        more.stop()
    _until_200(shop, key, stack.url)


async def test_the_same_over_nats(shop: Shop) -> None:
    key = shop.key(requests_per_min=1)
    connection = await nats.connect(shop.stack.nats_url)
    try:

        async def ask(endpoint: str, body: dict[str, Any]) -> Any:
            subject = f"{shop.stack.prefix}.v1.api.{endpoint}"
            headers = {"Authorization": f"Bearer {key}"}
            payload = json.dumps(body).encode()
            return await connection.request(subject, payload, timeout=20, headers=headers)

        first = await ask("chat.completions", BODY)
        assert first.headers["x-ratelimit-remaining-requests"] == "0"
        second = await ask("chat.completions", BODY)
        assert second.headers["Nats-Service-Error-Code"] == "429"
        assert float(second.headers["Finback-Retry-After-S"]) > 50
        assert json.loads(second.data)["error"]["code"] == "rate_limit_exceeded"
        usage = json.loads((await ask("usage", {})).data)
        assert {row["outcome"]: row["requests"] for row in usage["data"]} == {
            "completed": 1,
            "refused": 1,
        }
    finally:
        await connection.close()


async def test_usage_adds_up_to_what_clients_were_told(shop: Shop) -> None:
    """A mixed run of whole and streamed answers, several choices, cancelled and refused ones."""
    key = shop.key(tenant="mixed", max_concurrency=6)
    told = {"prompt_tokens": 0, "completion_tokens": 0, "requests": 0}
    statuses: list[int] = []
    async with httpx.AsyncClient(
        base_url=shop.stack.url, headers={"authorization": f"Bearer {key}"}, timeout=30
    ) as client:

        async def one(at: int) -> None:
            content = " ".join(["word"] * (1 + at * 7 % 30))
            body = {**BODY, "messages": [{"role": "user", "content": content}], "max_tokens": 60}
            body |= {"n": 1 + at % 3, "stop": ["x"] if at % 4 == 0 else None}
            is_left, is_stream = at % 5 == 0, at % 2 == 0 or at % 5 == 0
            if is_stream:
                body |= {"stream": True, "stream_options": {"include_usage": True}}
            if is_left:
                body |= {"ignore_eos": True, "max_tokens": 4000}
            path = "/v1/chat/completions"
            if not is_stream:
                reply = await client.post(path, json=body)
                statuses.append(reply.status_code)
                if reply.status_code == 200:
                    add(reply.json()["usage"])
                return
            async with client.stream("POST", path, json=body) as stream:
                statuses.append(stream.status_code)
                async for line in stream.aiter_lines():
                    if is_left and "content" in line:
                        return
                    if line.startswith("data: {") and (usage := json.loads(line[6:]).get("usage")):
                        add(usage)

        def add(usage: dict[str, Any]) -> None:
            told["requests"] += 1
            for name in ("prompt_tokens", "completion_tokens"):
                told[name] += usage[name]

        for start in range(0, 40, 8):
            await asyncio.gather(*(one(at) for at in range(start, start + 8)))
    assert {*statuses} == {200, 429}
    reader = shop.key(scopes=("usage",))
    sums = await _settled_usage(shop, reader, len(statuses))
    completed = sums["completed"]
    assert {name: completed[name] for name in told} == told
    assert sums["refused"]["requests"] == statuses.count(429)
    assert sums["refused"]["prompt_tokens"] == 0
    assert sums["cancelled"]["requests"] == statuses.count(200) - told["requests"]
    assert sums["cancelled"]["completion_tokens"] > 0


def test_usage_is_seen_by_its_tenant_and_survives_a_restart(shop: Shop) -> None:
    key, reader = shop.key(tenant="lasting"), shop.key(scopes=("usage",))
    told = shop.ask(key).json()["usage"]
    own = shop.usage(key)
    assert {row["tenant"] for row in own["data"]} == {"lasting"}
    assert own["total"]["completion_tokens"] == told["completion_tokens"]
    headers = {"authorization": f"Bearer {key}"}
    foreign = httpx.get(f"{shop.stack.url}/v1/usage?tenant=mixed", headers=headers)
    assert foreign.status_code == 403
    odd = httpx.get(f"{shop.stack.url}/v1/usage?since=soon", headers=headers)
    assert (odd.status_code, odd.json()["error"]["param"]) == (400, "since")
    gateway = shop.stack.processes.pop("gateway")
    gateway.terminate()
    gateway.wait(30)
    shop.stack.mend()
    assert shop.usage(reader, tenant="lasting")["data"] == own["data"]
    assert len({row["tenant"] for row in shop.usage(reader)["data"]}) > 1


def test_the_key_itself_is_nowhere(shop: Shop) -> None:
    key = shop.key()
    shop.ask(key)
    secret = key.split("-", 2)[2].encode()
    for path in shop.stack.folder.rglob("*"):
        assert not path.is_file() or secret not in path.read_bytes(), path


@contextmanager
def _stream(shop: Shop, key: str, url: str = "") -> Iterator[Iterator[str]]:
    """The lines of a stream that goes on until it is left."""
    with httpx.Client(timeout=30) as client:
        sent = client.stream(
            "POST",
            f"{url or shop.stack.url}/v1/chat/completions",
            json={**BODY, "stream": True, "ignore_eos": True, "max_tokens": 6000},
            headers={"authorization": f"Bearer {key}"},
        )
        with sent as reply:
            yield reply.iter_lines()


def _until_200(shop: Shop, key: str, url: str) -> None:
    end_s = time.monotonic() + 20
    while (reply := shop.ask(key, url)).status_code != 200:
        assert time.monotonic() < end_s, reply.text
        assert reply.status_code == 429
        time.sleep(0.05)


async def _settled_usage(shop: Shop, reader: str, num_requests: int) -> dict[str, dict[str, int]]:
    """Sums by outcome, once all requests are over (those that were left end a little later)."""
    for _ in range(200):
        rows = (await asyncio.to_thread(shop.usage, reader, tenant="mixed"))["data"]
        if sum(row["requests"] for row in rows) == num_requests:
            break
        await asyncio.sleep(0.05)
    sums: dict[str, dict[str, int]] = {}
    for row in rows:
        found = sums.setdefault(row["outcome"], {})
        for name in ("requests", "prompt_tokens", "completion_tokens"):
            found[name] = found.get(name, 0) + row[name]
    return sums
