"""Many short requests, many streams and kills: is anything held afterwards that nobody needs?

    python benchmarks/cache/leaks.py [--layout separate] [--lane shm] [--deterministic] [--requests 2000]
                                     [--warm 40] [--streams 200] [--kills 5] [--seed 1]

Two tenants with a key each ask with prompts that share prefixes; some clients leave in the middle. Then
`--streams` answers are streamed at once, then decode is killed under streams. When all leases must have
ended the arena is scanned, pools and leases are counted, and the memory that each process has for
itself is compared, after half of the short requests and after all of them. With `--lane nats` the arena is too
small for one block, so that blocks and everything else go over NATS. Exit code 1 if something leaked.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

sys.path[:0] = [str(Path(__file__).parents[1])]

from stack_under_test import FINBACK, run_stack

from finback.shared.actor.client import Client
from finback.shared.actor.nats_bus import BusSettings, connect
from finback.shared.lanes.arena_format import PAGE, SlotState, parse_extent, read_slot
from finback.shared.wire import codec
from finback.shared.wire.messages.cache_admin import StatsReply, StatsRequest
from finback.shared.wire.messages.decode import LoadReport
from finback.shared.wire.subjects import Subjects

TIMEOUT_S: Final = 120.0
# Leases end after 10 s; the cache looks every second, and for dead writers every five.
SETTLE_S: Final = 90.0
NUM_PREFIXES: Final = 12
AT_ONCE: Final = 12
# What a process may grow by over half of the requests: caches that are not full yet, and noise.
GROWTH_MB: Final = 24.0
# Of fewer requests growth says nothing: pools and stacks of threads are touched for the first time.
LEAST_JUDGED: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Under:
    """The stack that is looked at."""

    url: str
    folder: Path
    keys: tuple[str, str]

    def state(self) -> dict[str, Any]:
        """What the supervisor says of it."""
        told: dict[str, Any] = json.loads((self.folder / "stack.json").read_text())
        return told


def prompt(drawn: random.Random) -> list[int]:
    """One of a few prefixes of up to six blocks, and a tail of its own."""
    number = drawn.randrange(NUM_PREFIXES)
    of_prefix = random.Random(number)
    prefix = [1000 + number, *of_prefix.choices(range(1000, 40_000), k=of_prefix.randint(80, 380))]
    return prefix + drawn.choices(range(1000, 40_000), k=drawn.randint(1, 40))


async def ask(client: httpx.AsyncClient, under: Under, drawn: random.Random, most: int) -> str:
    """One request, streamed; what became of it. Some leave after the first piece."""
    num_tokens = drawn.randint(1, most)
    body = {
        "model": "gpt-4o",
        "prompt": prompt(drawn),
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
        "n": drawn.choice((1, 1, 1, 2)),
    }
    leaves = drawn.random() < 0.1
    headers = {"Authorization": f"Bearer {drawn.choice(under.keys)}"}
    received = 0
    url = f"{under.url}/v1/completions"
    async with client.stream("POST", url, json=body, headers=headers) as reply:
        if reply.status_code != 200:
            return f"{reply.status_code} {(await reply.aread()).decode()[:120]}"
        async for line in reply.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                return f"error {chunk['error'].get('message', '')[:120]}"
            received += sum(len(choice.get("token_ids") or ()) for choice in chunk["choices"])
            if leaves and received:
                return "left"
    return "whole" if received == num_tokens * int(str(body["n"])) else f"{received} tokens"


async def ask_many(
    under: Under, count: int, at_once: int, seed: int, *, most: int
) -> "Counter[str]":
    """So many requests, `at_once` of them at a time."""
    outcomes: Counter[str] = Counter()
    numbers = iter(range(count))

    async def some(client: httpx.AsyncClient) -> None:
        for number in numbers:
            drawn = random.Random(seed * 1_000_003 + number)
            outcomes[await ask(client, under, drawn, most)] += 1

    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits) as client,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(at_once):
            group.create_task(some(client))
    return outcomes


async def killed(under: Under, kills: int, seed: int) -> "Counter[str]":
    """Streams, and kill -9 of a decode process under them, again and again."""
    outcomes: Counter[str] = Counter()
    drawn = random.Random(seed)
    for number in range(kills):
        streams = asyncio.create_task(ask_many(under, 8, 8, seed + number + 100, most=48))
        await asyncio.sleep(drawn.uniform(0.3, 1.5))
        names = [name for name in under.state()["services"] if name.startswith("decode")]
        victim = under.state()["services"][drawn.choice(names)]
        os.kill(int(victim["pid"]), signal.SIGKILL)
        outcomes += await streams
        end_s = time.monotonic() + TIMEOUT_S
        while time.monotonic() < end_s:
            services = under.state()["services"]
            told = [services[name] for name in names]
            if all(s["state"] == "serving" and s["pid"] != victim["pid"] for s in told):
                break
            await asyncio.sleep(0.1)
    return outcomes


def anonymous_mb(under: Under) -> dict[str, float]:
    """What each process has for itself (`Pss_Anon`), in MB; arena and files are not among it."""
    found = {}
    for name, service in under.state()["services"].items():
        rollup = Path(f"/proc/{service['pid']}/smaps_rollup").read_text()
        [line] = [line for line in rollup.splitlines() if line.startswith("Pss_Anon:")]
        found[name] = round(int(line.split()[1]) / 1024, 1)
    return found


def held_slots(under: Under) -> dict[str, int]:
    """Slots of the arena that are neither free nor kept, by state."""
    state, found = under.state(), Counter[str]()
    folder = Path(state["shm_dir"]) / state["stack_id"]
    for path in sorted(folder.glob("extent-*")):
        data = path.read_bytes()
        for index in range(parse_extent(data[:PAGE], len(data)).num_slots):
            slot = read_slot(data, index).state
            if slot not in (SlotState.FREE, SlotState.KEPT):
                found[slot.name] += 1
    return dict(found)


async def held(under: Under) -> dict[str, Any]:
    """What pools, cache, gateway and arena still hold; empty if nothing."""
    passwords = json.loads((under.folder / "nats" / "credentials.json").read_text())
    bus = await connect(
        BusSettings(url=under.state()["nats"], user="supervisor", password=passwords["supervisor"])
    )
    subjects, found = Subjects(), dict[str, Any]()
    loads: dict[tuple[str, str], LoadReport] = {}

    def heard(message: Any) -> None:
        report = codec.decode(message.data, LoadReport)
        loads[report.instance, report.role] = report

    for role in ("prefill", "decode"):
        await bus.subscribe(subjects.event(role, "load"), heard)
    stats = await Client(bus, subjects).call(
        subjects.service("cache", "stats"), StatsRequest(), StatsReply, timeout_s=10
    )
    await asyncio.sleep(1.0)
    await bus.close()
    for (instance, _), load in loads.items():
        busy = load.num_blocks - load.num_free_blocks
        if busy or load.num_running or load.num_waiting:
            found[instance] = {"blocks": busy, "running": load.num_running}
    if not loads:
        found["loads"] = "none heard"
    if stats.num_leases:
        found["leases"] = stats.num_leases
    if slots := held_slots(under):
        found["slots"] = slots
    async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
        metrics = await client.get(f"{under.url}/metrics")
    for line in metrics.text.splitlines():
        if line.startswith("finback_gateway_open_requests") and float(line.split()[-1]):
            found["open_requests"] = float(line.split()[-1])
    return found


async def hunt(under: Under, args: argparse.Namespace) -> dict[str, Any]:
    """All phases; see the module."""
    made: dict[str, Any] = {"outcomes": await ask_many(under, args.warm, AT_ONCE, 0, most=4)}
    quarter = max(1, args.requests // 4)
    begun, memory = time.monotonic(), []
    for part in range(4):
        made["outcomes"] += await ask_many(under, quarter, AT_ONCE, args.seed * 10 + part, most=4)
        memory.append(anonymous_mb(under))
    made["requests_s"] = round(4 * quarter / (time.monotonic() - begun), 1)
    made["outcomes"] += await ask_many(under, args.streams, args.streams, args.seed + 77, most=24)
    made["outcomes"] += await killed(under, args.kills, args.seed)
    end_s = time.monotonic() + SETTLE_S
    while (left := await held(under)) and time.monotonic() < end_s:  # noqa: ASYNC110  # in others
        await asyncio.sleep(0.5)
    made["held"] = left
    made["anonymous_mb"] = {name: [part[name] for part in memory] for name in memory[0]}
    grown = {name: mb[3] - mb[1] for name, mb in made["anonymous_mb"].items()}
    made["is_good"] = (
        not left
        and (args.requests < LEAST_JUDGED or max(grown.values()) < GROWTH_MB)
        and not set(made["outcomes"]) - {"whole", "left"}
    )
    return made


def keys(folder: str) -> tuple[str, str]:
    """A key for each of two tenants."""
    made = []
    for tenant in ("acme", "umbrella"):
        command = [FINBACK, "keys", "create", tenant, "--tenant", tenant, "--run-dir", folder]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
        made.append(next(word for word in done.stdout.split() if word.startswith("fb")))
    return made[0], made[1]


def main(argv: Sequence[str] | None = None) -> int:
    """One stack, all phases; prints JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--layout", choices=("separate", "cohost"), default="separate")
    parser.add_argument("--lane", choices=("shm", "nats"), default="shm")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--warm", type=int, default=40, help="requests before that, not compared")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the stack goes with us
    # A small pool is soon touched everywhere, and sequences are preempted.
    settings = ["max_model_len=1024", f"kv_pool_bytes={2**27}"]
    settings += ["max_tenant_requests=4096", "decode_processes=2"]
    settings += ["arena_bytes=1048576"] if args.lane == "nats" else []
    options = [f"--{args.layout}", *(["--deterministic"] if args.deterministic else [])]
    options += [word for setting in settings for word in ("--set", setting)]
    with run_stack(*options) as (made, folder):
        under = Under(url=made.url, folder=Path(folder), keys=keys(folder))
        result = asyncio.run(hunt(under, args))
    print(json.dumps({**vars(args), **result}), flush=True)
    return 0 if result["is_good"] else 1


if __name__ == "__main__":
    sys.exit(main())
