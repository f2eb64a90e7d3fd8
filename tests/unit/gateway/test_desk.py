"""Who is declared lost."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from finback.services.gateway import desk as desk_module
from finback.services.gateway.desk import Desk
from finback.services.gateway.generation import Generation, Lost
from finback.shared.actor.client import Client
from finback.shared.actor.deadline import Deadline
from finback.shared.actor.local_bus import LocalBus
from finback.shared.config import StackConfig
from finback.shared.telemetry.logging import get_logger
from finback.shared.telemetry.metrics import Metrics
from finback.shared.wire.messages.generate import ChoiceSpec, GenerationSpec, SamplingSpec
from finback.shared.wire.messages.route import RouteReply
from finback.shared.wire.subjects import Subjects


class SlowBus(LocalBus):
    """A bus whose server may hang: what is sent comes late."""

    flush_s = 0.0

    async def flush(self) -> None:
        await asyncio.sleep(self.flush_s)


@pytest.mark.parametrize(("flush_s", "is_lost"), [(0.0, True), (0.3, False), (60.0, False)])
async def test_a_server_that_hangs_is_no_death_of_an_instance(
    flush_s: float, is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desk_module, "PING_TIMEOUT_S", 0.4)
    bus, subjects, tasks = SlowBus(), Subjects("t"), []
    bus.flush_s = flush_s

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
