"""The private NATS server's configuration: accounts, users and what each may say and hear. Pure."""

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

MAX_PAYLOAD_BYTES: Final = 8 * 1024 * 1024
# Registry and small facts only; KV blocks and weights never go through JetStream.
MAX_STORE_BYTES: Final = 1024 * 1024 * 1024
MAX_MEMORY_BYTES: Final = 64 * 1024 * 1024

SUPERVISOR: Final = "supervisor"
SYSTEM: Final = "system"
# Outside programs and `finback chat`: the request API and nothing else.
CLIENT: Final = "client"
SERVICES: Final = ("gateway", "router", "prefill", "decode", "drafter", "cache", "sampler")

_WORKERS: Final = ("prefill", "decode")

# What only operators ask of caches and gateways: it tells of, moves or drops what others own.
OPERATOR_VERBS: Final[Mapping[str, tuple[str, ...]]] = {
    "cache": ("stats", "forget", "pin", "unpin", "evict", "verify", "export", "import"),
    "gateway": ("forget",),
    "prefill": ("forget-pool",),
    "decode": ("forget-pool",),
}

# Whom each service asks or tells, beside answering what it is asked and publishing its own events.
_ASKS: Final[Mapping[str, tuple[str, ...]]] = {
    "gateway": ("router", "prefill", "decode", "sampler"),
    "router": ("prefill", "decode", "cache", "gateway"),
    "prefill": ("decode", "cache", "router", "gateway"),
    "decode": ("prefill", "cache", "sampler", "drafter", "router", "stream", "gateway"),
    "drafter": ("decode",),
    "cache": ("prefill", "decode", "cache"),
    "sampler": ("decode",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Permissions:
    """Subjects that a user may publish to and subscribe to."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    never_publish: tuple[str, ...] = ()


def permissions(service: str, prefix: str) -> Permissions:
    """What the NATS user of one service may do. Roles of one worker share the decode user."""
    v1 = f"{prefix}.v1"
    asks = [f"{v1}.{other}.>" for other in _ASKS[service]]
    own = [service]
    if service in _WORKERS:
        own = [*_WORKERS, "worker"]  # a worker may host both roles, and then answers for both
    hears = [f"{v1}.{name}.>" for name in own] + [f"{v1}.event.>"]
    tells = [f"{v1}.event.{name}.>" for name in own]
    if service == "gateway":
        hears += [f"{v1}.stream.>", f"{v1}.api.>"]
    return Permissions(
        publish=(*asks, *tells, "_INBOX.>", "$JS.API.>", "$JS.ACK.>", "$JS.FC.>", "$KV.>"),
        subscribe=(*hears, f"_INBOX.{service}.>", "$SRV.>", "$KV.>"),
        never_publish=_operators_only(v1),
    )


def _operators_only(v1: str) -> tuple[str, ...]:
    """Subjects on which no service asks another, of any instance or of all."""
    return tuple(
        f"{v1}.{service}.{where}{verb}"
        for service, verbs in OPERATOR_VERBS.items()
        for verb in verbs
        for where in ("", "*.")
    )


def client_permissions(prefix: str) -> Permissions:
    """The request API and answers to it; other users' inboxes are not among what it may hear."""
    return Permissions(publish=(f"{prefix}.v1.api.>",), subscribe=("_INBOX.>",))


def new_credentials() -> dict[str, str]:
    """A fresh password for every user."""
    users = (*SERVICES, SUPERVISOR, SYSTEM, CLIENT)
    return {user: secrets.token_urlsafe(24) for user in users}


def render(
    *, port: int, store_dir: Path, name: str, prefix: str, passwords: Mapping[str, str]
) -> str:
    """The whole configuration file; nats-server reads JSON as well as its own format."""
    users: list[dict[str, Any]] = [{"user": SUPERVISOR, "password": passwords[SUPERVISOR]}]
    users += [_user(name, passwords[name], permissions(name, prefix)) for name in SERVICES]
    client = _user(CLIENT, passwords[CLIENT], client_permissions(prefix))
    # Service inboxes lie under `_INBOX.<user>.`; a client that listens to all inboxes must not see.
    private = [f"_INBOX.{service}.>" for service in (*SERVICES, SUPERVISOR)]
    client["permissions"]["subscribe"]["deny"] = private
    client["permissions"]["publish"]["deny"] = private
    config = {
        "server_name": name,
        "host": "127.0.0.1",
        "port": port,
        "max_payload": MAX_PAYLOAD_BYTES,
        "ping_interval": "15s",
        "jetstream": {
            "store_dir": str(store_dir),
            "max_memory_store": MAX_MEMORY_BYTES,
            "max_file_store": MAX_STORE_BYTES,
        },
        "accounts": {
            "FINBACK": {"jetstream": "enabled", "users": [*users, client]},
            "SYS": {"users": [{"user": SYSTEM, "password": passwords[SYSTEM]}]},
        },
        "system_account": "SYS",
    }
    return json.dumps(config, indent=1)


def _user(name: str, password: str, allowed: Permissions) -> dict[str, Any]:
    return {
        "user": name,
        "password": password,
        "permissions": {
            "publish": {"allow": list(allowed.publish), "deny": list(allowed.never_publish)},
            "subscribe": {"allow": list(allowed.subscribe)},
        },
    }
