"""State of a sliding-window model between processes: real engines, a real cache, a real bus.

Deterministic mode: whatever is fetched, handed over, lost or damaged, tokens and logprobs are those of
an undisturbed run, bit for bit.
"""

import asyncio
import shutil
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finback.shared.engine.sequence import SequenceSpec
from finback.shared.engine.worker_host import WorkerHost
from finback.shared.lanes.ticket import Ticket
from finback.shared.models.causal_lm import CausalLM
from finback.shared.wire.messages.generate import SamplingSpec
from support.engine_driver import generate
from support.kept_stack import BLOCK_SIZE, ENGINE, KeptStack, kept_stack
from support.nats_server import NatsServer
from support.role_stack import stack, until
from support.windowed import REPLAY, windowed_model
from support.worker_stack import Generation

pytestmark = pytest.mark.nats

SAMPLING = SamplingSpec(temperature=0.8, max_tokens=12, num_logprobs=0)
PROMPT: tuple[int, ...] = tuple(np.random.default_rng(1).integers(0, 96, 61).tolist())
CUT = 60 // BLOCK_SIZE * BLOCK_SIZE


def _model() -> CausalLM:
    return windowed_model("deterministic")


@lru_cache(maxsize=8)
def _alone(prompt: tuple[int, ...]) -> tuple[list[int], list[float]]:
    """Tokens and logprobs of an engine of its own."""
    spec = SequenceSpec(
        key=("alone", 0),
        attempt=1,
        token_ids=np.array(prompt, dtype=np.int32),
        sampling=SAMPLING,
        seed=1,
    )
    completion = generate(_model(), replace(ENGINE, prefix_caching=False), [spec])[0]
    return completion.tokens, [item.logprob for item in completion.logprobs]


async def _check(generation: Generation, prompt: tuple[int, ...] = PROMPT) -> None:
    tokens, logprobs = await asyncio.to_thread(_alone, prompt)
    assert generation.tokens == tokens
    assert generation.answers[0].logprobs == logprobs


def _replayed(host: WorkerHost) -> int:
    assert host.engine.states is not None
    return host.engine.states.num_replayed_tokens


def _counted(host: WorkerHost, name: str, **labels: str) -> float:
    return host.metrics.value(f"finback.{name}", **labels)


async def _settle(made: KeptStack) -> None:
    for host in made.workers:
        states = host.prefixes.states
        if states is not None:
            await until(lambda states=states: not states.num_waiting)  # type: ignore[misc]  # bound now
    await made.settle()


async def test_state_goes_with_the_prompt(
    nats_server: NatsServer, subject_prefix: str, tmp_path: Path
) -> None:
    async with kept_stack(nats_server, subject_prefix, tmp_path) as made:
        prefill = await made.worker("prefill", model=_model())
        decode = await made.worker("decode", model=_model())
        await _check(await made.generate(PROMPT, prefill, decode, sampling=SAMPLING))
        assert _counted(decode, "decode.states_taken", lane="shm") == 1
        assert _replayed(decode) == _replayed(prefill) == 0
        await _settle(made)
        # Prefill has left a snapshot at the prompt's end, decode one at the answer's.
        assert _counted(prefill, "worker.states_kept", outcome="stored") == 1
        assert _counted(decode, "worker.states_kept", outcome="stored") == 1
        # The next turn goes on from there, wherever it is computed.
        turn = (*PROMPT, *(await asyncio.to_thread(_alone, PROMPT))[0], 5, 6, 7)
        other = await made.worker(model=_model())
        generation = await made.generate(turn, other, sampling=SAMPLING)
        await _check(generation, turn)
        assert generation.end.num_cached_tokens == 72 // BLOCK_SIZE * BLOCK_SIZE
        assert (_replayed(other), _counted(other, "worker.states_fetched", outcome="hit")) == (0, 1)
        await _settle(made)


async def test_other_choices_begin_at_the_prompt_s_last_block(
    nats_server: NatsServer, subject_prefix: str, tmp_path: Path
) -> None:
    async with kept_stack(nats_server, subject_prefix, tmp_path) as made:
        prefill = await made.worker("prefill", model=_model())
        decode = await made.worker("decode", model=_model())
        generation = await made.generate(
            PROMPT, prefill, decode, sampling=SAMPLING, seeds=(1, 1, 1)
        )
        await _check(generation)
        for answer in generation.answers.values():
            assert answer.tokens == generation.answers[0].tokens
            assert answer.logprobs == generation.answers[0].logprobs
        assert _replayed(decode) == 0
        assert _counted(decode, "decode.states_taken", lane="shm") == 2
        await _settle(made)


