"""The drafter as a process: guesses over the bus, killed and told anew."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from finback.shared.actor.client import Client
from finback.shared.actor.nats_bus import BusSettings, connect
from finback.shared.wire.messages.draft import Draft, DraftReply, DraftRequest, DraftRow
from finback.shared.wire.subjects import Subjects
from support.nats_server import NatsServer
from support.service_process import ServiceProcess

pytestmark = pytest.mark.nats

TEXT = [11, 12, 13, 14, 15, 16, 17, 18, 11, 12, 13]


@pytest.fixture
def drafter(
    nats_server: NatsServer, tmp_path: Path, subject_prefix: str
) -> Iterator[ServiceProcess]:
    process = ServiceProcess(
        "drafter",
        {
            "FINBACK_NATS_URL": nats_server.url,
            "FINBACK_RUN_DIR": str(tmp_path),
            "FINBACK_STACK_ID": subject_prefix,
            "FINBACK_SUBJECT_PREFIX": subject_prefix,
        },
    ).start()
    yield process
    process.stop()


async def ask(client: Client, position: int, token_ids: list[int], choices: int = 1) -> list[Draft]:
    rows = tuple(
        DraftRow(
            request_id="r",
            choice=choice,
            position=position,
            token_ids=np.array(token_ids, "<i4").tobytes(),
            num_draft_tokens=5,
        )
        for choice in range(choices)
    )
    request = DraftRequest(instance="decode-a", epoch=1, rows=rows)
    subject = client.subjects.service("drafter", "draft")
    reply = await client.call(subject, request, DraftReply, timeout_s=5)
    return list(reply.drafts)


async def test_it_guesses_and_survives_kills(
    drafter: ServiceProcess, nats_server: NatsServer, subject_prefix: str
) -> None:
    bus = await connect(BusSettings(url=nats_server.url))
    client = Client(bus, Subjects(subject_prefix))
    assert await ask(client, 0, TEXT[:8]) == []
    (found,) = await ask(client, 8, TEXT[8:])
    assert found.position == 11
    assert np.frombuffer(found.token_ids, "<i4").tolist() == [14, 15, 16, 17, 18]
    drafter.kill()
    drafter.start()
    (lost,) = await ask(client, 11, [14])
    assert lost.need_from == 0 and lost.token_ids == b""
    drafts = await ask(client, 0, TEXT, choices=16)
    assert len(drafts) == 16
    await bus.close()


def test_it_is_small(drafter: ServiceProcess) -> None:
    assert psutil.Process(drafter.pid).memory_full_info().pss < 120 * 2**20
    assert drafter.stop() == 0
