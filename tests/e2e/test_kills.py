"""kill -9 of engine-side processes during streams, on the embedded model.

Cache, sampler and drafter never end a stream. A dead prefill is told to the gateway in time, a dead
decode takes its streams along but nothing else.
"""

import asyncio
import dataclasses
import json
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from finback.shared.codec.load import load_tokenizer
from finback.shared.codec.tokenizer import Tokenizer
from finback.shared.errors import Unavailable
from finback.shared.models.source import open_source
from finback.shared.telemetry import tracing
from finback.shared.wire.messages.generate import GrammarSpec, SamplingSpec
from finback.shared.wire.messages.sampler import CompileReply, CompileRequest
from support.nats_server import NatsServer
from support.worker_stack import Generation, MiniGateway, WorkerStack

pytestmark = [pytest.mark.nats, pytest.mark.slow, pytest.mark.timeout(240)]

SETTINGS = {
    "model": "embedded",
    "deterministic": "true",
    "drafting": "true",
    "max_model_len": "2048",
    "kv_pool_bytes": str(256 * 2**20),
    "max_num_batched_tokens": "128",
}
STORY = "The fox jumps over the dog. The cat sleeps under the old tree. "


@pytest.fixture(scope="module")
def stack(
    nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WorkerStack]:
    made = WorkerStack(nats_server.url, tmp_path_factory.mktemp("kills"), "kills", SETTINGS)
    try:
        made.start("cache", "drafter", "sampler", "prefill", "decode")
        asyncio.run(warm_up(made))
        yield made
    finally:
        made.stop()


async def warm_up(stack: WorkerStack) -> None:
    """Kernels that nobody has compiled on this machine yet are compiled at their first use."""
    async with gateway_of(stack) as gateway:
        for num_tokens in (3, 150):
            generation = await start(gateway, list(range(1, num_tokens)), greedy(4))
            await generation.wait(170)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(open_source("embedded").text)


@asynccontextmanager
async def gateway_of(stack: WorkerStack) -> AsyncIterator[MiniGateway]:
    gateway = await MiniGateway.connect(stack.url, stack.prefix)
    try:
        yield gateway
    finally:
        await gateway.close()


