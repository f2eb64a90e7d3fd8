"""`finback cache`: what to keep, give up or forget."""

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import anyio

from finback.services.supervisor import locate
from finback.services.supervisor.cache_desk import LONG_S, CacheDesk, open_desk
from finback.services.supervisor.cli_cache_told import Told
from finback.services.supervisor.cli_inspect import size
from finback.shared.wire.messages.cache_admin import (
    EvictReply,
    EvictRequest,
    ForgetPoolRequest,
    ForgetPromptsReply,
    ForgetReply,
    ForgetRequest,
    PinReply,
    PinRequest,
    UnpinRequest,
)
from finback.shared.wire.messages.prefill import Ack

Act = Callable[[CacheDesk, locate.Running, Told], Coroutine[Any, Any, None]]


def run(given: Path | None, act: Act, *, as_json: bool = False) -> int:
    """Do something with the caches of the stack in that folder; the exit code."""
    found = locate.running(given)
    told = Told(as_json=as_json)

    async def main() -> None:
        async with open_desk(found) as desk:
            await act(desk, found, told)

    anyio.run(main)
    return told.end()


async def evict(desk: CacheDesk, told: Told, asked: EvictRequest) -> None:
    """Give blocks in memory up, in the order in which they would go."""
    answers = await desk.ask_caches("evict", asked, EvictReply)
    for name, reply in told.take(answers, "caches").items():
        told.line(f"{name}: {reply.num_blocks} blocks, {size(reply.num_bytes)}")


async def forget(desk: CacheDesk, told: Told, asked: ForgetRequest) -> None:
    """Drop blocks in all tiers, in the pools of workers and in what gateways remember.

    Everybody is asked, whoever else gives no answer.
    """
    workers = desk.workers()
    pools = ForgetPoolRequest(tenant=asked.tenant, hashes=asked.hashes)
    # Pools first, or they write anew what a cache has dropped; and again, for what was just fetched.
    told.failed(await desk.ask(workers, "forget-pool", pools, Ack))
    answers = await desk.ask_caches("forget", asked, ForgetReply, timeout_s=LONG_S)
    found = told.take(answers, "caches")
    for name, reply in found.items():
        told.line(f"{name}: {reply.num_host} blocks in memory, {reply.num_files} in files")
    again = await desk.ask(workers, "forget-pool", pools, Ack)
    for name in told.take(again, "workers"):
        told.line(f"{name}: its pool")
    prompts = await desk.ask(desk.gateways(), "forget", asked, ForgetPromptsReply)
    for name, reply in told.take(prompts, "gateways").items():
        told.line(f"{name}: {reply.num_prompts} encoded prompts")
    if asked.hashes and not any(r.num_host + r.num_files for r in found.values()):
        told.complain("no cache held a block of it; are --tenant and --cache-salt right?")


async def pin(desk: CacheDesk, told: Told, name: str, chains: list[tuple[str, bytes]]) -> None:
    """Keep a prefix for ever, under a name."""
    for number, (salt, hashes) in enumerate(chains):
        # One name, one chain: where pools are of several kinds, the others get a name beside it.
        own = name if number == 0 else f"{name} ({number + 1})"
        asked = PinRequest(name=own, salt=salt, hashes=hashes)
        answers = await desk.ask_caches("pin", asked, PinReply)
        for cache, reply in answers.found.items():
            told.put("caches", cache if number == 0 else f"{cache} ({number + 1})", reply)
            told.line(
                f"{cache}: {reply.num_blocks} blocks, {reply.num_held} in memory, "
                f"{reply.num_files} in files"
            )
        told.failed(answers)


async def unpin(desk: CacheDesk, told: Told, name: str) -> None:
    """Let a pinned prefix go the way of others."""
    told.take(await desk.ask_caches("unpin", UnpinRequest(name=name), PinReply), "caches")
