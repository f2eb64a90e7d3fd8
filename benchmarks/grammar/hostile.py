"""Hostile grammars against the sampler as a process, beside a stream that must not notice.

    python benchmarks/grammar/hostile.py [--count 1000] [--seed 1] [--clients 3]

A victim asks for a mask after every token of a JSON text, over and over. Clients compile hostile
grammars (tests/support/hostile_grammars.py), and follow those that compile for some random tokens.
Told: how long the victim waited for a mask (asked again or not), alone and beside them; what became of
the grammars. One JSON line goes to results/.
"""

import argparse
import asyncio
import collections
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from finback.shared.actor.client import Client
from finback.shared.actor.nats_bus import BusSettings, connect
from finback.shared.codec.load import load_tokenizer
from finback.shared.errors import InvalidRequest, ServingError
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
from support.hostile_grammars import hostile_grammars
from support.nats_server import NatsServer
from support.service_process import ServiceProcess

TEXT = json.dumps(
    {"city": "Paris", "list": [1, 2.5, {"deep": None}], "note": "some words here " * 8}
)
PREFIX = "hostile"
VICTIM = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


class Sequence:
    """One constrained sequence, as a decode instance would keep it."""

    def __init__(self, client: Client, name: str, grammar: GrammarSpec, grammar_id: str) -> None:
        self._client = client
        self._name = name
        self._grammar = grammar
        self._grammar_id = grammar_id
        self._num_known = 0
        self._sends_grammar = False
        self.token_ids: list[int] = []

    async def mask(self, patience_s: float = 30.0) -> Mask:
        """What may come next; asked again until it is there."""
        until = time.monotonic() + patience_s
        while time.monotonic() < until:
            for mask in (await self._ask()).masks:
                if mask.need_grammar or mask.need_from is not None:
                    self._sends_grammar |= mask.need_grammar
                    self._num_known = mask.need_from or 0
                    continue
                self._num_known, self._sends_grammar = len(self.token_ids), False
                return mask
        raise TimeoutError(self._name)

    async def _ask(self) -> MaskReply:
        row = MaskRow(
            request_id=self._name,
            choice=0,
            grammar_id=self._grammar_id,
            position=self._num_known,
            token_ids=np.array(self.token_ids[self._num_known :], "<i4").tobytes(),
            grammar=self._grammar if self._sends_grammar else None,
        )
        request = MaskRequest(instance=self._name, epoch=1, model="m", rows=(row,))
        subject = self._client.subjects.service("sampler", "mask")
        return await self._client.call(subject, request, MaskReply, timeout_s=20)


async def victim(client: Client, ids: list[int], stop: asyncio.Event, waits: list[float]) -> None:
    """One stream after the other, a pause of a decode step between masks."""
    spec = GrammarSpec(kind="json_schema", text=json.dumps(VICTIM))
    made = await compiled(client, spec)
    for round_ in range(10**9):
        sequence = Sequence(client, f"victim-{round_}", spec, made.grammar_id)
        for token_id in ids:
            started_s = time.perf_counter()
            mask = await sequence.mask()
            waits.append(time.perf_counter() - started_s)
            if mask.error or not mask.bitmask[token_id >> 3] >> (token_id & 7) & 1:
                raise SystemExit(f"the victim's mask is wrong: {mask.error}")
            sequence.token_ids.append(token_id)
            if stop.is_set():
                return
            await asyncio.sleep(0.004)


async def compiled(client: Client, spec: GrammarSpec) -> CompileReply:
    subject = client.subjects.service("sampler", "compile")
    request = CompileRequest(model="m", grammar=spec)
    return await client.call(subject, request, CompileReply, timeout_s=60)


async def attack(
    client: Client, grammars: Iterator[tuple[str, GrammarSpec]], outcomes: dict[str, Any], who: int
) -> None:
    """Compile, and follow what compiles."""
    draw = random.Random(who)
    for index, (name, spec) in enumerate(grammars):
        started_s = time.perf_counter()
        try:
            made = await compiled(client, spec)
            outcome = await follow(client, spec, made, f"{who}-{index}", draw)
        except InvalidRequest as error:
            outcome = f"400 {(error.reason or '?').split(' at ')[0].split(':')[0][:40]}"
            if not error.reason or not error.public_message:
                outcome = "400 that says nothing"
        except (ServingError, TimeoutError) as error:
            outcome = f"{type(error).__name__}: {error}"[:60]
        outcomes["by_outcome"][outcome] += 1
        outcomes["seconds"].append((time.perf_counter() - started_s, name))


