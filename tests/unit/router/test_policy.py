"""The choice of a pair against a twin that looks at every pair."""

import itertools
from collections.abc import Iterable, Mapping, Sequence

from hypothesis import given
from hypothesis import strategies as st

from finback.services.router.policy import Worker, choose, pair_cost

NAMES = [f"w{i}" for i in range(6)]


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
            num_free_blocks=draw(st.integers(0, 12)),
            num_running=draw(small),
            num_waiting=draw(small),
            num_waiting_tokens=draw(st.integers(0, 300)),
            is_stale=draw(st.booleans()),
        )
        for name in names
    ]


def every_pair(workers: Sequence[Worker], exclude: Iterable[str]) -> list[tuple[Worker, Worker]]:
    """All pairs that may work together, as the rules say it."""
    out = []
    for p, d in itertools.product(workers, workers):
        if p.instance in exclude or d.instance in exclude:
            continue
        if not p.is_prefill or not d.is_decode or p.kv_kind != d.kv_kind:
            continue
        if (p.is_cohosted or d.is_cohosted) and p is not d:
            continue
        out.append((p, d))
    return out


@given(
    fleets(),
    st.integers(1, 500),
    st.dictionaries(st.sampled_from(NAMES), st.integers(1, 8)),
    st.sets(st.sampled_from(NAMES), max_size=2),
)
def test_no_pair_is_cheaper(
    workers: list[Worker], num_prompt_tokens: int, hits: Mapping[str, int], exclude: set[str]
) -> None:
    pairs = every_pair(workers, exclude)
    chosen = choose(workers, num_prompt_tokens=num_prompt_tokens, hit_blocks=hits, exclude=exclude)
    if not pairs:
        assert chosen is None
        return
    assert chosen is not None
    assert (chosen.prefill, chosen.decode) in pairs
    costs = [pair_cost(p, d, hits, num_prompt_tokens) for p, d in pairs]
    assert chosen.cost_tokens == min(costs)
    assert chosen.num_candidates == len(pairs)
    assert chosen.num_hit_tokens < num_prompt_tokens


def test_an_idle_instance_is_preferred_and_a_prefix_outweighs_some_load() -> None:
    busy, idle = worker("busy", num_running=4), worker("idle")
    assert _chosen([busy, idle]) == "idle"
    assert _chosen([busy, idle], hits={"busy": 4}) == "busy"
    swamped = worker("busy", num_running=4, num_waiting=3)
    assert _chosen([swamped, idle], hits={"busy": 4}) == "idle"


def test_stale_and_blockless_instances_are_last_resorts() -> None:
    stale, full = worker("a", is_stale=True), worker("b", num_free_blocks=1)
    assert _chosen([stale, full]) == "b"
    assert _chosen([stale]) == "a"
    assert _chosen([full, worker("c", num_running=60)]) == "c"


def test_the_reason_says_what_counted() -> None:
    found = choose([worker("a")], num_prompt_tokens=300, hit_blocks={"a": 2})
    assert found is not None
    assert found.reason == (
        "cost 172 tokens, best of 1: hit 128 tokens, decode 0 running 0 waiting 100 blocks free"
    )


def _chosen(workers: list[Worker], hits: Mapping[str, int] | None = None) -> str:
    found = choose(workers, num_prompt_tokens=300, hit_blocks=hits or {})
    assert found is not None
    return found.decode.instance
