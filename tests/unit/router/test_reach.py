"""How far caches reach into a prompt, against a twin that looks block by block."""

from hypothesis import given
from hypothesis import strategies as st

from finback.services.router.fleet import Fleet, Worker
from finback.services.router.prefix_index import PrefixIndex, keys_of
from finback.services.router.reach import CacheAt, ReachBook

CACHES = (CacheAt(instance="c0", host="h0"), CacheAt(instance="c1", host="h1"))
HOLDERS = [
    *((f"w{i}", salt, "device") for i in range(4) for salt in "st"),
    *((c.instance, salt, tier) for c in CACHES for salt in "st" for tier in ("host", "file")),
]
WORKERS = [
    Worker(
        instance=f"w{i}",
        epoch=1,
        is_prefill=True,
        is_decode=True,
        host=f"h{i % 3}",
        salt="s" if i < 3 else "t",
    )
    for i in range(4)
]


def name(number: int) -> bytes:
    return bytes([number]) * 32


def leading(blocks: set[int], num_blocks: int) -> int:
    return next((i for i in range(num_blocks) if i not in blocks), num_blocks)


@given(
    st.dictionaries(st.sampled_from(HOLDERS), st.sets(st.integers(0, 7))),
    st.dictionaries(st.sampled_from([("w0", 1), ("w1", 1), ("w1", 2)]), st.integers(1, 8)),
)
def test_runs_are_those_of_a_plain_count(
    held: dict[tuple[str, str, str], set[int]], notes: dict[tuple[str, int], int]
) -> None:
    index = PrefixIndex()
    for instance in {holder[0] for holder in held}:
        view = index.open_view(instance)
        view.activate()
        for (owner, salt, tier), blocks in held.items():
            if owner == instance:
                view.store(salt, tier, b"".join(map(name, blocks)))
    fleet, book = Fleet(WORKERS), ReachBook(index)
    book.set_caches(CACHES)
    keys = keys_of(b"".join(name(i) for i in range(8)))
    found = book.of(fleet).reach(index.segments(keys), notes)
    for row, worker in enumerate(fleet.workers):
        usable: set[int] = set()
        noted = notes.get((worker.instance, worker.epoch), 0)
        own = ("device", [worker.instance])
        near = [c.instance for c in CACHES if c.host == worker.host]
        for (tier, instances), column in zip(
            (own, ("host", near), ("file", near)),
            found.blocks,
            strict=True,
        ):
            for instance in instances:
                usable |= held.get((instance, worker.salt, tier), set())
            assert column[row] == max(leading(usable, 8), noted)


def test_a_new_cache_counts_at_once() -> None:
    index = PrefixIndex()
    view = index.open_view("c0")
    view.store("s", "host", name(0))
    view.activate()
    fleet, book = Fleet(WORKERS), ReachBook(index)
    segments = index.segments(keys_of(name(0)))
    assert not book.of(fleet).reach(segments, {}).blocks.any()
    book.set_caches(CACHES)
    assert book.of(fleet).reach(segments, {}).blocks[1].tolist() == [1, 0, 0, 0]
