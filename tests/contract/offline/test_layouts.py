"""Alone in `LLM`, and through the services: co-hosted, handed over, drafted. The same bits.

Real prefill and decode roles over a real server with the real cache and drafter; the model, the seeds
and the sampling are the same, so tokens and logprobs must be.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from finback.services.cache.service import CacheService
from finback.services.drafter.service import DrafterService
from finback.shared.config import StackConfig
from finback.shared.engine.build import build_engine
from finback.shared.engine.engine import Engine
from finback.shared.engine.output import StepOutput
from finback.shared.engine.worker_host import WorkerHost
from finback.shared.models.source import open_source
from finback.shared.offline.options import LLMOptions
from finback.shared.offline.outputs import Completion
from support.nats_server import NatsServer
from support.tiny_llm import VOCAB_SIZE, mixed_params, tiny_llm, token_prompts
from support.worker_nest import Nest
from support.worker_stack import MiniGateway

pytestmark = [pytest.mark.nats, pytest.mark.slow]

COUNT = 12
MAX_TOKENS = 24
PROMPTS = token_prompts(COUNT, low=3, high=VOCAB_SIZE, num_shared=70, lengths=(4, 60, 11))

Told = tuple[list[int], list[float]]


def _told(completion: Completion) -> Told:
    assert completion.logprobs is not None
    return list(completion.token_ids), [entry.logprob for entry in completion.logprobs]


def _alone(path: Path) -> list[Told]:
    params = mixed_params(COUNT, MAX_TOKENS)
    with tiny_llm(path, deterministic=True, max_num_seqs=1, enable_prefix_cache=False) as llm:
        return [_told(llm.generate(PROMPTS[at], params[at])[0]) for at in range(COUNT)]


def _loader(path: Path) -> Callable[[StackConfig, Callable[[StepOutput], None]], Engine]:
    options = LLMOptions(
        model=path,
        deterministic=True,
        max_num_seqs=4,
        max_num_batched_tokens=24,
        kv_pool_bytes=2**21,
        num_threads=1,
        max_draft_tokens=4,
    )

    def load(_: StackConfig, on_step: Callable[[StepOutput], None]) -> Engine:
        source = open_source(path)
        settings = replace(options.engine_config(source), max_queue=COUNT)
        return build_engine(source, settings, weights_dtype="auto", on_step=on_step)

    return load


async def _ask(
    gateway: MiniGateway, prefill: WorkerHost, decode: WorkerHost, *, drafting: bool
) -> list[Told]:
    others = [] if decode is prefill else [prefill.instance, decode.instance]
    first = await gateway.instance_of("prefill", but=[i for i in others if i != prefill.instance])
    second = await gateway.instance_of("decode", but=[i for i in others if i != decode.instance])
    params = mixed_params(COUNT, MAX_TOKENS)
    running = [
        await gateway.place(
            gateway.spec(prompt, chosen.spec(0), seeds=(chosen.seed or 0,), drafting=drafting),
            first,
            second,
        )
        for prompt, chosen in zip(PROMPTS, params, strict=True)
    ]
    answers = [(await generation.wait()).answers[0] for generation in running]
    return [(answer.tokens, answer.logprobs) for answer in answers]


@pytest.mark.parametrize("is_together", [True, False], ids=["cohosted", "separate"])
async def test_services_give_what_llm_gives(
    nats_server: NatsServer, tmp_path: Path, tiny_path: Path, is_together: bool
) -> None:
    alone = _alone(tiny_path)
    prefix = f"layouts{int(is_together)}"
    nest = Nest(nats_server.url, prefix, tmp_path, drafting=True, max_num_batched_tokens=24)
    await nest.start(CacheService)
    await nest.start(DrafterService)
    gateway = await MiniGateway.connect(nats_server.url, prefix)
    load = _loader(tiny_path)
    if is_together:
        prefill = decode = await nest.worker_with(load, "prefill", "decode")
    else:
        prefill = await nest.worker_with(load, "prefill")
        decode = await nest.worker_with(load, "decode")
    try:
        for drafting in (False, True):
            assert await _ask(gateway, prefill, decode, drafting=drafting) == alone
    finally:
        for host in {prefill, decode}:
            await host.engine.stop()
        await gateway.close()
        await nest.close()
