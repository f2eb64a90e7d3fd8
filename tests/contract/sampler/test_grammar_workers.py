"""The sampler's workers: real processes, killed, stopped, and fed with hostile grammars."""

import asyncio
import json
import os
import random
import signal

import numpy as np
import pytest

from finback.services.sampler import compile_desk, policy
from finback.services.sampler.service import SamplerService
from finback.services.sampler.worker_link import WorkerLink
from finback.shared.actor.client import Client
from finback.shared.codec.load import load_tokenizer
from finback.shared.codec.tokenizer import Tokenizer
from finback.shared.errors import InvalidRequest
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
from support.hostile_grammars import hostile_grammars
from support.local_service import serving

JSON = GrammarSpec(kind="json_object")
OTHER = GrammarSpec(kind="regex", text="[a-z ]{1,200}")
HEAVY = GrammarSpec(
    kind="json_schema",
    text=json.dumps({"enum": [f"value {i} of {i * 7919}" for i in range(6_000)]}),
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(open_source("embedded").text)


async def compiled(client: Client, spec: GrammarSpec) -> CompileReply:
    request = CompileRequest(model="m", grammar=spec)
    subject = client.subjects.service("sampler", "compile")
    return await client.call(subject, request, CompileReply, timeout_s=60)


class Stream:
    """A sequence as decode keeps it: told is what was acknowledged."""

    def __init__(self, client: Client, name: str, spec: GrammarSpec, grammar_id: str) -> None:
        self.client, self.name, self.spec, self.grammar_id = client, name, spec, grammar_id
        self.token_ids: list[int] = []
        self.num_known = 0
        self.sends_grammar = False

    def row(self) -> MaskRow:
        return MaskRow(
            request_id=self.name,
            choice=0,
            grammar_id=self.grammar_id,
            position=self.num_known,
            token_ids=np.array(self.token_ids[self.num_known :], "<i4").tobytes(),
            grammar=self.spec if self.sends_grammar else None,
        )

    def take(self, mask: Mask) -> Mask | None:
        if mask.need_grammar or mask.need_from is not None:
            self.sends_grammar |= mask.need_grammar
            self.num_known = mask.need_from or 0
            return None
        self.num_known, self.sends_grammar = len(self.token_ids), False
        return mask


async def ask(client: Client, *streams: Stream) -> dict[str, Mask]:
    """One request for several; what came of it. Nobody is answered by an error of the call."""
    rows = tuple(stream.row() for stream in streams)
    request = MaskRequest(instance="d", epoch=1, model="m", rows=rows)
    subject = client.subjects.service("sampler", "mask")
    reply = await client.call(subject, request, MaskReply, timeout_s=20)
    by_name = {stream.name: stream for stream in streams}
    taken = {mask.request_id: by_name[mask.request_id].take(mask) for mask in reply.masks}
    return {name: mask for name, mask in taken.items() if mask is not None}


async def mask_of(stream: Stream, tries: int = 400) -> Mask:
    for _ in range(tries):
        found = await ask(stream.client, stream)
        if found:
            return found[stream.name]
    raise AssertionError("no mask")


def is_allowed(mask: Mask, token_id: int) -> bool:
    return bool(mask.bitmask[token_id >> 3] >> (token_id & 7) & 1)


def worker_of(service: SamplerService, name: str) -> WorkerLink:
    return next(link for key, (link, _) in service.masks._pins.items() if key[2] == name)


async def test_a_killed_worker_costs_nothing_but_time(tokenizer: Tokenizer) -> None:
    async with serving(SamplerService) as service:
        made = await compiled(service.client, JSON)
        stream = Stream(service.client, "r", JSON, made.grammar_id)
        for position, token_id in enumerate(tokenizer.encode('{"city": "Paris", "n": [1, 2]}')):
            if position in (3, 8):
                os.kill(worker_of(service, "r").pid, signal.SIGKILL)
            mask = await mask_of(stream)
            assert mask.position == position and is_allowed(mask, token_id)
            stream.token_ids.append(token_id)
        assert (await mask_of(stream)).is_accepting


async def test_a_worker_that_hangs_holds_up_its_own_grammar_only(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "STUCK_WALL_S", 1.5)
    monkeypatch.setattr(policy, "MAX_SHARED_LOAD_MS", 1e6)
    monkeypatch.setattr(policy, "MAX_SHARED_MASK_MS", 1e6)
    async with serving(SamplerService) as service:
        service.pool.shared[1:], spare = [], service.pool.shared[1:]
        ids = [(await compiled(service.client, spec)).grammar_id for spec in (JSON, OTHER)]
        slow, other = (
            Stream(service.client, name, spec, grammar_id)
            for name, spec, grammar_id in zip(("slow", "other"), (JSON, OTHER), ids, strict=True)
        )
        for stream, text in ((slow, '{"a'), (other, "hello")):
            stream.token_ids = tokenizer.encode(text)
            assert (await mask_of(stream)).bitmask
        stopped = worker_of(service, "slow")
        assert stopped is worker_of(service, "other")
        service.pool.shared += spare
        os.kill(stopped.pid, signal.SIGSTOP)
        for stream, text in ((slow, "b"), (other, " you")):
            stream.token_ids += tokenizer.encode(text)
        found: dict[str, Mask] = {}
        while "other" not in found:
            found = await ask(service.client, slow, other)
            assert "slow" not in found
        assert worker_of(service, "other") is not stopped
        assert not found["other"].error
        assert "takes more than" in (await mask_of(slow)).error
        with pytest.raises(InvalidRequest) as caught:
            await compiled(service.client, JSON)
        assert caught.value.reason == "mask_time"


async def test_a_compilation_over_budget_is_killed_and_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving(SamplerService) as service:
        # Below nothing: a quick machine compiles any grammar between two looks at the clock.
        monkeypatch.setattr(compile_desk, "COMPILE_CPU_S", -1.0)
        with pytest.raises(InvalidRequest, match="to compile") as caught:
            await compiled(service.client, HEAVY)
        assert caught.value.reason == "compile_time"
        assert caught.value.param == "response_format.json_schema"
        assert service.pool.num_killed == 1
        monkeypatch.undo()
        with pytest.raises(InvalidRequest, match="to compile"):  # remembered
            await compiled(service.client, HEAVY)
        assert service.pool.num_killed == 1
        assert (await compiled(service.client, OTHER)).placement == "shared"


async def test_the_same_grammar_is_compiled_once() -> None:
    async with serving(SamplerService) as service:
        made = await asyncio.gather(*(compiled(service.client, HEAVY) for _ in range(6)))
        assert len({reply.compile_ms for reply in made}) == 1
        again = await compiled(service.client, HEAVY)
        assert again.is_cached and again.engine == "llguidance" and again.num_bytes > 0
        assert len(service.catalogue) == 1


async def test_the_vocabularys_process_may_die(tokenizer: Tokenizer) -> None:
    async with serving(SamplerService) as service:
        made = await compiled(service.client, JSON)
        stream = Stream(service.client, "r", JSON, made.grammar_id)
        assert (await mask_of(stream)).bitmask
        os.kill(service.pool.parent_pid, signal.SIGKILL)
        stream.token_ids = tokenizer.encode('{"a"')
        assert is_allowed(await mask_of(stream, 4000), tokenizer.encode(":")[0])
        assert (await compiled(service.client, OTHER)).grammar_id


async def test_another_vocabulary_is_refused() -> None:
    async with serving(SamplerService) as service:
        subject = service.client.subjects.service("sampler", "compile")
        request = CompileRequest(model="m", grammar=JSON, vocab_size=1000)
        with pytest.raises(InvalidRequest) as caught:
            await service.client.call(subject, request, CompileReply, timeout_s=10)
        assert caught.value.reason == "vocabulary_mismatch"


async def follow(service: SamplerService, name: str, spec: GrammarSpec) -> str:
    """Compile, and draw some tokens; what became of it."""
    draw = random.Random(name)
    try:
        made = await compiled(service.client, spec)
    except InvalidRequest as error:
        assert error.reason and error.param
        return "refused"
    stream = Stream(service.client, name, spec, made.grammar_id)
    for _ in range(6):
        mask = await mask_of(stream)
        if mask.error:
            return "refused later"
        bits = np.unpackbits(np.frombuffer(mask.bitmask, np.uint8), bitorder="little")
        token_id = int(draw.choice(np.flatnonzero(bits).tolist()))
        if token_id < 3 and mask.is_accepting:
            return "ended"
        stream.token_ids.append(token_id)
    return "works"


async def test_hostile_grammars_are_refused_or_work(tokenizer: Tokenizer) -> None:
    async with serving(SamplerService) as service:
        made = await compiled(service.client, JSON)
        ids = tokenizer.encode('{"a": [1, 2, {"b": "some text"}], "c": null}')
        victim = Stream(service.client, "victim", JSON, made.grammar_id)
        told: set[str] = set()
        for index, (_, spec) in enumerate(hostile_grammars(20, seed=5)):
            told.add(await follow(service, f"h{index}", spec))
            mask = await mask_of(victim)
            assert not mask.error and is_allowed(mask, ids[len(victim.token_ids) % len(ids)])
            victim.token_ids.append(ids[len(victim.token_ids) % len(ids)])
            if len(victim.token_ids) == len(ids):
                victim = Stream(service.client, f"victim{index}", JSON, made.grammar_id)
        assert {"refused", "works"} <= told
