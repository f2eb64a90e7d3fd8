"""Tenants' limits through a real gateway, a real router and a real server."""

import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import anthropic
import nats
import openai
import pytest

from finback.services.supervisor import key_file
from support.gateway_stack import GatewayStack
from support.nats_server import NatsServer
from support.shop import BODY, Shop


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
    with shop.stream(key) as lines:
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
        with shop.stream(key, more.url) as lines:
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


def test_the_key_itself_is_nowhere(shop: Shop) -> None:
    key = shop.key()
    shop.ask(key)
    secret = key.split("-", 2)[2].encode()
    for path in shop.stack.folder.rglob("*"):
        assert not path.is_file() or secret not in path.read_bytes(), path


def _until_200(shop: Shop, key: str, url: str) -> None:
    end_s = time.monotonic() + 20
    while (reply := shop.ask(key, url)).status_code != 200:
        assert time.monotonic() < end_s, reply.text
        assert reply.status_code == 429
        time.sleep(0.05)
