"""The policy alone: one process, one placement after another.

64 workers on 16 hosts, 1 million indexed blocks in their device pools and their hosts' memory and
files. Prompts are turns of 2,000 conversations: 100 to 2,000 new tokens each behind one of 8 system
prompts of 1,024 tokens and what was said before, so 1,150 to 16,250 tokens, mean 3,670 (57 blocks).
A decision begins with 32-byte hashes, as they come from a gateway, and ends with a pair and its
reason; a placement also counts itself into loads, notes and sessions. Each worker reports its load
four times a second.
"""

import os
import random
import statistics
import time
from pathlib import Path
from typing import Any

from cache.router_shapes import SPEC

from finback.services.router.placer import Placer
from finback.services.router.prefix_index import keys_of
from finback.services.router.reach import CacheAt
from finback.shared.wire.messages.control import InstanceRecord
from finback.shared.wire.messages.decode import LoadReport
from finback.shared.wire.messages.route import RouteRequest

MODEL = "m"


def record(service: str, name: str, host: str, **more: Any) -> InstanceRecord:
    return InstanceRecord(
        service=service,
        instance=name,
        epoch=1,
        pid=1,
        host=host,
        state="serving",
        model=MODEL,
        num_blocks=1_000_000,
        cache_spec=SPEC,
        **more,
    )


def load(name: str, role: str, rng: random.Random) -> LoadReport:
    return LoadReport(
        instance=name,
        epoch=1,
        role=role,
        num_running=rng.randrange(64),
        num_waiting=rng.randrange(3),
        num_free_blocks=rng.randrange(5_000, 1_000_000),
        num_blocks=1_000_000,
        num_waiting_tokens=rng.randrange(4_000),
        tokens_per_s=rng.uniform(5_000, 20_000),
    )


class Conversations:
    """Prompts that share system prompts and their own history; hashes are drawn, not computed."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._systems = [rng.randbytes(32 * 16) for _ in range(8)]
        self._open: list[bytes] = []

    def prompt(self) -> bytes:
        """The next turn of one of 2,000 conversations, or a new one's first."""
        rng = self._rng
        if len(self._open) < 2_000 or rng.random() < 1 / 5:
            history = rng.choice(self._systems)
            self._open.append(history)
            at = len(self._open) - 1
        else:
            at = rng.randrange(len(self._open))
        if len(self._open[at]) > 32 * 250:
            self._open[at] = rng.choice(self._systems)
        grown = self._open[at] + rng.randbytes(32 * rng.randrange(2, 32))
        self._open[at] = grown
        return grown


def policy(seconds: float, is_separate: bool) -> dict[str, Any]:
    """Placements a second, one after another."""
    rng = random.Random(7)
    placer = Placer(max_age_s=600, max_queue=256, max_blocks=2**22)
    rss_before = rss_mb()
    chats = Conversations(rng)
    prompts = [chats.prompt() for _ in range(12_000)]
    workers = [f"w{i}" for i in range(64)]
    caches = [CacheAt(instance=f"c{i}", host=f"h{i}") for i in range(16)]
    fill(placer, prompts, workers, caches, rng)
    rss = rss_mb() - rss_before
    placer.reaches.set_caches(caches)
    roles = (("prefill",), ("decode",)) if is_separate else (("prefill", "decode"),)
    records = [
        record(role, w, f"h{i % 16}")
        for i, w in enumerate(workers)
        for role in roles[i % len(roles)]
    ]
    now_s, times, decisions = 0.0, list[float](), list[float]()
    begun = time.perf_counter()
    at = 0
    while time.perf_counter() - begun < seconds:
        if at % 40 == 0:  # 64 workers, four reports a second, at 10,000 placements a second
            name, role = workers[at // 40 % 64], roles[at // 40 % 64 % len(roles)][-1]
            placer.loads.heard(load(name, role, rng), now_s)
        prompt = prompts[at % len(prompts)]
        request = RouteRequest(
            request_id=f"r{at}",
            model=MODEL,
            num_prompt_tokens=len(prompt) // 32 * 64 + 17,
            max_tokens=256,
            block_hashes=prompt,
            session=f"s{at % 2_000}",
        )
        started = time.perf_counter()
        keys = keys_of(prompt)
        segments, noted = placer.index.segments(keys), placer.notes.look(keys)
        decision = placer.decide(request, keys, segments, noted, lambda: records, now_s)
        decided = time.perf_counter()
        placer.remember(request, decision.placement, keys, noted, now_s)
        times.append(time.perf_counter() - started)
        decisions.append(decided - started)
        placer.loads.ended(f"r{at - 20_000}")
        now_s += 1e-4
        at += 1
    return {
        "what": "policy",
        "layout": "separate" if is_separate else "cohosted",
        "placements_per_s": round(len(times) / sum(times)),
        "decisions_per_s": round(len(decisions) / sum(decisions)),
        "decision_p50_us": round(statistics.median(decisions) * 1e6, 1),
        "p50_us": round(statistics.median(times) * 1e6, 1),
        "p99_us": round(statistics.quantiles(times, n=100)[98] * 1e6, 1),
        "mean_blocks": round(statistics.mean(len(p) // 32 for p in prompts), 1),
        "max_blocks": max(len(p) // 32 for p in prompts),
        "num_indexed": len(placer.index),
        "num_sets": placer.index.num_sets,
        "index_mb_with_prompts": round(rss, 1),
        "num_workers": 64,
    }


def fill(
    placer: Placer,
    prompts: list[bytes],
    workers: list[str],
    caches: list[CacheAt],
    rng: random.Random,
) -> None:
    """A million blocks: each prompt where it was, all else strangers'."""
    views = {
        name: placer.index.open_view(name) for name in (*workers, *(c.instance for c in caches))
    }
    for view in views.values():
        view.activate()
    for prompt in prompts:
        at = rng.randrange(64)
        views[workers[at]].store("s", "device", prompt)
        cache = views[caches[at % 16].instance]
        cache.store("s", "host", prompt)
        if rng.random() < 0.5:
            cache.store("s", "file", prompt)
    while len(placer.index) < 1_000_000:
        name, tier = rng.choice(
            [(w, "device") for w in workers] + [(c.instance, "file") for c in caches]
        )
        views[name].store("s", tier, rng.randbytes(32 * 2_000))


def rss_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
