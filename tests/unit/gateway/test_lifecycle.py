"""What follows when an attempt fails: another try, or the error that the client is told."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from finback.services.gateway import desk as desk_module
from finback.services.gateway import lifecycle
from finback.services.gateway.desk import Desk
from finback.services.gateway.generation import Generation
from finback.services.gateway.lifecycle import Lifecycle
from finback.shared.actor.client import Client
from finback.shared.actor.deadline import Deadline
from finback.shared.actor.endpoint import Call
from finback.shared.actor.service import Service, ServiceContext
from finback.shared.config import StackConfig
from finback.shared.errors import InvariantViolated, Overloaded, ServingError, Unavailable
from finback.shared.telemetry.logging import get_logger
from finback.shared.telemetry.metrics import Metrics
from finback.shared.wire.messages.control import InstanceLost
from finback.shared.wire.messages.generate import (
    ChoiceSpec,
    EndInfo,
    GenerationSpec,
    SamplingSpec,
    TokenRow,
)
from finback.shared.wire.messages.prefill import (
    CancelReply,
    CancelRequest,
    PrefillAccepted,
    PrefillFailed,
    PrefillRequest,
)
from finback.shared.wire.messages.route import RouteReply, RouteRequest
from support.local_service import serving

Take = Callable[[PrefillRequest], Awaitable[None]]


class OneInstance(Service):
    """A router with a single pair of instances to offer, and that pair's prefill."""

    name = "router"

    def __init__(self, context: ServiceContext) -> None:
        super().__init__(context)
        self.take: Take
        self.excluded: list[tuple[str, ...]] = []
        self.is_alone = True

    async def start(self) -> None:
        await self.add_endpoint("route", RouteRequest, self._route, scope="any")
        subject = {"role": "prefill", "scope": "instance"}
        await self.add_endpoint("generate", PrefillRequest, self._generate, **subject)  # type: ignore[arg-type]  # as spelled
        await self.add_endpoint("cancel", CancelRequest, self._cancel, **subject)  # type: ignore[arg-type]  # as spelled

    async def _route(self, call: Call[RouteRequest]) -> RouteReply:
        self.excluded.append(call.message.exclude)
        if call.message.exclude and self.is_alone:
            raise Unavailable("no other instance", reason="no_instance")
        return RouteReply(
            prefill_instance=self.instance,
            prefill_epoch=self.epoch,
            decode_instance="decode-1",
            decode_epoch=1,
            reason="the only one",
        )

    async def _generate(self, call: Call[PrefillRequest]) -> PrefillAccepted:
        await self.take(call.message)
        return PrefillAccepted(instance=self.instance, epoch=self.epoch)

    async def _cancel(self, call: Call[CancelRequest]) -> CancelReply:
        return CancelReply(found=False)


@asynccontextmanager
async def placed(
    make_take: Callable[[OneInstance, Desk], Take],
    *,
    replace_wait_s: float = lifecycle.REPLACE_WAIT_S,
) -> AsyncIterator[tuple[OneInstance, Coroutine[Any, Any, ServingError | None]]]:
    """The instance, and the run of one generation there; awaited, that is how it ended."""
    async with serving(OneInstance) as instance:
        tasks: set[asyncio.Task[Any]] = set()

        def spawn(make: Callable[..., Coroutine[Any, Any, Any]], *args: Any) -> None:
            tasks.add(asyncio.ensure_future(make(*args)))

        desk = Desk(
            bus=instance.context.bus,
            client=Client(instance.context.bus, instance.subjects),
            subjects=instance.subjects,
            config=StackConfig(),
            instance="gateway-1",
            metrics=Metrics(),
            log=get_logger("test"),
            spawn=spawn,
        )
        instance.take = make_take(instance, desk)
        spec = GenerationSpec(
            request_id="r",
            attempt=1,
            model="m",
            token_ids=b"\0\0\0\0",
            sampling=SamplingSpec(),
            choices=(ChoiceSpec(index=0, seed=0),),
            gateway="gateway-1",
        )
        generation = Generation(
            spec, block_hashes=b"", deadline=Deadline.after(30), notify=asyncio.Event()
        )

        async def run() -> ServingError | None:
            await Lifecycle(desk, replace_wait_s=replace_wait_s).run(generation)
            return generation.error

        yield instance, run()
        for task in tasks:
            task.cancel()


def failing_later(code: str) -> Callable[[OneInstance, Desk], Take]:
    """Accepts, and then says that it failed (as prefill tells what decode refused)."""

    def make(instance: OneInstance, desk: Desk) -> Take:
        async def take(request: PrefillRequest) -> None:
            failed = PrefillFailed(
                request_id=request.spec.request_id,
                attempt=request.spec.attempt,
                instance="decode-1",
                code=code,
                public_message="full",
                reason="queue_full",
            )
            asyncio.get_running_loop().call_later(
                0.01, lambda: asyncio.ensure_future(desk.on_failed(failed))
            )

        return take

    return make


async def test_an_overloaded_decode_is_a_429_at_once() -> None:
    async with placed(failing_later("resource_exhausted")) as (instance, run):
        begun_s = time.monotonic()
        error = await run
    assert isinstance(error, Overloaded)
    assert (error.reason, error.http_status) == ("queue_full", 429)
    assert error.retry_after_s is not None
    assert time.monotonic() - begun_s < 1
    assert instance.excluded[1] == ("decode-1",)