@pytest.mark.parametrize("lane", ["nats", "file", "file that goes away"])
async def test_state_by_other_lanes(
    nats_server: NatsServer, subject_prefix: str, tmp_path: Path, lane: str
) -> None:
    """Without a cache service on the host."""
    more = {} if lane == "nats" else {"lane_dir": str(tmp_path / "lane")}
    async with stack(nats_server, subject_prefix, tmp_path, **more) as (nest, gateway):
        made = KeptStack(nest, gateway)
        prefill = await made.worker("prefill", model=_model())
        decode = await made.worker("decode", model=_model())
        if lane == "file that goes away":
            shutil.rmtree(tmp_path / "lane")
        await _check(await made.generate(PROMPT, prefill, decode, sampling=SAMPLING))
        used = "file" if lane == "file" else "nats"
        assert _counted(decode, "decode.states_taken", lane=used) == 1
        assert _counted(decode, "decode.blocks_taken", lane=used) > 0
        assert _replayed(decode) == 0
        for host in (prefill, decode):
            host.engine.check_integrity()
            await host.engine.stop()


@pytest.mark.parametrize("why", ["damaged", "never sent"])
async def test_state_that_does_not_arrive_is_made_anew(
    why: str, nats_server: NatsServer, subject_prefix: str, tmp_path: Path, monkeypatch: Any
) -> None:
    async with kept_stack(nats_server, subject_prefix, tmp_path) as made:
        prefill = await made.worker("prefill", model=_model())
        decode = await made.worker("decode", model=_model())
        states = prefill.engine.states
        assert states is not None
        export = states.export

        def damaged(key: Any) -> Any:
            found = export(key)
            assert found is not None
            return (found[0], b"?" + found[1][1:])

        monkeypatch.setattr(states, "export", damaged if why == "damaged" else lambda _: None)
        await _check(await made.generate(PROMPT, prefill, decode, sampling=SAMPLING))
        missed = _counted(decode, "decode.states_missed", reason="misfit")
        assert missed == (1 if why == "damaged" else 0)
        # From the prompt's end less its last token.
        assert _replayed(decode) == REPLAY
        assert _counted(decode, "worker.replayed_tokens") == REPLAY
        assert _counted(decode, "worker.states_begun", how="replay") == 1
        await _settle(made)


async def test_bits_that_flip_on_the_lane(
    nats_server: NatsServer, subject_prefix: str, tmp_path: Path, monkeypatch: Any
) -> None:
    async with kept_stack(nats_server, subject_prefix, tmp_path) as made:
        prefill = await made.worker("prefill", model=_model())
        decode = await made.worker("decode", model=_model())
        assert decode.engine.states is not None
        size, get = decode.engine.states.payload_bytes, decode.lanes.get

        async def checked(ticket: Ticket, *rest: Any) -> memoryview:
            if ticket.length == size:
                ticket = replace(ticket, checksum=bytes(len(ticket.checksum)))
            return await get(ticket, *rest)

        monkeypatch.setattr(decode.lanes, "get", checked)
        await _check(await made.generate(PROMPT, prefill, decode, sampling=SAMPLING))
        assert _counted(decode, "decode.states_missed", reason="checksum") == 1
        assert _replayed(decode) == REPLAY
        await _settle(made)


@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_worker_takes_up_what_another_computed(
    is_lost: bool, nats_server: NatsServer, subject_prefix: str, tmp_path: Path
) -> None:
    """Blocks and state from the cache; or blocks alone, and state is replayed."""
    async with kept_stack(nats_server, subject_prefix, tmp_path) as made:
        first = await made.worker(model=_model())
        await _check(await made.generate(PROMPT, first, sampling=SAMPLING))
        await _settle(made)
        assert _counted(first, "worker.states_kept", outcome="stored") == 2
        await made.crash(first)
        second = await made.worker(model=_model())
        if is_lost:
            second.prefixes.states = None
        generation = await made.generate(PROMPT, second, sampling=SAMPLING)
        await _check(generation)
        assert generation.end.num_cached_tokens == (CUT - REPLAY if is_lost else CUT)
        assert _replayed(second) == (REPLAY if is_lost else 0)
        await _settle(made)


async def test_bounded_replay_is_never_found_under_the_plain_salt(
    nats_server: NatsServer, subject_prefix: str, tmp_path: Path
) -> None:
    async with kept_stack(nats_server, subject_prefix, tmp_path) as made:
        bounded = {"state_replay": "bounded", "state_replay_tokens": 4}
        first = await made.worker(model=_model(), **bounded)
        assert first.engine.states is not None
        await made.generate(PROMPT, first, sampling=SAMPLING)
        await _settle(made)
        exact = await made.worker(model=_model())
        generation = await made.generate(PROMPT, exact, sampling=SAMPLING)
        await _check(generation)
        assert generation.end.num_cached_tokens == 0
        assert exact.cache.salt != first.cache.salt
        # One of its own class does find it.
        await _settle(made)
        like = await made.worker(model=_model(), **bounded)
        generation = await made.generate(PROMPT, like, sampling=SAMPLING)
        assert generation.end.num_cached_tokens == CUT
        await _settle(made)
