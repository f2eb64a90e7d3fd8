"""Separated = co-hosted = drafted = the plain definition: the same tokens, through the services.

Real engines over a small random network in deterministic mode, a real server, the real cache and
drafter services; hypothesis draws prompts and sampling.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from finback.services.cache.service import CacheService
from finback.services.drafter.service import DrafterService
from finback.shared.config import StackConfig
from finback.shared.engine.config import EngineConfig
from finback.shared.engine.engine import Engine
from finback.shared.engine.output import StepOutput
from finback.shared.engine.sequence import SequenceSpec
from finback.shared.engine.worker_host import WorkerHost
from finback.shared.wire.messages.control import InstanceRecord
from finback.shared.wire.messages.generate import SamplingSpec
from support.nats_server import NatsServer
from support.slow_engine import slow_completion
from support.tiny_model import CONFIG, tiny_model
from support.worker_nest import Nest
from support.worker_stack import Generation, MiniGateway

pytestmark = pytest.mark.nats

T = TypeVar("T")

MAX_LEN = 100
ENGINE = EngineConfig(
    num_blocks=48,
    block_size=8,
    max_model_len=MAX_LEN,
    max_num_seqs=4,
    max_num_batched_tokens=16,
    max_draft_tokens=4,
    mode="deterministic",
    num_threads=1,
)


def load_tiny(config: StackConfig, on_step: Callable[[StepOutput], None]) -> Engine:
    """An engine over the small network."""
    return Engine(tiny_model(), ENGINE, on_step=on_step)


class Workers:
    """A nest in a thread of its own, so that plain (hypothesis) tests can ask it."""

    def __init__(self, url: str, prefix: str, folder: Path) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.nest = Nest(url, prefix, folder, drafting=True, max_num_batched_tokens=16)
        self.hosts: dict[str, WorkerHost] = {}
        self.records: dict[str, InstanceRecord] = {}
        self.gateway: MiniGateway
        try:
            self.ask(self._start(url, prefix))
        except BaseException:
            self.stop()
            raise

    def ask(self, work: Coroutine[Any, Any, T]) -> T:
        """Run on the nest's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    async def _start(self, url: str, prefix: str) -> None:
        await self.nest.start(CacheService)
        await self.nest.start(DrafterService)
        self.gateway = await MiniGateway.connect(url, prefix)
        prefill = await self.nest.worker_with(load_tiny, "prefill")
        decode = await self.nest.worker_with(load_tiny, "decode")
        both = await self.nest.worker_with(load_tiny, "prefill", "decode")
        self.hosts = {"prefill": prefill, "decode": decode, "both": both}
        for name, host in self.hosts.items():
            role = "prefill" if name == "prefill" else "decode"
            others = [h.instance for h in self.hosts.values() if h is not host]
            self.records[name] = await self.gateway.instance_of(role, but=others)

    async def run(
        self, layout: str, prompt: list[int], sampling: SamplingSpec, **more: Any
    ) -> Generation:
        """One generation on a layout, to its end."""
        prefill, decode = ("both", "both") if layout == "both" else ("prefill", "decode")
        spec = self.gateway.spec(prompt, sampling, **more)
        generation = await self.gateway.place(spec, self.records[prefill], self.records[decode])
        return await generation.wait()

    async def close(self) -> None:
        await self.gateway.close()
        await self.nest.close()

    def stop(self) -> None:
        for host in self.hosts.values():
            self.ask(host.engine.stop())
        self.ask(self.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


@pytest.fixture(scope="module")
def workers(nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    made = Workers(nats_server.url, "equal", tmp_path_factory.mktemp("equal"))
    yield made
    made.stop()


def definition(prompt: list[int], sampling: SamplingSpec, seed: int) -> list[int]:
    """The completion by the slow way: one sequence, the whole context at every step."""
    spec = SequenceSpec(
        key=("slow", 0),
        attempt=1,
        token_ids=np.array(prompt, dtype=np.int32),
        sampling=sampling,
        seed=seed,
    )
    return slow_completion(tiny_model(), spec, max_model_len=MAX_LEN, eos_token_ids=())[0]


PROMPTS = st.lists(st.integers(0, CONFIG.vocab_size - 1), min_size=1, max_size=60)
# A few likely tokens make texts that repeat themselves, so that drafts are tried and accepted.
BIAS = st.sampled_from([None, {5: 30.0, 6: 29.0}, {7: 40.0}])
SAMPLING = st.builds(
    SamplingSpec,
    temperature=st.sampled_from([0.0, 0.7, 1.3]),
    top_k=st.sampled_from([0, 5]),
    top_p=st.sampled_from([1.0, 0.9]),
    presence_penalty=st.sampled_from([0.0, 0.4]),
    logit_bias=BIAS,
    max_tokens=st.integers(1, 24),
)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(prompt=PROMPTS, sampling=SAMPLING, seed=st.integers(0, 2**31))
def test_all_layouts_give_the_same_tokens(
    workers: Workers, prompt: list[int], sampling: SamplingSpec, seed: int
) -> None:
    wanted = definition(prompt, sampling, seed)
    for layout in ("apart", "both"):
        for drafting in (False, True):
            done = workers.ask(
                workers.run(layout, prompt, sampling, seeds=(seed,), drafting=drafting)
            )
            assert done.tokens == wanted, (layout, drafting)
            assert done.answers[0].num_ends == 1
            assert done.end.num_completion_tokens == len(wanted)


def test_many_at_once_give_the_same_tokens(workers: Workers) -> None:
    """Batched, preempted and handed over side by side, each as if it were alone."""
    rng = np.random.default_rng(3)
    cases = [
        (
            rng.integers(0, CONFIG.vocab_size, int(rng.integers(1, 60))).tolist(),
            SamplingSpec(temperature=float(rng.choice([0.0, 1.0])), max_tokens=24),
            int(rng.integers(1, 1000)),
        )
        for _ in range(24)
    ]

    async def all_of(layout: str) -> list[Generation]:
        runs = [workers.run(layout, p, s, seeds=(seed,)) for p, s, seed in cases]
        return await asyncio.gather(*runs)

    for layout in ("apart", "both"):
        for done, case in zip(workers.ask(all_of(layout)), cases, strict=True):
            assert done.failed is None
            assert done.tokens == definition(*case), layout
    for host in workers.hosts.values():
        host.engine.check_integrity()


def test_choices_share_a_prompt_and_keep_their_seeds(workers: Workers) -> None:
    prompt = list(range(1, 40))
    sampling = SamplingSpec(temperature=1.0, max_tokens=12)
    for layout in ("apart", "both"):
        done = workers.ask(workers.run(layout, prompt, sampling, seeds=(3, 4, 5)))
        for index, seed in enumerate((3, 4, 5)):
            assert done.answers[index].tokens == definition(prompt, sampling, seed)


def test_drafts_save_steps_where_the_text_repeats(workers: Workers) -> None:
    prompt = list(range(1, 20))
    sampling = SamplingSpec(temperature=0.0, logit_bias={7: 100.0}, max_tokens=64)
    plain = workers.ask(workers.run("apart", prompt, sampling, drafting=False))
    drafted = workers.ask(workers.run("apart", prompt, sampling, drafting=True))
    assert plain.tokens == drafted.tokens == definition(prompt, sampling, 1)
    assert plain.end.num_steps == 64
    assert drafted.end.num_accepted_tokens > 0
    assert drafted.end.num_steps <= 0.7 * plain.end.num_steps


def test_the_second_time_is_a_prefix_hit(workers: Workers) -> None:
    prompt = [9, *range(40, 90)]
    sampling = SamplingSpec(temperature=0.0, max_tokens=4)
    first = workers.ask(workers.run("apart", prompt, sampling))
    second = workers.ask(workers.run("apart", prompt, sampling))
    assert first.tokens == second.tokens
    assert first.end.num_cached_tokens == 0
    assert second.end.num_cached_tokens >= 48