@pytest.mark.parametrize("blamed", ["prefill-9", "decode-9", ""])
async def test_a_retry_avoids_whom_decode_blames(blamed: str) -> None:
    def make(instance: OneInstance, desk: Desk) -> Take:
        async def take(request: PrefillRequest) -> None:
            end = EndInfo(finish_reason="error", error_code="unavailable", error_instance=blamed)
            row = TokenRow(
                request_id="r", choice=0, attempt=request.spec.attempt, offset=0, end=end
            )
            asyncio.get_running_loop().call_later(0.01, desk.open["r"].accept, row)

        return take

    async with placed(make) as (instance, run):
        tried = asyncio.ensure_future(run)
        async with asyncio.timeout(5):
            while len(instance.excluded) < 2:  # noqa: ASYNC110  # a list, not an event
                await asyncio.sleep(0.01)
        tried.cancel()
        await asyncio.wait([tried])
    assert instance.excluded[1] == ((blamed,) if blamed else ())


async def test_a_bug_of_the_only_engine_is_told_as_one() -> None:
    async with placed(failing_later("internal")) as (_, run):
        error = await run
    assert isinstance(error, InvariantViolated)
    assert error.public_message == "full"


async def test_an_overloaded_prefill_is_a_429_at_once() -> None:
    def make(instance: OneInstance, desk: Desk) -> Take:
        async def take(request: PrefillRequest) -> None:
            raise Overloaded("too many prompts", reason="queue_full", retry_after_s=3.0)

        return take

    async with placed(make) as (instance, run):
        error = await run
    assert isinstance(error, Overloaded)
    assert error.retry_after_s == 3.0
    assert instance.excluded[1] == (instance.instance,)


async def test_a_death_while_placing_is_not_waited_out() -> None:
    """The request has reached the process, its answer will never come; another one is awaited."""

    def make(instance: OneInstance, desk: Desk) -> Take:
        async def take(request: PrefillRequest) -> None:
            lost = InstanceLost(
                service="prefill", instance=instance.instance, epoch=instance.epoch, reason="killed"
            )
            asyncio.get_running_loop().call_later(0.01, desk.on_lost, lost)
            await asyncio.sleep(1)

        return take

    async with placed(make, replace_wait_s=0.1) as (_, run):
        begun_s = time.monotonic()
        error = await run
        assert time.monotonic() - begun_s < 0.8
    assert isinstance(error, Unavailable)
    assert error.http_status == 503


async def test_a_hang_while_placing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(instance: OneInstance, desk: Desk) -> Take:
        async def take(request: PrefillRequest) -> None:
            await asyncio.sleep(1)

        return take

    assert desk_module.PREFILL_CHECK_S + desk_module.PING_TIMEOUT_S < 3.1
    monkeypatch.setattr(lifecycle, "PLACE_TIMEOUT_S", 0.1)
    async with placed(make, replace_wait_s=0.1) as (_, run):
        begun_s = time.monotonic()
        error = await run
        assert time.monotonic() - begun_s < 0.8
    assert isinstance(error, Unavailable)


async def test_the_only_instance_is_taken_again_if_it_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It hung for a moment, and nobody else is there: better it than an error."""

    def make(instance: OneInstance, desk: Desk) -> Take:
        async def take(request: PrefillRequest) -> None:
            spec, loop = request.spec, asyncio.get_running_loop()
            if spec.attempt == 1:
                begun = TokenRow(
                    request_id="r", choice=0, attempt=1, offset=0, token_ids=b"\5\0\0\0"
                )
                loop.call_later(0.01, desk.open["r"].accept, begun)
                lost = partial(desk.lose_instance, "decode-1", "silent", is_crash=False)
                loop.call_later(0.02, lost)
                return
            assert spec.choices[0].token_ids == b"\5\0\0\0"
            end = EndInfo(finish_reason="length", num_completion_tokens=2)
            row = TokenRow(
                request_id="r",
                choice=0,
                attempt=spec.attempt,
                offset=1,
                token_ids=b"\6\0\0\0",
                end=end,
            )
            loop.call_later(0.01, desk.open["r"].accept, row)

        return take

    monkeypatch.setattr(lifecycle, "AVOID_S", 0.1)
    async with placed(make) as (instance, run):
        assert await run is None
    assert instance.excluded[0] == ()
    assert instance.excluded[1] == ("decode-1",)
    assert instance.excluded[-1] == ()


async def test_a_request_at_two_crashes_is_poison() -> None:
    def make(instance: OneInstance, desk: Desk) -> Take:
        async def take(request: PrefillRequest) -> None:
            lost = InstanceLost(
                service="decode", instance="decode-1", epoch=request.spec.attempt, reason="killed"
            )
            asyncio.get_running_loop().call_later(0.01, desk.on_lost, lost)

        return take

    async with placed(make) as (instance, run):
        instance.is_alone = False
        error = await run
    assert isinstance(error, InvariantViolated)
    assert len(instance.excluded) == 2
