"""Loads, own placements until they are reported, and what is open."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from finback.services.router.load_book import LoadBook, Open
from finback.shared.wire.messages.control import CacheSpec, InstanceRecord
from finback.shared.wire.messages.decode import LoadReport


def record(instance: str, service: str) -> InstanceRecord:
    spec = CacheSpec(
        block_size=16,
        num_layers=1,
        num_kv_heads=1,
        head_dim=8,
        kv_dtype="f32",
        block_bytes=1024,
        salt="s",
    )
    return InstanceRecord(
        service=service,
        instance=instance,
        epoch=1,
        pid=1,
        host="h",
        state="serving",
        num_blocks=50,
        cache_spec=spec,
    )


def report(instance: str, role: str = "decode", *, epoch: int = 1, **more: int) -> LoadReport:
    values = {"num_running": 0, "num_waiting": 0, "num_free_blocks": 40, "num_blocks": 50, **more}
    return LoadReport(instance=instance, epoch=epoch, role=role, **values)


def placed(at_s: float, prefill: str = "p", decode: str = "d", choices: int = 1) -> Open:
    return Open(
        prefill=prefill,
        decode=decode,
        num_tokens=100,
        num_choices=choices,
        placed_s=at_s,
    )


PAIR = [record("p", "prefill"), record("d", "decode")]


def test_placements_count_until_a_later_report_has_them() -> None:
    book = LoadBook()
    book.heard(report("d", num_waiting=1), 10.0)
    book.placed("r1", placed(10.0, choices=2))
    p, d = book.workers(PAIR, 10.1)
    assert (p.num_waiting_tokens, d.num_waiting) == (100, 3)
    book.heard(report("d", num_waiting=2), 10.2)
    assert book.workers(PAIR, 10.25)[1].num_waiting == 4, "too early to be in that report"
    book.heard(report("d", num_waiting=3), 10.5)
    assert book.workers(PAIR, 10.5)[1].num_waiting == 3
    assert book.num_open == 1


def test_a_worker_that_never_reported_is_as_its_record_says() -> None:
    p, d = LoadBook().workers(PAIR, 1.0)
    assert (p.is_prefill, p.is_decode, d.is_prefill, d.is_decode) == (True, False, False, True)
    assert (d.num_blocks, d.num_free_blocks, d.is_stale) == (50, 50, False)
    assert p.kv_kind == d.kv_kind != ""


def test_both_roles_of_one_instance_are_one_worker() -> None:
    (both,) = LoadBook().workers([record("x", "prefill"), record("x", "decode")], 1.0)
    assert both.is_cohosted


def test_reports_grow_stale_and_older_epochs_are_ignored() -> None:
    book = LoadBook()
    book.heard(report("d", epoch=2, num_running=5), 10.0)
    book.heard(report("d", epoch=1, num_running=9), 10.1)
    assert book.workers(PAIR, 10.2)[1].num_running == 5
    assert book.workers(PAIR, 13.0)[1].is_stale
    book.forget("d")
    assert book.workers(PAIR, 13.0)[1].num_running == 0


def test_the_end_of_an_earlier_attempt_does_not_count() -> None:
    book = LoadBook()
    book.placed("r1", dataclasses.replace(placed(0.0), attempt=2))
    book.ended("r1", 1)
    assert book.num_open == 1
    book.ended("r1", 2)
    assert book.num_open == 0


def test_what_never_ended_is_swept() -> None:
    book = LoadBook(max_age_s=60)
    book.placed("r1", placed(0.0))
    book.placed("r2", placed(50.0))
    book.sweep(61.0)
    assert book.num_open == 1


OPERATIONS = st.lists(st.tuples(st.sampled_from(["place", "end"]), st.integers(0, 5)), max_size=40)


@given(OPERATIONS)
def test_open_requests_are_counted_as_a_plain_set_would(operations: list[tuple[str, int]]) -> None:
    book, twin = LoadBook(), set[str]()
    for at, (verb, number) in enumerate(operations):
        request_id = f"r{number}"
        if verb == "place":
            book.placed(request_id, placed(float(at)))
            twin.add(request_id)
        else:
            book.ended(request_id)
            twin.discard(request_id)
        assert book.num_open == len(twin)
