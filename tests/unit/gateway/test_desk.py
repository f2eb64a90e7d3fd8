"""Who is declared lost."""

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from finback.services.gateway import desk as desk_module
from finback.services.gateway.desk import Desk
from finback.services.gateway.generation import Generation, Lost
from finback.shared.actor.bus import Message
from finback.shared.actor.client import Client
from finback.shared.actor.deadline import Deadline
from finback.shared.actor.local_bus import LocalBus
from finback.shared.config import StackConfig
from finback.shared.telemetry.logging import get_logger
from finback.shared.telemetry.metrics import Metrics
from finback.shared.wire import codec
from finback.shared.wire.messages.decode import ResumeReply, ResumeRequest
from finback.shared.wire.messages.generate import (
    ChoiceSpec,
    EndInfo,
    GenerationSpec,
    SamplingSpec,
    TokenBatch,
    TokenRow,
)
from finback.shared.wire.messages.route import RouteReply
from finback.shared.wire.subjects import Subjects


class SlowBus(LocalBus):
    """A bus whose server may hang: what is sent comes late."""

    flush_s = 0.0

    async def flush(self) -> None:
        await asyncio.sleep(self.flush_s)


def one_open(bus: LocalBus) -> tuple[Desk, Generation, list["asyncio.Task[None]"]]:
    """A desk with one generation that is placed at `d`, and the tasks that it spawns."""
    subjects, tasks = Subjects("t"), []

    def spawn(make: Callable[..., Coroutine[Any, Any, Any]], *args: Any) -> None:
        tasks.append(asyncio.ensure_future(make(*args)))

    desk = Desk(
        bus=bus,
        client=Client(bus, subjects),
        subjects=subjects,
        config=StackConfig(),
        instance="gateway-1",
        metrics=Metrics(),
        log=get_logger("test"),
        spawn=spawn,
    )
    spec = GenerationSpec(
        request_id="r",
        attempt=1,
        model="m",
        token_ids=b"\0\0\0\0",
        sampling=SamplingSpec(),
        choices=(ChoiceSpec(index=0, seed=0),),
        gateway="gateway-1",
    )
    generation = Generation(spec, block_hashes=b"", deadline=Deadline(), notify=asyncio.Event())
    generation.begin(1)
    generation.placement = RouteReply(
        prefill_instance="p", prefill_epoch=1, decode_instance="d", decode_epoch=1, reason=""
    )
    generation.is_accepted = True
    desk.open["r"] = generation
    return desk, generation, tasks


@pytest.mark.parametrize(("flush_s", "is_lost"), [(0.0, True), (0.9, False), (60.0, False)])
async def test_a_server_that_hangs_is_no_death_of_an_instance(
    flush_s: float, is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desk_module, "PING_TIMEOUT_S", 1.2)
    bus = SlowBus()
    bus.flush_s = flush_s
    desk, generation, tasks = one_open(bus)
    subjects = desk.subjects
    # They listen, and do not answer.
    for role, name in (("decode", "d"), ("prefill", "p")):
        await bus.subscribe(subjects.instance(role, name, "ping"), lambda message: None)
    desk.expect("d")
    desk.check(1e12)
    await asyncio.gather(*tasks)
    if is_lost:
        with pytest.raises(Lost):
            await generation.wait_attempt()
    else:
        assert generation.is_complete is False
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(generation.wait_attempt(), 0.05)
    await bus.close()


TOKENS = np.arange(100, 120, dtype="<i4").tobytes()
END = EndInfo(finish_reason="length", num_prompt_tokens=1, num_completion_tokens=20)


def flipped(body: bytes, rng: random.Random) -> bytes:
    """One bit is wrong."""
    damaged = bytearray(body)
    bit = rng.randrange(8 * len(body))
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


@pytest.mark.parametrize("num_bad_replies", [0, 2])
async def test_the_last_batch_is_damaged_and_so_is_what_replaces_it(num_bad_replies: int) -> None:
    """No later batch would show the gap. What is fetched instead is sealed as well."""
    rng = random.Random(num_bad_replies)
    for _ in range(200):
        bus = LocalBus()
        desk, generation, tasks = one_open(bus)
        asked: list[ResumeRequest] = []

        def resume(message: Message) -> None:
            request = codec.decode(message.data, ResumeRequest)
            asked.append(request)  # noqa: B023  # heard within its turn of the loop
            row = row_from(request.offset)
            body = codec.encode(ResumeReply(row=row))
            if len(asked) <= num_bad_replies:  # noqa: B023  # as above
                body = flipped(body, rng)
            assert message.reply is not None
            tasks.append(asyncio.ensure_future(bus.publish(message.reply, body)))  # noqa: B023  # as above

        await bus.subscribe(desk.subjects.instance("decode", "d", "resume"), resume)
        whole = codec.encode(TokenBatch(epoch=1, step=1, rows=(row_from(0, 8),)))
        desk.on_tokens(Message("t.v1.tokens.gateway-1.d", whole))
        last = codec.encode(TokenBatch(epoch=1, step=2, rows=(row_from(8),)))
        desk.on_tokens(Message("t.v1.tokens.gateway-1.d", flipped(last, rng)))
        await asyncio.wait_for(generation.wait_attempt(), 5)
        assert bytes(generation.choices[0].token_ids) == TOKENS
        assert len(asked) == 1 + num_bad_replies
        assert {request.offset for request in asked} == {8}
        assert desk.metrics.value("finback.gateway.bad_batches") == 1
        assert desk.metrics.value("finback.gateway.bad_replies") == num_bad_replies
        await asyncio.gather(*tasks)
        await bus.close()


def row_from(offset: int, end: int = 20) -> TokenRow:
    return TokenRow(
        request_id="r",
        choice=0,
        attempt=1,
        offset=offset,
        token_ids=TOKENS[4 * offset : 4 * end],
        end=END if end == 20 else None,
    )
