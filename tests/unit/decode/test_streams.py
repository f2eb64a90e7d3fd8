"""Batches go out in order; what cannot be sent is dropped, never waited for by the engine."""

import asyncio

from finback.services.decode.step_spans import MAX_STEPS, StepSpans
from finback.services.decode.streams import TokenStreams
from finback.shared.errors import Unavailable
from finback.shared.wire.messages.generate import TokenBatch, TokenRow


def row(offset: int) -> TokenRow:
    return TokenRow(request_id="r", choice=0, attempt=1, offset=offset, token_ids=b"\0\0\0\0")


def test_order_and_heartbeat() -> None:
    sent: list[tuple[str, TokenBatch]] = []

    async def publish(gateway: str, batch: TokenBatch) -> None:
        sent.append((gateway, batch))

    async def main() -> None:
        streams = TokenStreams(publish, epoch=7)
        task = asyncio.create_task(streams.run())
        streams.send(1, {"g1": [row(0)], "g2": [row(0)]})
        streams.send(2, {"g1": [row(1)]})
        streams.heartbeat({"g1"})
        await streams.flush()
        task.cancel()

    asyncio.run(main())
    assert [(gateway, batch.step, len(batch.rows)) for gateway, batch in sent] == [
        ("g1", 1, 1),
        ("g2", 1, 1),
        ("g1", 2, 1),
        ("g1", 2, 0),
    ]
    assert {batch.epoch for _, batch in sent} == {7}


def test_a_bus_that_is_away_drops() -> None:
    async def publish(gateway: str, batch: TokenBatch) -> None:
        raise Unavailable("away")

    async def main() -> int:
        streams = TokenStreams(publish, epoch=1)
        for step in range(5000):
            streams.send(step, {"g": [row(step)]})
        task = asyncio.create_task(streams.run())
        await streams.flush()
        task.cancel()
        return streams.num_dropped

    assert asyncio.run(main()) == 5000


def test_steps_become_ranges() -> None:
    spans: list[tuple[str, int, int, dict[str, object]]] = []
    ranges = StepSpans(lambda n, s, e, p, a: spans.append((n, s, e, a)))
    key = ("r", 0)
    for step in range(MAX_STEPS + 3):
        ranges.add(
            key, None, step * 10, step * 10 + 5, num_rows=2, num_tokens=1, num_drafted=4,
            num_accepted=1,
        )  # fmt: skip
    ranges.close(key)
    ranges.close(key)
    assert [span[3]["finback.num_steps"] for span in spans] == [MAX_STEPS, 3]
    assert spans[0][1] == 0 and spans[0][2] == (MAX_STEPS - 1) * 10 + 5
    assert spans[0][3]["finback.num_accepted"] == MAX_STEPS
    assert spans[0][3]["finback.mean_rows"] == 2
