"""Conversations over simulated workers: the policy against round robin, least loaded, an oracle.

Workers have finite pools (least recently used first out, ends before beginnings) and compute one
prompt after another at a fixed speed. The policy is the real `Placer`, fed by what the workers
store and evict, and by their load four times a second. Time is simulated.
"""

import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from finback.services.router.placer import Placer
from finback.services.router.prefix_index import IndexView, keys_of
from finback.shared.wire.messages.control import CacheSpec, InstanceRecord
from finback.shared.wire.messages.decode import LoadReport
from finback.shared.wire.messages.route import RouteRequest

BLOCK, SPEED, POOL, NUM_WORKERS = 64, 8_000.0, 2_200, 4
REPORT_S = 0.25
SPEC = CacheSpec(
    block_size=BLOCK,
    num_layers=1,
    num_kv_heads=1,
    head_dim=8,
    kv_dtype="f32",
    block_bytes=BLOCK * 64,
    salt="s",
)


@dataclass
class Request:
    """One turn: it arrives and brings the whole conversation, as 32-byte hashes."""

    at_s: float
    session: str
    hashes: list[bytes]


def workload(rng: random.Random) -> list[Request]:
    """60 conversations of 12 turns that share 4 system prompts of 20 blocks."""
    systems = [[rng.randbytes(32) for _ in range(20)] for _ in range(4)]
    found = []
    for number in range(60):
        history, at_s = list(rng.choice(systems)), rng.uniform(0, 40)
        for _ in range(12):
            history = history + [rng.randbytes(32) for _ in range(rng.randrange(2, 8))]
            found.append(Request(at_s, f"c{number}", history))
            at_s += rng.uniform(2, 6)
    return sorted(found, key=lambda r: r.at_s)


@dataclass
class Pool:
    """A worker: what it holds, and until when it computes."""

    capacity: int
    view: IndexView
    held: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    free_s: float = 0.0
    num_waiting: int = 0

    def serve(self, request: Request, now_s: float) -> tuple[int, float]:
        """(blocks that were held, seconds waited) for a prompt that comes now."""
        hit = 0
        for block in request.hashes:
            if block not in self.held:
                break
            hit += 1
        queue_s = max(0.0, self.free_s - now_s)
        self.free_s = max(self.free_s, now_s) + (len(request.hashes) - hit) * BLOCK / SPEED
        new = request.hashes[hit:]
        for block in reversed(request.hashes):
            self.held[block] = None
            self.held.move_to_end(block)
        gone = []
        while len(self.held) > self.capacity:
            gone.append(self.held.popitem(last=False)[0])
        self.view.remove("s", "device", b"".join(gone))
        self.view.store("s", "device", b"".join(b for b in new if b in self.held))
        return hit, queue_s


@dataclass
class Outcome:
    hit_share: float
    p99_queue_s: float


Choose = Callable[[Request, int, list[Pool], Placer], int]


def run(choose: Choose, *, seed: int, num_workers: int = NUM_WORKERS, pool: int = POOL) -> Outcome:
    """The whole workload under one policy."""
    placer = Placer(max_age_s=600, max_queue=10_000, max_blocks=2**20)
    pools = []
    for number in range(num_workers):
        view = placer.index.open_view(f"w{number}")
        view.activate()
        pools.append(Pool(pool, view))
    hits, total, queues, reported_s = 0, 0, [], -1.0
    for number, request in enumerate(workload(random.Random(seed))):
        if request.at_s - reported_s >= REPORT_S:
            reported_s = request.at_s
            for at, worker in enumerate(pools):
                placer.loads.heard(report(at, worker, request.at_s), request.at_s)
        found = pools[choose(request, number, pools, placer)]
        hit, queue_s = found.serve(request, request.at_s)
        hits, total = hits + hit, total + len(request.hashes)
        queues.append(queue_s)
    return Outcome(hits / total, sorted(queues)[int(len(queues) * 0.99)])


def report(number: int, worker: Pool, now_s: float) -> LoadReport:
    waiting = max(0.0, worker.free_s - now_s) * SPEED
    return LoadReport(
        instance=f"w{number}",
        epoch=1,
        role="decode",
        num_running=0,
        num_waiting=0,
        num_free_blocks=10_000,
        num_blocks=10_000,
        num_waiting_tokens=int(waiting),
        tokens_per_s=SPEED if waiting else 0.0,
    )


RECORDS = [
    InstanceRecord(
        service=role,
        instance=f"w{number}",
        epoch=1,
        pid=1,
        host="h",
        state="serving",
        model="m",
        num_blocks=10_000,
        cache_spec=SPEC,
    )
    for number in range(NUM_WORKERS)
    for role in ("prefill", "decode")
]


def by_policy(request: Request, number: int, pools: list[Pool], placer: Placer) -> int:
    joined = b"".join(request.hashes)
    keys = keys_of(joined)
    asked = RouteRequest(
        request_id=f"r{number}",
        model="m",
        num_prompt_tokens=len(keys) * BLOCK + 1,
        max_tokens=16,
        block_hashes=joined,
        session=request.session,
    )
    segments = placer.index.segments(keys)
    decision = placer.place(asked, keys, segments, lambda: RECORDS, request.at_s)
    return int(decision.placement.decode.instance.removeprefix("w"))


def round_robin(request: Request, number: int, pools: list[Pool], placer: Placer) -> int:
    return number % len(pools)


def least_loaded(request: Request, number: int, pools: list[Pool], placer: Placer) -> int:
    return min(range(len(pools)), key=lambda at: (pools[at].free_s, (at + number) % len(pools)))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_policy_finds_what_is_cached_and_queues_no_longer(seed: int) -> None:
    policy = run(by_policy, seed=seed)
    turns, loaded = run(round_robin, seed=seed), run(least_loaded, seed=seed)
    # One worker that forgets nothing: what any placement can find at most.
    oracle = run(round_robin, seed=seed, num_workers=1, pool=10**9)
    assert policy.hit_share > 0.97 * oracle.hit_share
    assert policy.hit_share > 1.15 * turns.hit_share
    assert policy.hit_share > 1.15 * loaded.hit_share
    assert policy.p99_queue_s <= turns.p99_queue_s
    assert policy.p99_queue_s <= 1.5 * loaded.p99_queue_s + 0.05
