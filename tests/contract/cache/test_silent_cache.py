"""`finback cache` over two caches, one of which is stopped: the other's answer is told, and the gap too."""

import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import anyio
import pytest

from finback.services.supervisor import cli_cache, cli_cache_move, cli_cache_show
from finback.services.supervisor.cache_desk import CacheDesk
from finback.services.supervisor.cli_cache_told import Told
from finback.shared.actor.client import Client
from finback.shared.actor.kv import JetStreamKV
from finback.shared.actor.nats_bus import BusSettings, connect
from finback.shared.actor.registry import Directory, bucket_name
from finback.shared.config import StackConfig
from finback.shared.telemetry.metrics import Metrics
from finback.shared.wire.messages.cache_admin import EvictRequest, ForgetRequest
from finback.shared.wire.subjects import Subjects
from support.nats_server import NatsServer
from support.role_stack import until
from support.service_process import ServiceProcess

pytestmark = [pytest.mark.nats, pytest.mark.timeout(300)]

LEASE_S = 2.0


def process(server: NatsServer, prefix: str, folder: Path, name: str) -> ServiceProcess:
    return ServiceProcess(
        "cache",
        {
            "FINBACK_NATS_URL": server.url,
            "FINBACK_RUN_DIR": str(folder),
            "FINBACK_SHM_DIR": str(folder / name),
            "FINBACK_STACK_ID": prefix,
            "FINBACK_SUBJECT_PREFIX": prefix,
            "FINBACK_INSTANCE": name,
            "FINBACK_ARENA_BYTES": str(16 << 20),
            "FINBACK_LEASE_TTL_S": str(LEASE_S),
        },
    )


@contextlib.asynccontextmanager
async def open_desk(server: NatsServer, prefix: str) -> AsyncIterator[CacheDesk]:
    bus = await connect(BusSettings(url=server.url, name="desk"))
    try:
        kv = JetStreamKV(bus, bucket_name(prefix), ttl_s=LEASE_S)
        directory = Directory(kv, ttl_s=LEASE_S, metrics=Metrics())
        async with anyio.create_task_group() as group:
            group.start_soon(directory.watch_forever)
            client = Client(bus, Subjects(prefix))
            names = ("cache-1", "cache-2")
            yield CacheDesk(client, directory, StackConfig(), expected_caches=names)
            group.cancel_scope.cancel()
    finally:
        await bus.close()


async def test_a_silent_cache_is_told_and_the_other_obeys(
    nats_server: NatsServer,
    subject_prefix: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, second = (
        process(nats_server, subject_prefix, tmp_path, name) for name in ("cache-1", "cache-2")
    )

    def ended(told: Told) -> tuple[int, dict[str, Any], str]:
        code = told.end()
        out, err = capsys.readouterr()
        return code, json.loads(out), err

    try:
        first.start()
        second.start()
        async with open_desk(nats_server, subject_prefix) as desk:
            await until(lambda: desk.caches() == ["cache-1", "cache-2"], 60)
            told = Told(as_json=True)
            await cli_cache_show.stats(desk, told, num_prefixes=1, as_json=True)
            code, said, _ = ended(told)
            assert (code, sorted(said["caches"])) == (0, ["cache-1", "cache-2"])
            os.kill(second.pid, signal.SIGSTOP)
            acts: tuple[Callable[[Told], Coroutine[Any, Any, None]], ...] = (
                lambda told: cli_cache.forget(desk, told, ForgetRequest(is_all=True)),
                lambda told: cli_cache_move.verify(desk, told),
                lambda told: cli_cache.evict(desk, told, EvictRequest()),
            )
            for act in acts:
                told = Told(as_json=True)
                with anyio.fail_after(60):
                    await act(told)
                code, said, err = ended(told)
                assert code == 1
                assert list(said["caches"]) == ["cache-1"]
                assert list(said["failed"]) == ["cache-2"]
                assert "cache-2: " in err and "registry" in err
            os.kill(second.pid, signal.SIGCONT)
            await until(lambda: desk.caches() == ["cache-1", "cache-2"], 60)
            told = Told(as_json=True)
            await cli_cache.forget(desk, told, ForgetRequest(is_all=True))
            assert ended(told)[0] == 0
    finally:
        first.stop()
        second.kill()


async def test_without_any_cache_the_others_are_asked_all_the_same(
    nats_server: NatsServer, subject_prefix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with open_desk(nats_server, subject_prefix) as desk:
        told = Told(as_json=False)
        await cli_cache.forget(desk, told, ForgetRequest(is_all=True))
        assert told.end() == 1
        assert "cache-1: it is not in the registry" in capsys.readouterr().err
