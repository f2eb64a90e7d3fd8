"""Workers with a small real engine, a real cache and a real bus, in one loop; see `worker_nest`."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from finback.services.cache.service import CacheService
from finback.shared.engine.config import EngineConfig
from finback.shared.engine.engine import Engine
from finback.shared.engine.sequence import SequenceSpec
from finback.shared.engine.worker_host import WorkerHost
from finback.shared.models.causal_lm import CausalLM
from finback.shared.wire.messages.control import InstanceRecord
from finback.shared.wire.messages.generate import SamplingSpec
from support.nats_server import NatsServer
from support.role_stack import stack, until
from support.slow_engine import slow_completion
from support.tiny_model import CONFIG, tiny_model
from support.worker_nest import Nest
from support.worker_stack import Generation, MiniGateway

BLOCK_SIZE = 8
ENGINE = EngineConfig(
    num_blocks=48,
    block_size=BLOCK_SIZE,
    max_model_len=120,
    max_num_seqs=4,
    max_num_batched_tokens=32,
    mode="deterministic",
    num_threads=1,
)
SAMPLING = SamplingSpec(temperature=0.8, max_tokens=12, presence_penalty=0.4)


def prompt_of(length: int, seed: int = 1) -> list[int]:
    """Random ids."""
    return np.random.default_rng(seed).integers(0, CONFIG.vocab_size, length).tolist()  # type: ignore[no-any-return]  # numpy says Any


def undisturbed(
    prompt: Sequence[int], sampling: SamplingSpec = SAMPLING, seed: int = 1
) -> list[int]:
    """What the model says to a prompt, without blocks, batches and caches."""
    spec = SequenceSpec(
        key=("slow", 0),
        attempt=1,
        token_ids=np.array(prompt, dtype=np.int32),
        sampling=sampling,
        seed=seed,
    )
    return slow_completion(tiny_model(), spec, max_model_len=120, eos_token_ids=())[0]


@dataclass(slots=True)
class KeptStack:
    """A cache, a gateway of a few lines, and workers that come and go."""

    nest: Nest
    gateway: MiniGateway
    caches: list[CacheService] = field(default_factory=list)
    workers: list[WorkerHost] = field(default_factory=list)

    @property
    def cache(self) -> CacheService:
        return self.caches[-1]

    async def start_cache(self) -> CacheService:
        """Another cache service over the same arena."""
        service = await self.nest.start(CacheService)
        assert isinstance(service, CacheService)
        self.caches.append(service)
        return service

    async def crash_cache(self) -> None:
        """Kill -9; the process's hold on the arena ends with it."""
        await self.nest.crash(self.cache)
        self.cache.arena.close()

    async def stop_cache(self) -> None:
        """As an operator stops it."""
        self.cache.request_drain()
        await self.nest.task_of(self.cache)

    async def worker(self, *roles: str, model: CausalLM | None = None, **engine: Any) -> WorkerHost:
        """A worker that has found the cache."""
        config = replace(ENGINE, **engine)

        def load(_: Any, on_step: Any) -> Engine:
            return Engine(model or tiny_model(), config, on_step=on_step)

        host = await self.nest.worker_with(load, *(roles or ("prefill", "decode")))
        self.workers.append(host)
        if self.caches:
            await until(lambda: host.cache.is_there)
        return host

    async def crash(self, host: WorkerHost) -> None:
        """Kill -9, and wait until its engine is idle."""
        self.workers.remove(host)
        await self.nest.crash(host)
        await host.engine.stop()

    async def record(self, host: WorkerHost, role: str) -> InstanceRecord:
        """Its registry entry."""
        async with asyncio.timeout(30):
            while True:
                for record in self.gateway.directory.instances(role):
                    if record.instance == host.instance:
                        return record
                await asyncio.sleep(0.01)

    async def place(
        self,
        prompt: Sequence[int],
        prefill: WorkerHost,
        decode: WorkerHost | None = None,
        sampling: SamplingSpec = SAMPLING,
        **more: Any,
    ) -> Generation:
        """Send a prompt to these workers."""
        return await self.gateway.place(
            self.gateway.spec(prompt, sampling, **more),
            await self.record(prefill, "prefill"),
            await self.record(decode or prefill, "decode"),
        )

    async def generate(
        self,
        prompt: Sequence[int],
        prefill: WorkerHost,
        decode: WorkerHost | None = None,
        **more: Any,
    ) -> Generation:
        """Place and wait for the end."""
        return await (await self.place(prompt, prefill, decode, **more)).wait()

    async def settle(self) -> None:
        """Until nothing is under way: blocks are stored, leases are given back. Then look at the books."""
        await until(lambda: not any(host.write_back.num_waiting for host in self.workers))
        await until(lambda: not any(host.cache.num_leases for host in self.workers))
        await until(lambda: not any(host.engine.load().num_running for host in self.workers))
        await until(lambda: self.cache.arena.counts().num_leases == 0)
        for host in self.workers:
            host.engine.check_integrity()
            load = host.engine.load()
            assert load.num_free_blocks == load.num_blocks
        self.cache.arena.check_integrity()
        counts = self.cache.arena.counts()
        assert counts.num_reserved == counts.num_committed == counts.num_quarantined == 0


@asynccontextmanager
async def kept_stack(
    server: NatsServer, prefix: str, folder: Path, **overrides: object
) -> AsyncIterator[KeptStack]:
    """A stack with a cache and no worker yet."""
    async with stack(server, prefix, folder, **overrides) as (nest, gateway):
        made = KeptStack(nest, gateway)
        await made.start_cache()
        try:
            yield made
        finally:
            for host in made.workers:
                await host.engine.stop()
