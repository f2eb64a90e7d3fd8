"""A service that takes long, or does what the server punishes; run as a script by tests."""

import sys
from typing import ClassVar

import anyio

from finback.shared.actor.endpoint import Call
from finback.shared.actor.nats_bus import NatsBus
from finback.shared.actor.process import run
from finback.shared.actor.service import Service
from finback.shared.wire.messages.control import PingReply, PingRequest


class Slow(Service):
    """`slow.wait` says so on stderr and takes a minute; `slow.overflow` sends too much."""

    name: ClassVar[str] = "slow"

    async def start(self) -> None:
        await self.add_endpoint("wait", PingRequest, self._wait, scope="any")
        await self.add_endpoint("overflow", PingRequest, self._overflow, scope="any")

    async def _wait(self, call: Call[PingRequest]) -> PingReply:
        sys.stderr.write("taken\n")
        sys.stderr.flush()
        await anyio.sleep(60)
        raise AssertionError("nobody waits that long")

    async def _overflow(self, call: Call[PingRequest]) -> None:
        bus = self.context.bus
        assert isinstance(bus, NatsBus)
        # Behind the bus's own check, as a bug would.
        await bus._client.publish("x", b"y" * bus.max_payload, headers={"A": "b" * 4000})
        await anyio.sleep(60)


if __name__ == "__main__":
    sys.exit(run(Slow, argv=[]))
