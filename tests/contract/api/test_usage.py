"""What tenants have used, as a real gateway counts it."""

import asyncio
import json
from typing import Any

import httpx

from support.shop import BODY, Shop


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
