"""The sampler as a process: compile and mask over the bus, killed and rebuilt from tokens."""

import json
from collections.abc import Iterator
from pathlib import Path

import anyio
import numpy as np
import psutil
import pytest

from finback.shared.actor.client import Client
from finback.shared.actor.nats_bus import BusSettings, NatsBus, connect
from finback.shared.codec.load import load_tokenizer
from finback.shared.codec.tokenizer import Tokenizer
from finback.shared.errors import InvalidRequest
from finback.shared.lanes.byte_ring import RingReader
from finback.shared.lanes.mask_ring import mask_folder, take_masks
from finback.shared.models.source import open_source
from finback.shared.wire.messages.generate import GrammarSpec
from finback.shared.wire.messages.sampler import (
    CompileReply,
    CompileRequest,
    Mask,
    MaskReply,
    MaskRequest,
    MaskRow,
)
from finback.shared.wire.subjects import Subjects
from support.nats_server import NatsServer
from support.service_process import ServiceProcess

pytestmark = pytest.mark.nats

JSON = GrammarSpec(kind="json_object")
TEXT = '{"city": "Paris", "n": [1, 2, {"x": null}]}'


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(open_source("embedded").text)


@pytest.fixture
def sampler(
    nats_server: NatsServer, tmp_path: Path, subject_prefix: str
) -> Iterator[ServiceProcess]:
    process = ServiceProcess(
        "sampler",
        {
            "FINBACK_NATS_URL": nats_server.url,
            "FINBACK_RUN_DIR": str(tmp_path),
            "FINBACK_STACK_ID": subject_prefix,
            "FINBACK_SUBJECT_PREFIX": subject_prefix,
            "FINBACK_SHM_DIR": str(tmp_path / "shm"),
        },
    ).start()
    yield process
    process.stop()


class Decode:
    """What a decode instance does about one constrained sequence."""

    def __init__(
        self,
        client: Client,
        grammar: GrammarSpec,
        grammar_id: str,
        rings: RingReader | None = None,
    ) -> None:
        self._client = client
        self._rings = rings
        self.num_in_ring = 0
        self._grammar = grammar
        self._grammar_id = grammar_id
        self._num_known = 0
        self._sends_grammar = False
        self.num_exchanges = 0

    async def mask(self, token_ids: list[int]) -> Mask:
        """The mask after `token_ids`, telling the sampler whatever it lacks."""
        for _ in range(100):
            reply = await self._ask(token_ids)
            if reply is None:
                continue  # not ready in time: asked again
            if reply.need_grammar or reply.need_from is not None:
                self._sends_grammar |= reply.need_grammar
                self._num_known = reply.need_from or 0
                continue
            self._num_known, self._sends_grammar = len(token_ids), False
            return reply
        raise AssertionError("the sampler asks for ever")

    async def _ask(self, token_ids: list[int]) -> Mask | None:
        row = MaskRow(
            request_id="r",
            choice=0,
            grammar_id=self._grammar_id,
            position=self._num_known,
            token_ids=np.array(token_ids[self._num_known :], "<i4").tobytes(),
            grammar=self._grammar if self._sends_grammar else None,
        )
        names = () if self._rings is None else self._rings.names
        request = MaskRequest(instance="decode-a", epoch=1, model="m", rows=(row,), rings=names)
        subject = self._client.subjects.service("sampler", "mask")
        reply = await self._client.call(subject, request, MaskReply, timeout_s=30)
        self.num_exchanges += len(reply.masks)
        self.num_in_ring += sum(1 for mask in reply.masks if mask.ring_at)
        if self._rings is None:
            assert not any(mask.ring_at for mask in reply.masks)
            return reply.masks[0] if reply.masks else None
        self._rings.meet(reply.ring)
        taken = take_masks(self._rings, reply)
        return taken[0] if taken else None


async def open_client(sampler: ServiceProcess) -> tuple[NatsBus, Client]:
    bus = await connect(BusSettings(url=sampler.env["FINBACK_NATS_URL"]))
    return bus, Client(bus, Subjects(sampler.env["FINBACK_SUBJECT_PREFIX"]))


async def compile_grammar(client: Client, grammar: GrammarSpec) -> CompileReply:
    request = CompileRequest(model="m", grammar=grammar)
    subject = client.subjects.service("sampler", "compile")
    return await client.call(subject, request, CompileReply, timeout_s=30)