async def follow(
    client: Client, spec: GrammarSpec, made: CompileReply, name: str, draw: random.Random
) -> str:
    """Some random tokens on."""
    sequence = Sequence(client, name, spec, made.grammar_id)
    for _ in range(12):
        mask = await sequence.mask()
        if mask.error:
            return "400 later: " + mask.error[:40]
        bits = np.unpackbits(np.frombuffer(mask.bitmask, np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits)
        if mask.is_accepting and len(allowed) <= 4:
            return "works, ends"
        token_id = int(draw.choice(allowed.tolist()))
        if mask.is_accepting and token_id < 3:
            return "works, ends"
        sequence.token_ids.append(token_id)
    return f"works ({made.placement})"


def figures(waits: list[float]) -> dict[str, float]:
    """Milliseconds."""
    ordered = np.sort(np.array(waits)) * 1000
    return {
        "num": len(ordered),
        "p50_ms": round(float(np.percentile(ordered, 50)), 2),
        "p99_ms": round(float(np.percentile(ordered, 99)), 2),
        "max_ms": round(float(ordered[-1]), 2),
        "over_50_ms": int((ordered > 50).sum()),
    }


async def attacked(url: str, options: argparse.Namespace) -> dict[str, Any]:
    """All grammars, by several clients of one process."""
    bus = await connect(BusSettings(url=url))
    client = Client(bus, Subjects(PREFIX))
    outcomes: dict[str, Any] = {"by_outcome": collections.Counter(), "seconds": []}
    grammars = hostile_grammars(options.count, options.seed)
    await asyncio.gather(*(attack(client, grammars, outcomes, i) for i in range(options.clients)))
    await bus.close()
    slowest = sorted(outcomes["seconds"], reverse=True)[:5]
    return {
        "outcomes": dict(outcomes["by_outcome"].most_common()),
        "slowest": [(round(s, 2), name) for s, name in slowest],
    }


async def measure(url: str, options: argparse.Namespace, pid: int) -> dict[str, Any]:
    """The victim here, the attack in a process of its own."""
    ids = load_tokenizer(open_source("embedded").text).encode(TEXT)
    bus = await connect(BusSettings(url=url))
    client = Client(bus, Subjects(PREFIX))
    alone: list[float] = []
    beside: list[float] = []
    stop = asyncio.Event()
    stream = asyncio.ensure_future(victim(client, ids, stop, alone))
    await asyncio.sleep(5)
    stop.set()
    await stream
    stop.clear()
    stream = asyncio.ensure_future(victim(client, ids, stop, beside))
    arguments = ["--attack", url, "--count", str(options.count), "--seed", str(options.seed)]
    attacker = await asyncio.create_subprocess_exec(
        sys.executable, __file__, *arguments, "--clients", str(options.clients),
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    told, _ = await attacker.communicate()
    stop.set()
    await stream
    await bus.close()
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return {
        "victim_alone": figures(alone),
        "victim_beside": figures(beside),
        **json.loads(told),
        "pss_mb": round(sum(p.memory_full_info().pss for p in family) / 2**20),
        "num_processes": len(family),
    }


def against_process(url: str, folder: str, options: argparse.Namespace) -> dict[str, Any]:
    """Start the sampler, attack it, stop it."""
    env = {
        "FINBACK_NATS_URL": url,
        "FINBACK_RUN_DIR": folder,
        "FINBACK_STACK_ID": PREFIX,
        "FINBACK_SUBJECT_PREFIX": PREFIX,
    }
    process = ServiceProcess("sampler", env).start()
    try:
        found = asyncio.run(measure(url, options, process.pid))
        found["survived"] = process.stop() == 0
    finally:
        process.kill()
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--attack", default="", help="only attack the service at this NATS server")
    options = parser.parse_args()
    if options.attack:
        print(json.dumps(asyncio.run(attacked(options.attack, options))))
        return
    with tempfile.TemporaryDirectory() as folder:
        server = NatsServer(folder=Path(folder))
        server.start()
        try:
            found = against_process(server.url, folder, options)
        finally:
            server.kill()
    line = {"benchmark": "grammar_hostile", "count": options.count, "date": time.strftime("%Y-%m-%d"),
            "load_average": round(os.getloadavg()[0], 1), **found}  # fmt: skip
    print(json.dumps(line, indent=1))
    with (ROOT / "benchmarks" / "results" / "grammar_hostile.jsonl").open("a") as out:
        out.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
