"""Stored responses and conversations over HTTP and NATS: whose they are, how large, how they go."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import nats
import openai
import pytest

from finback.services.supervisor import key_file
from support.gateway_stack import GatewayStack
from support.nats_server import NatsServer
from support.response_events import check_stream

MODEL = "gpt-4o"


@pytest.fixture(scope="module")
def shop(nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator["Shop"]:
    folder = tmp_path_factory.mktemp("stored")
    keys = folder / "keys.jsonl"
    made = [key_file.create(keys, name)[0] for name in ("ann", "ben")]
    env = {"FINBACK_API_KEYS_FILE": str(keys), "ECHO_STEP_MS": "1"}
    stack = GatewayStack(nats_server.url, "stored", folder, env)
    try:
        yield Shop(stack.start(), *made)
    finally:
        stack.stop()


class Shop:
    """A stack with two tenants."""

    def __init__(self, stack: GatewayStack, ann: str, ben: str) -> None:
        self.stack = stack
        self.ann_key, self.ben_key = ann, ben

    def client(self, key: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.stack.url}/v1", api_key=key, max_retries=0)

    async def ask(self, endpoint: str, body: Any, key: str) -> list[tuple[dict[str, Any], Any]]:
        """The replies on the bus, up to the last."""
        connection = await nats.connect(self.stack.nats_url)
        replies: list[tuple[dict[str, Any], Any]] = []
        try:
            inbox = connection.new_inbox()
            subscription = await connection.subscribe(inbox)
            headers = {"Authorization": f"Bearer {key}"}
            subject = f"{self.stack.prefix}.v1.api.{endpoint}"
            payload = json.dumps(body).encode()
            await connection.publish(subject, payload, reply=inbox, headers=headers)
            while True:
                message = await subscription.next_msg(timeout=10)
                found = message.headers or {}
                data = json.loads(message.data) if message.data else None
                replies.append((found, data))
                if "Finback-Final" in found or "Finback-Seq" not in found:
                    return replies
        finally:
            await connection.close()

    async def one(self, endpoint: str, body: Any, key: str = "") -> Any:
        return (await self.ask(endpoint, body, key or self.ann_key))[0][1]


@pytest.fixture
def ann(shop: Shop) -> Iterator[openai.OpenAI]:
    with shop.client(shop.ann_key) as client:
        yield client


@pytest.fixture
def ben(shop: Shop) -> Iterator[openai.OpenAI]:
    with shop.client(shop.ben_key) as client:
        yield client


def say(client: openai.OpenAI, text: Any, **fields: Any) -> Any:
    create: Any = client.responses.create
    return create(model=MODEL, input=text, **fields)


def test_turns_follow_each_other(ann: openai.OpenAI) -> None:
    made, sizes = None, []
    for at in range(6):
        made = say(ann, f"turn {at}", previous_response_id=made.id if made else None)
        assert made.output_text == f"turn {at}"
        sizes.append(made.usage.input_tokens)
    assert sizes == sorted(sizes) and sizes[-1] > sizes[0]
    assert made is not None
    pages: Any = ann.responses.input_items.list(made.id, order="asc", limit=4)
    texts = [item.content[0].text for item in pages]
    assert texts == [f"turn {at // 2}" for at in range(11)]
    newest: Any = ann.responses.input_items.list(made.id, limit=1)
    assert newest.data[0].content[0].text == "turn 5" and newest.has_more
    again = ann.responses.retrieve(made.id)
    assert again == made


def test_instructions_are_not_carried_over(ann: openai.OpenAI) -> None:
    first = say(ann, "a", instructions="be very brief and say nothing but the truth")
    bare = say(ann, "a")
    after = say(ann, "b", previous_response_id=first.id)
    assert after.instructions is None
    assert after.usage == say(ann, "b", previous_response_id=bare.id).usage


def test_deleted_and_unstored_ones_are_gone(ann: openai.OpenAI, shop: Shop) -> None:
    first = say(ann, "x")
    second = say(ann, "y", previous_response_id=first.id)
    ann.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        ann.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError):
        ann.responses.delete(first.id)
    with pytest.raises(openai.BadRequestError) as gone:
        say(ann, "z", previous_response_id=first.id)
    assert gone.value.code == "previous_response_not_found"
    assert say(ann, "z", previous_response_id=second.id).output_text == "z"
    unstored = say(ann, "a phrase that is nowhere", store=False)
    assert unstored.store is False
    with pytest.raises(openai.NotFoundError):
        ann.responses.retrieve(unstored.id)
    with pytest.raises(openai.BadRequestError):
        say(ann, "z", previous_response_id=unstored.id)


def test_a_tenant_sees_its_own_alone(ann: openai.OpenAI, ben: openai.OpenAI) -> None:
    made = say(ann, "mine", background=True)
    conversation = ann.conversations.create(items=[{"role": "user", "content": "hi"}])
    item = next(iter(ann.conversations.items.list(conversation.id)))
    tries: list[Any] = [
        lambda: ben.responses.retrieve(made.id),
        lambda: ben.responses.retrieve(made.id, stream=True),
        lambda: ben.responses.delete(made.id),
        lambda: ben.responses.cancel(made.id),
        lambda: ben.responses.input_items.list(made.id),
        lambda: ben.conversations.retrieve(conversation.id),
        lambda: ben.conversations.update(conversation.id, metadata={}),
        lambda: ben.conversations.delete(conversation.id),
        lambda: ben.conversations.items.list(conversation.id),
        lambda: ben.conversations.items.retrieve(str(item.id), conversation_id=conversation.id),
        lambda: ben.conversations.items.delete(str(item.id), conversation_id=conversation.id),
        lambda: ben.conversations.items.create(
            conversation.id, items=[{"role": "user", "content": "hi"}]
        ),
        lambda: say(ben, "x", conversation=conversation.id),
    ]
    for attempt in tries:
        with pytest.raises(openai.NotFoundError):
            attempt()
    for fields in (
        {"previous_response_id": made.id},
        {"input": [{"type": "item_reference", "id": item.id}]},
    ):
        create: Any = ben.responses.create
        with pytest.raises(openai.BadRequestError, match="not found"):
            create(**{"model": MODEL, "input": "x", **fields})
    assert ann.conversations.retrieve(conversation.id) == conversation


def test_conversations_grow_with_responses(ann: openai.OpenAI) -> None:
    conversation = ann.conversations.create(metadata={"topic": "x"})
    assert conversation.id.startswith("conv_") and conversation.metadata == {"topic": "x"}
    first = say(ann, "one", conversation=conversation.id)
    assert first.conversation.id == conversation.id
    with ann.responses.stream(
        model=MODEL, input="two", conversation=conversation.id, store=False
    ) as stream:
        second = stream.get_final_response()
    assert second.usage is not None and second.usage.input_tokens > first.usage.input_tokens
    items: Any = list(ann.conversations.items.list(conversation.id, order="asc", limit=3))
    assert [(i.role, i.content[0].text) for i in items] == [
        ("user", "one"), ("assistant", "one"), ("user", "two"), ("assistant", "two"),
    ]  # fmt: skip
    one = ann.conversations.items.retrieve(items[1].id, conversation_id=conversation.id)
    assert one == items[1]
    ann.conversations.items.delete(items[0].id, conversation_id=conversation.id)
    made: Any = ann.conversations.items.create(
        conversation.id, items=[{"role": "user", "content": "three"}, items[0].model_dump()]
    )
    assert [item.content[0].text for item in made.data] == ["three", "one"]
    with pytest.raises(openai.BadRequestError, match="already"):
        ann.conversations.items.create(conversation.id, items=[items[0].model_dump()])
    left: Any = ann.conversations.items.list(conversation.id, after=items[3].id, order="asc")
    assert [item.content[0].text for item in left] == ["three", "one"]
    changed = ann.conversations.update(conversation.id, metadata={"topic": "y"})
    assert changed.metadata == {"topic": "y"}
    with pytest.raises(openai.BadRequestError) as missing:
        ann.conversations.update(conversation.id, metadata=openai.omit)  # type: ignore[arg-type]  # wrong on purpose
    assert missing.value.param == "metadata"
    assert ann.conversations.retrieve(conversation.id).metadata == {"topic": "y"}
    assert ann.conversations.delete(conversation.id).deleted
    with pytest.raises(openai.NotFoundError):
        ann.conversations.items.list(conversation.id)
    assert ann.responses.retrieve(first.id).output_text == "one"


def test_five_megabytes_are_kept_and_given_back(ann: openai.OpenAI) -> None:
    text = random.Random(0).randbytes(5 * 2**19).hex()
    items: Any = [{"role": "user", "content": text}]
    conversation = ann.conversations.create(items=items)
    (back,) = list(ann.conversations.items.list(conversation.id))
    assert back.type == "message" and back.content[0].text == text  # type: ignore[union-attr] # one kind of many
    with pytest.raises(openai.APIStatusError) as over:
        ann.conversations.items.create(conversation.id, items=items)
    assert over.value.status_code == 413 and "8388608" in over.value.message
    with pytest.raises(openai.BadRequestError) as long:
        say(ann, "x", conversation=conversation.id)
    assert long.value.code == "context_length_exceeded"
    ann.conversations.delete(conversation.id)


def test_restarts_lose_nothing(shop: Shop, ann: openai.OpenAI) -> None:
    first = say(ann, "before")
    conversation = ann.conversations.create(items=[{"role": "user", "content": "hi"}])
    shop.stack.kill("gateway")
    shop.stack.mend()
    assert ann.responses.retrieve(first.id) == first
    assert say(ann, "after", previous_response_id=first.id).output_text == "after"
    assert len(list(ann.conversations.items.list(conversation.id))) == 1


async def test_the_same_on_the_bus(shop: Shop) -> None:
    body = {"model": MODEL, "input": "hello there"}
    made = await shop.one("responses", body)
    assert made["output"][0]["content"][0]["text"] == "hello there"
    ref = {"response_id": made["id"]}
    assert await shop.one("responses.get", ref) == made
    items = await shop.one("responses.input_items", {**ref, "limit": 5})
    assert items["data"][0]["role"] == "user"
    counted = await shop.one("responses.input_tokens", body)
    assert counted["input_tokens"] == made["usage"]["input_tokens"]
    replies = await shop.ask(
        "responses", {**body, "stream": True, "background": True}, shop.ann_key
    )
    events = [data for _, data in replies if data is not None]
    final = check_stream(events)
    assert replies[-1][0]["Finback-Final"] == "end"
    again = await shop.ask(
        "responses.get",
        {"response_id": final["id"], "stream": True, "starting_after": 3},
        shop.ann_key,
    )
    assert [data for _, data in again if data is not None] == events[4:]
    cancelled = await shop.one("responses.cancel", {"response_id": final["id"]})
    assert cancelled["status"] == "completed"
    assert (await shop.one("responses.delete", ref))["deleted"] is True
    wrong = await shop.ask("responses.get", ref, shop.ann_key)
    assert wrong[0][0]["Nats-Service-Error-Code"] and "not found" in wrong[0][1]["error"]["message"]


async def test_an_answer_too_large_for_the_bus_is_an_error(shop: Shop) -> None:
    url, noise = f"{shop.stack.url}/v1/conversations", random.Random(0)
    headers = {"authorization": f"Bearer {shop.ann_key}"}
    async with httpx.AsyncClient(headers=headers, timeout=20) as client:
        name = (await client.post(url, json={})).json()["id"]
        for _ in range(2):
            item = {"role": "user", "content": noise.randbytes(2_096_600).hex()}
            reply = await client.post(f"{url}/{name}/items", json={"items": [item]})
            assert reply.status_code == 200, reply.text
        found = await shop.one("conversations.items", {"conversation_id": name})
        assert "above the bus limit" in found["error"]["message"]
        page = await shop.one("conversations.items", {"conversation_id": name, "limit": 1})
        assert page["data"][0]["content"][0]["text"] == item["content"]
        assert (await client.delete(f"{url}/{name}")).status_code == 200


async def test_conversations_on_the_bus(shop: Shop) -> None:
    made = await shop.one("conversations", {"metadata": {"a": "b"}})
    ref = {"conversation_id": made["id"]}
    assert await shop.one("conversations.get", ref) == made
    added = await shop.one(
        "conversations.items.create", {**ref, "items": [{"role": "user", "content": "x"}]}
    )
    item = {**ref, "item_id": added["data"][0]["id"]}
    assert await shop.one("conversations.items.get", item) == added["data"][0]
    assert (await shop.one("conversations.items", ref))["data"] == added["data"]
    await shop.one("conversations.items.delete", item)
    assert (await shop.one("conversations.items", ref))["data"] == []
    changed = await shop.one("conversations.update", {**ref, "metadata": {}})
    assert changed["metadata"] == {}
    assert (await shop.one("conversations.delete", ref))["deleted"] is True


def test_a_full_store_takes_no_answer_away(nats_server: NatsServer, tmp_path: Path) -> None:
    """4 MiB of store, filled by a conversation: answers come, marked as not stored."""
    env = {"FINBACK_STORE_MAX_BYTES": str(2**22), "FINBACK_LEASE_TTL_S": "1"}
    stack = GatewayStack(nats_server.url, "full", tmp_path, env)
    try:
        stack.start()
        with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="-", max_retries=0) as client:
            noise = random.Random(0)
            for num_bytes in (2**19, 2**15, 2**11):
                with pytest.raises(openai.InternalServerError, match="full"):
                    for _ in range(100):
                        text = noise.randbytes(num_bytes).hex()
                        client.conversations.create(items=[{"role": "user", "content": text}])
            large = {"instructions": noise.randbytes(2**11).hex()}
            made = say(client, "x", **large)
            assert made.output_text == "x" and made.store is False
            stream_of: Any = client.responses.stream
            with stream_of(model=MODEL, input="x", **large) as stream:
                final = stream.get_final_response()
            assert final.output_text == "x" and final.model_dump()["store"] is False
            with pytest.raises(openai.InternalServerError, match="store"):
                say(client, "x", background=True, **large)
    finally:
        stack.stop()


def test_an_idempotent_request_is_made_once(shop: Shop) -> None:
    made = [
        httpx.post(
            f"{shop.stack.url}/v1/responses",
            json={"model": MODEL, "input": "once"},
            headers={"authorization": f"Bearer {shop.ann_key}", "idempotency-key": "k1"},
        ).json()["id"]
        for _ in range(2)
    ]
    assert made[0] == made[1]


def test_the_file_is_the_owners_alone(shop: Shop) -> None:
    for path in Path(shop.stack.folder).glob("responses.sqlite*"):
        assert path.stat().st_mode & 0o077 == 0