def greedy(max_tokens: int) -> SamplingSpec:
    return SamplingSpec(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def prompt_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return [int(token) for token in tokenizer.encode_prompt(text)]


async def start(
    gateway: MiniGateway, prompt: list[int], sampling: SamplingSpec, **more: object
) -> Generation:
    prefill, decode = await gateway.instance_of("prefill"), await gateway.instance_of("decode")
    spec = gateway.spec(prompt, sampling, **more)  # type: ignore[arg-type]  # passed through
    return await gateway.place(spec, prefill, decode)


async def test_drafting_saves_steps_on_a_copy_heavy_prompt(
    stack: WorkerStack, tokenizer: Tokenizer
) -> None:
    prompt = prompt_of(tokenizer, STORY * 5)
    async with gateway_of(stack) as gateway:
        plain = await (await start(gateway, prompt, greedy(64), drafting=False)).wait()
        drafted = await (await start(gateway, prompt, greedy(64))).wait()
    assert drafted.tokens == plain.tokens
    assert plain.end.num_steps == 64
    assert drafted.end.num_steps <= 0.7 * 64
    assert drafted.end.num_accepted_tokens >= 64 - drafted.end.num_steps


@pytest.mark.parametrize("victim", ["cache", "drafter"])
async def test_killing_a_helper_ends_no_stream(
    stack: WorkerStack, tokenizer: Tokenizer, victim: str
) -> None:
    prompt = prompt_of(tokenizer, STORY * 12 + victim)
    fresh = prompt_of(tokenizer, victim + STORY * 12)
    async with gateway_of(stack) as gateway:
        running = await start(gateway, prompt, greedy(80))
        await running.wait_tokens(5)
        stack.processes[victim].kill()
        during = await start(gateway, fresh, greedy(20))
        await asyncio.gather(running.wait(), during.wait())
        await asyncio.to_thread(stack.start, victim)
        again = await (await start(gateway, prompt, greedy(80))).wait()
        after = await (await start(gateway, fresh, greedy(20))).wait()
    assert running.failed is None and during.failed is None
    assert running.tokens == again.tokens and len(running.tokens) == 80
    assert during.tokens == after.tokens and len(during.tokens) == 20


@pytest.mark.parametrize("pattern", ["[0-9]{60}", "(the number is [0-9]{2}; ){6}so be it"])
async def test_killing_the_sampler_only_delays_constrained_streams(
    stack: WorkerStack, tokenizer: Tokenizer, pattern: str
) -> None:
    """The second is drafted, and much of it is forced."""
    prompt = prompt_of(tokenizer, "Numbers: ")
    grammar = GrammarSpec(kind="regex", text=pattern)
    async with gateway_of(stack) as gateway:
        made = await gateway.client.call(
            gateway.subjects.service("sampler", "compile"),
            CompileRequest(model="m", grammar=grammar),
            CompileReply,
            timeout_s=20,
        )
        grammar = dataclasses.replace(grammar, grammar_id=made.grammar_id)
        sampling = SamplingSpec(
            temperature=0.0, max_tokens=100, stop_token_ids=tuple(tokenizer.eos_ids)
        )
        whole = await (await start(gateway, prompt, sampling, grammar=grammar)).wait()
        running = await start(gateway, prompt, sampling, grammar=grammar)
        free = await start(gateway, prompt_of(tokenizer, STORY), greedy(30))
        await running.wait_tokens(10)
        stack.processes["sampler"].kill()
        await free.wait()  # others do not wait for masks
        await asyncio.to_thread(stack.start, "sampler")
        await running.wait()
    text = b"".join(tokenizer.token_bytes(token) for token in running.tokens).decode()
    assert re.fullmatch(pattern + "(<.*>)?", text)
    assert running.tokens == whole.tokens
    assert running.end.finish_reason == "stop"


async def test_one_trace_shows_every_service(stack: WorkerStack, tokenizer: Tokenizer) -> None:
    """A constrained and a drafted choice under one root span, as a gateway would make it."""
    grammar = GrammarSpec(kind="regex", text="[0-9]{5}")
    trace_dir = stack.folder / "run" / "traces"
    tracing.setup("gateway", "gateway-test", trace_dir=str(stack.folder / "test-traces"))
    try:
        async with gateway_of(stack) as gateway:
            with tracing.span("gateway chat.completions"):
                trace_id = tracing.trace_id()
                made = await gateway.client.call(
                    gateway.subjects.service("sampler", "compile"),
                    CompileRequest(model="m", grammar=grammar),
                    CompileReply,
                    timeout_s=20,
                )
                grammar = dataclasses.replace(grammar, grammar_id=made.grammar_id)
                free = await start(gateway, prompt_of(tokenizer, "T " + STORY * 4), greedy(40))
                bound = await start(
                    gateway, prompt_of(tokenizer, "N: "), greedy(5), grammar=grammar
                )
                await asyncio.gather(free.wait(), bound.wait())
    finally:
        tracing.shutdown()
    wanted = {
        ("prefill", "prefill generate"),
        ("prefill", "prefill chunk"),
        ("prefill", "handoff"),
        ("decode", "decode reserve"),
        ("decode", "decode handoff"),
        ("decode", "handoff"),
        ("decode", "decode steps"),
        ("decode", "draft"),
        ("decode", "mask"),
        ("cache", "cache reserve"),
        ("cache", "cache commit"),
        ("drafter", "drafter draft"),
        ("sampler", "sampler mask"),
    }
    seen: set[tuple[str, str]] = set()
    async with asyncio.timeout(20):
        while not wanted <= seen:
            seen = {
                (span["service"], span["name"])
                for span in spans_in(trace_dir)
                if span["trace_id"] == trace_id
            }
            await asyncio.sleep(0.2)
    steps = [
        span["attributes"]
        for span in spans_in(trace_dir)
        if span["trace_id"] == trace_id and span["name"] == "decode steps"
    ]
    of_free = [a for a in steps if a["finback.request_id"] == free.spec.request_id]
    assert sum(a["finback.num_tokens"] for a in of_free) == 40
    accepted = sum(a["finback.num_accepted"] for a in of_free)
    assert accepted == free.end.num_accepted_tokens > 0


def spans_in(folder: Path) -> list[dict[str, Any]]:
    """Every span that the services have written so far."""
    return [
        json.loads(line)
        for path in sorted(folder.glob("*.jsonl"))
        for line in path.read_text().splitlines()
        if line.endswith("}")
    ]


async def test_a_killed_prefill_is_told_in_time(stack: WorkerStack, tokenizer: Tokenizer) -> None:
    prompt = prompt_of(tokenizer, "Once " + STORY * 40)
    async with gateway_of(stack) as gateway:
        streaming = await start(gateway, prompt_of(tokenizer, STORY), greedy(40))
        await streaming.wait_tokens(3)
        lost = await gateway.instance_of("prefill")
        generation = await start(gateway, prompt, greedy(10))
        await asyncio.sleep(0.3)
        assert not generation.is_over
        stack.processes["prefill"].kill()
        killed_s = time.monotonic()
        await generation.wait(15)
        took_s = time.monotonic() - killed_s
        await streaming.wait()
        assert len(streaming.tokens) == 40
        await asyncio.to_thread(stack.start, "prefill")
        fresh = await gateway.instance_of("prefill", but=[lost.instance])
        decode = await gateway.instance_of("decode")
        again = dataclasses.replace(generation.spec, attempt=2)
        done = await (await gateway.place(again, fresh, decode)).wait()
        assert len(done.tokens) == 10
    assert generation.end.error_code == Unavailable.code
    assert took_s < 7, "without a supervisor the lease (3 s) has to run out"


async def test_a_killed_decode_leaves_prefill_whole(
    stack: WorkerStack, tokenizer: Tokenizer
) -> None:
    prompt = prompt_of(tokenizer, "There " + STORY * 40)
    async with gateway_of(stack) as gateway:
        lost = await gateway.instance_of("decode")
        generation = await start(gateway, prompt, greedy(10))
        await asyncio.sleep(0.3)
        stack.processes["decode"].kill()
        await generation.wait(20)
        assert generation.failed is not None
        assert generation.failed.code == Unavailable.code
        assert generation.failed.instance == lost.instance
        await asyncio.to_thread(stack.start, "decode")
        fresh = await gateway.instance_of("decode", but=[lost.instance])
        prefill = await gateway.instance_of("prefill")
        again = dataclasses.replace(generation.spec, attempt=2)
        done = await (await gateway.place(again, prefill, fresh)).wait()
        assert len(done.tokens) == 10


async def test_a_signal_drains(tmp_path: Path, stack: WorkerStack, tokenizer: Tokenizer) -> None:
    """Last in this module: it stops the decode process in good order."""
    async with gateway_of(stack) as gateway:
        generation = await start(gateway, prompt_of(tokenizer, STORY), greedy(40))
        await generation.wait_tokens(2)
        code = asyncio.create_task(asyncio.to_thread(stack.processes["decode"].stop))
        await generation.wait()
        assert len(generation.tokens) == 40 and generation.end.finish_reason == "length"
        assert await code == 0
