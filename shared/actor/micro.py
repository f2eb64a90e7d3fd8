"""The NATS service protocol (ADR-32): `$SRV.PING`, `INFO` and `STATS`, so that standard tools see us."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

from anyio.abc import TaskGroup

from finback.shared.actor.bus import Bus, Message, Subscription
from finback.shared.actor.service import Service
from finback.shared.errors import ServingError
from finback.shared.wire.messages.control import WIRE_VERSION

VERSION: Final = "0.1.0"


def ping(service: Service) -> dict[str, Any]:
    """Who is there."""
    return {
        "type": "io.nats.micro.v1.ping_response",
        "name": service.name,
        "id": service.instance,
        "version": VERSION,
        "metadata": {
            "epoch": str(service.epoch),
            "state": service.state,
            "wire_version": str(WIRE_VERSION),
            "stack": service.config.stack_id,
        },
    }


def info(service: Service) -> dict[str, Any]:
    """What it answers to."""
    return ping(service) | {
        "type": "io.nats.micro.v1.info_response",
        "description": f"Finback {service.name}",
        "endpoints": [
            {
                "name": endpoint.spec.name.replace(" ", "-"),
                "subject": subject,
                "queue_group": queue or "",
                "metadata": {},
            }
            for endpoint in service.endpoints
            for subject, queue in endpoint.subjects
        ],
    }


def stats(service: Service) -> dict[str, Any]:
    """What it has done; the process's metrics are the first endpoint's `data`."""
    endpoints: list[dict[str, Any]] = []
    for endpoint in service.endpoints:
        s = endpoint.stats
        subject, queue = endpoint.subjects[0]
        endpoints.append(
            {
                "name": endpoint.spec.name.replace(" ", "-"),
                "subject": subject,
                "queue_group": queue or "",
                "num_requests": s.num_requests,
                "num_errors": s.num_errors,
                "last_error": s.last_error,
                "processing_time": s.processing_ns,
                "average_processing_time": s.processing_ns // max(1, s.num_requests),
                "data": {"num_open": endpoint.num_open},
            }
        )
    if endpoints:
        endpoints[0]["data"] |= {"metrics": service.metrics.snapshot()}
    started = datetime.fromtimestamp(service.started_unix_s, UTC)
    return ping(service) | {
        "type": "io.nats.micro.v1.stats_response",
        "started": started.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "endpoints": endpoints,
    }


async def answer(service: Service, bus: Bus, tasks: TaskGroup) -> list[Subscription]:
    """Answer the nine subjects of the protocol: for all, by name, by instance."""

    async def reply(to: str, make: Callable[[Service], dict[str, Any]]) -> None:
        try:
            await bus.publish(to, json.dumps(make(service)).encode())
        except ServingError as error:
            service.log.warning("cannot answer $SRV", error=error.public_message)

    def on(make: Callable[[Service], dict[str, Any]]) -> Callable[[Message], None]:
        def offered(message: Message) -> None:
            if message.reply:
                tasks.start_soon(reply, message.reply, make)

        return offered

    suffixes = ("", f".{service.name}", f".{service.name}.{service.instance}")
    verbs = {"PING": ping, "INFO": info, "STATS": stats}
    return [
        await bus.subscribe(f"$SRV.{verb}{suffix}", on(make))
        for verb, make in verbs.items()
        for suffix in suffixes
    ]
