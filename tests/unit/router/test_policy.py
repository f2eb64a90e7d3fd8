"""The choice of a pair against a twin that prices every pair by a plain formula."""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from finback.services.router import fleet as fleet_of
from finback.services.router import policy
from finback.services.router.fleet import Fleet, Worker
from finback.services.router.policy import Placement, Question, Reach, choose

NAMES = [f"w{i}" for i in range(6)]
Blocks = tuple[int, int, int]  # device, host, file: each at least the one before


def worker(instance: str, role: str = "both", **more: object) -> Worker:
    values: dict[str, object] = {"num_blocks": 100, "num_free_blocks": 100, **more}
    return Worker(
        instance=instance,
        epoch=1,
        is_prefill=role in ("prefill", "both"),
        is_decode=role in ("decode", "both"),
        **values,  # type: ignore[arg-type]  # named by each test
    )


@st.composite
def fleets(draw: st.DrawFn) -> list[Worker]:
    names = draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=6))
    small = st.integers(0, 5)
    return [
        worker(
            name,
            draw(st.sampled_from(["prefill", "decode", "both"])),
            kv_kind=draw(st.sampled_from(["a", "b"])),
            block_size=draw(st.sampled_from([16, 64])),
            token_bytes=draw(st.sampled_from([0, 20_000, 1_000_000])),
            num_free_blocks=draw(st.integers(0, 12)),
            num_running=draw(small),
            num_waiting=draw(small),
            num_waiting_tokens=draw(st.integers(0, 3000)),
            prompt_tokens_per_s=draw(st.sampled_from([500.0, 2000.0])),
            is_stale=draw(st.booleans()),
        )
        for name in names
    ]


def reaches() -> st.SearchStrategy[dict[str, Blocks]]:
    one = st.lists(st.integers(0, 8), min_size=3, max_size=3).map(sorted)
    return st.dictionaries(st.sampled_from(NAMES), one.map(lambda b: (b[0], b[1], b[2])))


def every_pair(workers: Sequence[Worker], excluded: frozenset[str]) -> list[tuple[Worker, Worker]]:
    """All pairs that may work together, as the rules say it."""
    out = []
    for p, d in itertools.product(workers, workers):
        if p.instance in excluded or d.instance in excluded:
            continue
        if not p.is_prefill or not d.is_decode or p.kv_kind != d.kv_kind:
            continue
        if (p.is_cohosted or d.is_cohosted) and p is not d:
            continue
        out.append((p, d))
    return out


def compute_s(w: Worker, q: Question, blocks: Blocks) -> float:
    """Seconds until this prompt is computed there once its turn has come."""
    most = max(0, q.num_prompt_tokens - 1)
    device, host, file = (min(b * w.block_size, most) for b in blocks)
    seconds = (q.num_prompt_tokens - file) / w.prompt_tokens_per_s
    seconds += (host - device) * w.token_bytes / fleet_of.HOST_BYTES_PER_S
    return seconds + (file - host) * w.token_bytes / fleet_of.FILE_BYTES_PER_S


def queue_s(w: Worker) -> float:
    return w.num_waiting_tokens / w.prompt_tokens_per_s


def busy_s(w: Worker, q: Question, blocks: Blocks) -> float:
    busy = w.num_running * fleet_of.RUNNING_TOKENS + w.num_waiting * fleet_of.WAITING_TOKENS
    seconds = busy / w.prompt_tokens_per_s
    needed = math.ceil(q.num_prompt_tokens / w.block_size) + q.num_choices
    if w.num_free_blocks + blocks[0] < needed:
        seconds += policy.NO_BLOCKS_S
    if w.num_waiting >= q.max_queue:
        seconds += policy.FULL_QUEUE_S
    return seconds + (fleet_of.STALE_S if w.is_stale else 0)


def prices(p: Worker, d: Worker, q: Question, hits: Mapping[str, Blocks]) -> list[float]:
    """What the pair costs, and what it costs if decode computes what it lacks."""
    at_p, at_d = hits.get(p.instance, (0, 0, 0)), hits.get(d.instance, (0, 0, 0))
    local = busy_s(d, q, at_d) + queue_s(d) + compute_s(d, q, at_d)
    if p is d:
        return [local]
    most = max(0, q.num_prompt_tokens - 1)
    seconds = queue_s(p) + compute_s(p, q, at_p) + (fleet_of.STALE_S if p.is_stale else 0)
    lacking = (most - min(at_d[0] * d.block_size, most)) * d.token_bytes
    seconds += policy.HAND_OVER_S + lacking / fleet_of.HAND_OVER_BYTES_PER_S + busy_s(d, q, at_d)
    held = min(at_d[2] * d.block_size, most)
    limit = policy.MAX_LOCAL_TOKENS if held else policy.MAX_FRESH_TOKENS
    return [seconds, local] if q.num_prompt_tokens - held <= limit else [seconds]


def reach_of(fleet: Fleet, hits: Mapping[str, Blocks]) -> Reach:
    columns = np.zeros((3, len(fleet)), dtype=np.int32)
    for row, w in enumerate(fleet.workers):
        columns[:, row] = hits.get(w.instance, (0, 0, 0))
    return Reach(columns)


