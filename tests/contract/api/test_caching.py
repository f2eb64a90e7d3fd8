"""The cache's fields through the official client, as the router and prefill are told of them."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import openai
import pytest

from finback.shared.actor.nats_bus import BusSettings, connect
from finback.shared.kv import block_hash
from finback.shared.kv.cache_salt import cache_salt_of
from finback.shared.telemetry.metrics import Metrics
from finback.shared.wire import codec
from finback.shared.wire.messages.prefill import PrefillRequest
from finback.shared.wire.messages.route import RouteRequest
from support.gateway_stack import GatewayStack

MODEL = "SmolLM2-135M-Instruct"
LONG = "one two three four five six seven eight nine ten " * 20
Told = tuple[RouteRequest, PrefillRequest]


async def overheard(stack: GatewayStack, ask: Callable[[], object]) -> Told:
    """What the gateway told the router and prefill for one request."""
    bus = await connect(BusSettings(url=stack.nats_url, name="spy"), Metrics())
    routes: list[RouteRequest] = []
    prefills: list[PrefillRequest] = []
    base = f"{stack.prefix}.v1"
    await bus.subscribe(
        f"{base}.router.route", lambda m: routes.append(codec.decode(m.data, RouteRequest))
    )
    await bus.subscribe(
        f"{base}.prefill.*.generate",
        lambda m: prefills.append(codec.decode(m.data, PrefillRequest)),
    )
    try:
        await asyncio.to_thread(ask)
        async with asyncio.timeout(30):
            while not (routes and prefills):  # noqa: ASYNC110  # a test listens from outside
                await asyncio.sleep(0.01)
    finally:
        await bus.close()
    return routes[-1], prefills[-1]


def chat(client: openai.OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": LONG}], max_tokens=2, **more
    )


async def test_fields_reach_router_and_engine(stack: GatewayStack, client: openai.OpenAI) -> None:
    route, prefill = await overheard(
        stack,
        lambda: chat(
            client,
            prompt_cache_key="talk",
            prompt_cache_retention="24h",
            extra_body={"traffic_class": "agent", "cache_salt": "mine"},
        ),
    )
    spec = prefill.spec
    assert route.session == spec.session == "key:talk"
    assert route.traffic_class == spec.traffic_class == "agent"
    assert spec.retention_s == 86_400.0


async def test_nothing_said_changes_nothing(stack: GatewayStack, client: openai.OpenAI) -> None:
    route, prefill = await overheard(stack, lambda: chat(client))
    assert (route.session, prefill.spec.cache_salt, prefill.spec.retention_s) == ("", "", None)
    assert route.traffic_class == "chat"


@pytest.mark.parametrize("kind", ["chat", "text", "ids", "responses"])
async def test_the_salt_makes_the_same_chain_at_the_gateway_and_in_the_engine(
    stack: GatewayStack, client: openai.OpenAI, kind: str
) -> None:
    extra: dict[str, Any] = {"extra_body": {"cache_salt": "mine"}}

    def ask() -> None:
        if kind == "chat":
            chat(client, **extra)
        elif kind == "responses":
            client.responses.create(model=MODEL, input=LONG, max_output_tokens=2, **extra)
        else:
            prompt: Any = LONG if kind == "text" else [5] * 130
            client.completions.create(model=MODEL, prompt=prompt, max_tokens=2, **extra)

    route, prefill = await overheard(stack, ask)
    spec = prefill.spec
    assert spec.cache_salt == cache_salt_of("", "mine") != ""
    size = 64
    data = np.frombuffer(spec.token_ids, dtype="<i4")
    hashes = block_hash.extend_all(
        block_hash.prompt_root(b"", spec.cache_salt.encode(), size), data.tobytes(), size, b""
    )
    assert len(hashes) >= 2 and route.block_hashes == b"".join(hashes)


async def test_a_chain_of_responses_keeps_its_salt(
    stack: GatewayStack, client: openai.OpenAI
) -> None:
    answers: list[Any] = []

    def ask(**more: Any) -> None:
        if answers:
            more["previous_response_id"] = answers[-1].id
        answers.append(
            client.responses.create(model=MODEL, input="one", max_output_tokens=2, **more)
        )

    wanted = []
    for own, salt in (("a", "a"), ("", "a"), ("b", "b"), ("", "b")):
        more: dict[str, Any] = {"extra_body": {"cache_salt": own}} if own else {}
        _, prefill = await overheard(stack, partial(ask, **more))
        wanted.append((prefill.spec.cache_salt, cache_salt_of("", salt)))
    assert all(found == expected for found, expected in wanted), wanted
    # A background response is made from what was stored of its request.
    _, prefill = await overheard(stack, lambda: ask(background=True))
    assert prefill.spec.cache_salt == cache_salt_of("", "b")


async def test_responses_of_a_chain_are_one_session(
    stack: GatewayStack, client: openai.OpenAI
) -> None:
    answers: list[Any] = []

    def ask() -> None:
        more = {"previous_response_id": answers[-1].id} if answers else {}
        answers.append(
            client.responses.create(model=MODEL, input="one", max_output_tokens=2, **more)
        )

    told = [await overheard(stack, ask) for _ in range(3)]
    sessions = {route.session for route, _ in told}
    assert len(sessions) == 1 and sessions.pop().startswith("chain:")
    conversation = client.conversations.create()
    route, _ = await overheard(
        stack,
        lambda: client.responses.create(
            model=MODEL, input="two", conversation=conversation.id, max_output_tokens=2
        ),
    )
    assert route.session == f"conversation:{conversation.id}"


def test_a_bad_value_is_refused_by_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, extra_body={"cache_salt": "x" * 129})
    assert refused.value.param == "cache_salt" and "128" in refused.value.message