def is_allowed(mask: Mask, token_id: int) -> bool:
    return bool(mask.bitmask[token_id >> 3] >> (token_id & 7) & 1)


async def test_a_json_object_is_let_through_with_kills_in_between(
    sampler: ServiceProcess, tokenizer: Tokenizer
) -> None:
    bus, client = await open_client(sampler)
    made = await compile_grammar(client, JSON)
    assert not made.is_cached and (await compile_grammar(client, JSON)).is_cached
    decode = Decode(client, JSON, made.grammar_id)
    ids = tokenizer.encode(TEXT)
    for position, token_id in enumerate(ids):
        if position in (5, 11):
            sampler.kill()
            sampler.start()
        mask = await decode.mask(ids[:position])
        assert (mask.position, mask.is_accepting) == (position, False)
        assert len(mask.bitmask) == 49152 // 8
        assert is_allowed(mask, token_id), TEXT[:position]
        assert not any(is_allowed(mask, end) for end in tokenizer.eos_ids)
    last = await decode.mask(ids)
    allowed = [i for i in range(49152) if is_allowed(last, i)]
    assert last.is_accepting and sorted(allowed) == sorted(tokenizer.eos_ids)
    assert decode.num_exchanges <= len(ids) + 1 + 2 * 2
    await bus.close()


async def test_a_bad_grammar_is_refused_with_its_construct(sampler: ServiceProcess) -> None:
    bus, client = await open_client(sampler)
    with pytest.raises(InvalidRequest) as caught:
        await compile_grammar(client, GrammarSpec(kind="regex", text="(?=a)b"))
    assert caught.value.param == "structured_outputs.regex"
    assert "look-around" in (caught.value.reason or "")
    await bus.close()


async def test_many_sequences_of_several_callers(
    sampler: ServiceProcess, tokenizer: Tokenizer
) -> None:
    bus, client = await open_client(sampler)
    schema = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}})
    spec = GrammarSpec(kind="json_schema", text=schema)
    made = await compile_grammar(client, spec)
    ids = tokenizer.encode('{"a": 12')

    async def caller(index: int) -> None:
        for position in range(len(ids)):
            rows = tuple(
                MaskRow(
                    request_id=f"r{number}",
                    choice=0,
                    grammar_id=made.grammar_id,
                    position=max(0, position - 1),
                    token_ids=np.array(ids[max(0, position - 1) : position], "<i4").tobytes(),
                )
                for number in range(16)
            )
            request = MaskRequest(instance=f"decode-{index}", epoch=1, model="m", rows=rows)
            subject = client.subjects.service("sampler", "mask")
            reply = await client.call(subject, request, MaskReply, timeout_s=30)
            assert len({mask.bitmask for mask in reply.masks}) == 1
            assert all(is_allowed(mask, ids[position]) for mask in reply.masks)

    async with anyio.create_task_group() as group:
        for index in range(4):
            group.start_soon(caller, index)
    await bus.close()


def test_it_is_small_and_starts_quickly(sampler: ServiceProcess) -> None:
    assert psutil.Process(sampler.pid).memory_full_info().pss < 120 * 2**20
    assert sampler.start_s < 5  # a loaded machine; about 0.6 s on an idle one
    assert sampler.stop() == 0


async def test_masks_by_shared_memory_are_those_by_message(
    sampler: ServiceProcess, tokenizer: Tokenizer
) -> None:
    bus, client = await open_client(sampler)
    made = await compile_grammar(client, JSON)
    folder = mask_folder(sampler.env["FINBACK_SHM_DIR"], sampler.env["FINBACK_STACK_ID"])
    rings = RingReader(folder)
    by_ring = Decode(client, JSON, made.grammar_id, rings)
    by_message = Decode(client, JSON, made.grammar_id)
    ids = tokenizer.encode(TEXT)
    for position in range(len(ids) + 1):
        if position == len(ids) // 2:
            sampler.kill()
            sampler.start()
        shared = await by_ring.mask(ids[:position])
        sent = await by_message.mask(ids[:position])
        assert (shared.bitmask, shared.is_accepting) == (sent.bitmask, sent.is_accepting)
    # The first reply of each process only tells of its ring, and the one killed left nothing behind.
    assert by_ring.num_in_ring > len(ids) - 4
    assert len(list(folder.glob("*.ring"))) == 1
    rings.close()
    await bus.close()
