"""Whether the service in this container serves: `python -m finback.services.supervisor.healthcheck`.

Asks it over the bus, the way its peers do; exit code 0 if it says that it serves.
"""

import asyncio
import sys
from typing import Final

from finback.services.supervisor.container import INSTANCE_FILE, run_dir
from finback.shared import config as settings
from finback.shared.actor.client import Client
from finback.shared.actor.nats_bus import BusSettings, connect
from finback.shared.errors import ConfigError, ServingError
from finback.shared.wire.messages.control import PingReply, PingRequest
from finback.shared.wire.subjects import Subjects

TIMEOUT_S: Final = 3.0


async def ask() -> PingReply:
    """The answer of the instance that runs here."""
    config, _ = settings.load()
    instance = (run_dir() / INSTANCE_FILE).read_text()
    bus = await connect(
        BusSettings(
            url=config.nats_url,
            name="healthcheck",
            user=config.nats_user,
            password=config.nats_password,
            ca_file=config.nats_ca_file,
            connect_timeout_s=TIMEOUT_S,
        )
    )
    try:
        client = Client(bus, Subjects(config.subject_prefix))
        role = instance.rpartition("-")[0]
        subject = client.subjects.instance(role, instance, "ping")
        return await client.call(subject, PingRequest(), PingReply, timeout_s=TIMEOUT_S)
    finally:
        await bus.close()


def main() -> int:
    try:
        reply = asyncio.run(ask())
    except (ConfigError, ServingError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{reply.instance} {reply.state}\n")
    return 0 if reply.state == "serving" else 1


if __name__ == "__main__":
    sys.exit(main())
