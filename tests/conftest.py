"""Fixtures for every test: a real NATS server, and an event loop for async tests."""

import asyncio
import inspect
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop
from hypothesis import HealthCheck, settings

from support.nats_server import NatsServer

# As the services have it: threads that wait for each other by spinning take a machine that also does
# something else ten times as long. Read when torch is loaded, which happens later.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("KMP_BLOCKTIME", "0")

# How long an example takes tells of the machine, not of the code.
settings.register_profile("finback", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("finback")

_TIMEOUT_S = 100.0
_LEFTOVER_S = 5.0
_counter = itertools.count(1)


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """One server for the session, with `.url`. Do not stop it: `own_nats_server` is for that."""
    server = NatsServer(folder=tmp_path_factory.mktemp("nats"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def own_nats_server(tmp_path: Path) -> Iterator[NatsServer]:
    """A server for one test, which may kill and restart it."""
    server = NatsServer(folder=tmp_path / "nats")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def subject_prefix() -> str:
    """A subject prefix (and stack id) of one's own, so that tests can share a server."""
    return f"t{next(_counter)}"


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run `async def` tests under uvloop, as services do."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    wanted = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in wanted}
    loop = uvloop.new_event_loop()
    try:
        # Signals do not interrupt uvloop, so that pytest's own timeout could not end such a test.
        test = asyncio.wait_for(pyfuncitem.obj(**arguments), _timeout_s(pyfuncitem))
        loop.run_until_complete(test)
    finally:
        _finish(loop)
    return True


def _timeout_s(test: pytest.Function) -> float:
    """A little less than what pytest allows a test that asks for more than the default."""
    marker = test.get_closest_marker("timeout")
    return max(_TIMEOUT_S, float(marker.args[0]) - 20.0) if marker and marker.args else _TIMEOUT_S


def _finish(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel what a test has left behind, without waiting for those that do not listen."""
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.wait(left, timeout=_LEFTOVER_S))
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()