def ask(
    workers: Sequence[Worker], hits: Mapping[str, Blocks] | None = None, **more: object
) -> Placement | None:
    question = Question(num_prompt_tokens=600)
    question = dataclasses.replace(question, **more)  # type: ignore[arg-type]  # named by tests
    fleet = Fleet(workers)
    return choose(fleet, question, reach_of(fleet, hits or {}))


def decode_of(placement: Placement | None) -> str:
    assert placement is not None
    return placement.decode.instance


@given(
    fleets(),
    st.integers(1, 700),
    reaches(),
    st.frozensets(st.sampled_from(NAMES), max_size=2),
    st.integers(1, 6),
    st.integers(0, 1000),
    st.sampled_from(["", *NAMES]),
)
def test_no_pair_is_cheaper(
    workers: list[Worker],
    num_prompt_tokens: int,
    hits: dict[str, Blocks],
    excluded: frozenset[str],
    max_queue: int,
    spread: int,
    kept: str,
) -> None:
    question = Question(
        num_prompt_tokens=num_prompt_tokens,
        max_queue=max_queue,
        excluded=excluded,
        spread=spread,
        kept=kept,
    )
    fleet = Fleet(workers)
    found = choose(fleet, question, reach_of(fleet, hits))
    pairs = every_pair(workers, excluded)
    if not pairs:
        assert found is None
        return
    assert found is not None
    assert (found.prefill, found.decode) in pairs and found.num_candidates == len(pairs)
    costs = {(p.instance, d.instance): prices(p, d, question, hits) for p, d in pairs}
    least = min(min(c) for c in costs.values())
    own = [min(c) for (_, d), c in costs.items() if d == kept]
    limit = least + max(policy.AFFINITY_S, policy.AFFINITY_SHARE * least)
    mine = costs[found.prefill.instance, found.decode.instance][found.is_local]
    if own and min(own) <= limit:
        assert found.is_kept and found.decode.instance == kept
        assert math.isclose(found.cost_s, min(own), rel_tol=1e-9, abs_tol=1e-8)
    else:
        assert not found.is_kept
        assert math.isclose(found.cost_s, least, rel_tol=1e-9, abs_tol=1e-8)
    assert math.isclose(mine, found.cost_s, rel_tol=1e-9, abs_tol=1e-8)
    assert found.num_hit_tokens < num_prompt_tokens


def test_an_idle_instance_is_preferred_and_a_prefix_outweighs_some_load() -> None:
    busy, idle = worker("busy", num_running=4), worker("idle")
    assert decode_of(ask([busy, idle])) == "idle"
    assert decode_of(ask([busy, idle], {"busy": (4, 4, 4)})) == "busy"
    swamped = worker("busy", num_running=4, num_waiting=3)
    assert decode_of(ask([swamped, idle], {"busy": (4, 4, 4)})) == "idle"


def test_the_device_is_better_than_the_host_and_that_than_files() -> None:
    workers = [worker(name, token_bytes=50_000) for name in ("device", "host", "file", "none")]
    hits = {"device": (8, 8, 8), "host": (0, 8, 8), "file": (0, 0, 8)}
    for expected in ("device", "host", "file", "none"):
        assert decode_of(ask(workers, hits)) == expected
        workers = [w for w in workers if w.instance != expected]


def test_stale_full_and_blockless_instances_are_last_resorts() -> None:
    stale, full = worker("a", is_stale=True), worker("b", num_free_blocks=1)
    assert decode_of(ask([stale, full])) == "b"
    assert decode_of(ask([stale])) == "a"
    assert decode_of(ask([full, worker("c", num_running=60)])) == "c"
    queued = worker("q", num_waiting=3)
    assert decode_of(ask([queued, full], max_queue=3)) == "b"


def test_a_conversation_stays_until_its_instance_is_overloaded() -> None:
    workers = [worker("a"), worker("b", num_running=2)]
    assert decode_of(ask(workers, kept="b")) == "b"
    swamped = [worker("a"), worker("b", num_waiting_tokens=10_000)]
    assert decode_of(ask(swamped, kept="b")) == "a"
    assert decode_of(ask(workers, kept="b", excluded=frozenset("b"))) == "a"
    assert decode_of(ask(workers, kept="gone")) == "a"


def test_equals_take_turns() -> None:
    workers = [worker(name) for name in "abc"]
    assert [decode_of(ask(workers, spread=i)) for i in range(4)] == ["a", "b", "c", "a"]


def test_decode_computes_what_little_it_lacks() -> None:
    pair = [worker("p", "prefill"), worker("d", "decode")]
    found = ask(pair, {"d": (8, 8, 8)})
    assert found is not None and found.is_local and found.num_hit_tokens == 512
    assert found.reason(600).endswith("decode computes the rest")
    whole = ask(pair)
    assert whole is not None and not whole.is_local
    tiny = ask(pair, num_prompt_tokens=20)
    assert tiny is not None and tiny.is_local
    far = ask(pair, {"d": (1, 1, 1)})
    assert far is not None and not far.is_local


def test_the_reason_says_what_counted() -> None:
    found = ask([worker("a", num_waiting_tokens=40)], {"a": (2, 3, 3)})
    assert found is not None and found.kind == "device"
    assert found.reason(600) == (
        "device hit 128 + host hit 64 of 600 tokens, queue 0.02 s, first token in 0.22 s, best of 1"
    )
    none = ask([worker("a")])
    assert none is not None and none.reason(600).startswith("no hit of 600 tokens, queue 0.00 s")
