"""Roles over a real bus in one loop, with a small gateway; see `worker_nest`."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from finback.shared.wire.messages.control import InstanceRecord
from finback.shared.wire.messages.generate import SamplingSpec
from support.nats_server import NatsServer
from support.worker_nest import Nest, nest
from support.worker_stack import MiniGateway

PROMPT = list(range(1, 40))


@asynccontextmanager
async def stack(
    server: NatsServer, prefix: str, folder: Path, **overrides: object
) -> AsyncIterator[tuple[Nest, MiniGateway]]:
    async with nest(server.url, prefix, folder, **overrides) as made:
        gateway = await MiniGateway.connect(server.url, prefix)
        try:
            yield made, gateway
        finally:
            await gateway.close()


def sampling(max_tokens: int = 20) -> SamplingSpec:
    return SamplingSpec(temperature=0.0, max_tokens=max_tokens)


async def until(is_true: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Wait for something that nobody tells."""
    async with asyncio.timeout(timeout_s):
        while not is_true():  # noqa: ASYNC110  # a test looks from outside
            await asyncio.sleep(0.01)


async def pair(gateway: MiniGateway) -> tuple[InstanceRecord, InstanceRecord]:
    return await gateway.instance_of("prefill"), await gateway.instance_of("decode")
