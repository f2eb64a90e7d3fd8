"""Asks every cache of a running stack, and the pools of its workers: what the command line needs.

The stack's own credentials are used, which only the owner of its folder can read.
"""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import anyio
import numpy as np

from finback.services.supervisor import nats_config
from finback.services.supervisor.locate import Running
from finback.shared import config as settings
from finback.shared.actor.client import Client
from finback.shared.actor.kv import JetStreamKV
from finback.shared.actor.nats_bus import BusSettings, connect
from finback.shared.actor.registry import Directory, bucket_name
from finback.shared.errors import ConfigError, ServingError
from finback.shared.kv import block_hash
from finback.shared.kv.cluster_key import cluster_key
from finback.shared.telemetry.metrics import Metrics
from finback.shared.wire.messages.control import CacheSpec
from finback.shared.wire.subjects import Subjects

T = TypeVar("T")
TIMEOUT_S: Final = 30.0
# Longer than the caches themselves take at most.
LONG_S: Final = 660.0
_SYNC_S: Final = 5.0
_LOOK_S: Final = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Replies by instance, and what those said that gave none."""

    found: dict[str, Any]
    failed: dict[str, str]


class CacheDesk:
    """An open connection to a stack; see `open_desk`."""

    def __init__(
        self,
        client: Client,
        directory: Directory,
        config: settings.StackConfig,
        *,
        expected_caches: Sequence[str] = (),
    ) -> None:
        """`expected_caches`: those that the supervisor has started, whether they are well or not."""
        self._client = client
        self._directory = directory
        self._config = config
        self._expected = tuple(expected_caches)

    @property
    def exchange_folder(self) -> Path:
        """Where caches of this host exchange prefixes; see `cache_exchange_dir`."""
        folder = self._config.cache_exchange_dir or Path(self._config.run_dir) / "exchange"
        return Path(folder).absolute()

    def caches(self) -> list[str]:
        """Cache services that the registry knows."""
        return [record.instance for record in self._directory.instances("cache", state=None)]

    def workers(self) -> list[tuple[str, str]]:
        """(role, instance) of every process with a pool, once each."""
        seen: dict[str, str] = {}
        for role in ("decode", "prefill"):
            for record in self._directory.instances(role, state=None):
                seen.setdefault(record.instance, role)
        return [(role, instance) for instance, role in seen.items()]

    def gateways(self) -> list[tuple[str, str]]:
        """Gateways that the registry knows."""
        records = self._directory.instances("gateway", state=None)
        return [("gateway", record.instance) for record in records]

    def specs(self) -> list[CacheSpec]:
        """Whom blocks fit, of all workers, each once."""
        found = {}
        for role in ("decode", "prefill"):
            for record in self._directory.instances(role, state=None):
                if record.cache_spec is not None:
                    found[record.cache_spec.salt] = record.cache_spec
        return list(found.values())

    def chain(self, token_ids: list[int], spec: CacheSpec, cache_salt: str) -> bytes:
        """Hashes of a prompt's full blocks, joined."""
        key = cluster_key(self._config)
        if not key:
            raise ConfigError("the stack's cluster key is not known; its blocks cannot be named")
        root = block_hash.prompt_root(key, cache_salt.encode(), spec.block_size)
        data = np.asarray(token_ids, dtype="<i4").tobytes()
        return b"".join(block_hash.extend_all(root, data, spec.block_size, key))

    async def ask_caches(
        self, verb: str, message: Any, reply_type: type[T], *, timeout_s: float = TIMEOUT_S
    ) -> Answers:
        """Ask all caches; those that should be there and are not have failed, too."""
        known = self.caches()
        targets = [("cache", instance) for instance in known]
        answers = await self.ask(targets, verb, message, reply_type, timeout_s=timeout_s)
        for instance in self._expected:
            if instance not in known:
                answers.failed[instance] = "it is not in the registry: it starts, hangs or has died"
        if not answers.found and not answers.failed:
            answers.failed["cache"] = "no cache service runs in this stack"
        return answers

    async def ask(
        self,
        targets: list[tuple[str, str]],
        verb: str,
        message: Any,
        reply_type: type[Any],
        *,
        timeout_s: float = TIMEOUT_S,
    ) -> Answers:
        """Ask (service, instance) each; one that does not answer is named, not waited for again.

        Nor is one waited for that leaves the registry, because it died or hangs.
        """
        answers = Answers(found={}, failed={})

        async def one(service: str, instance: str) -> None:
            subject = self._client.subjects.instance(service, instance, verb)
            async with anyio.create_task_group() as group:
                group.start_soon(self._give_up, instance, group.cancel_scope)
                try:
                    reply = await self._client.call(
                        subject, message, reply_type, timeout_s=timeout_s
                    )
                except ServingError as error:
                    answers.failed[instance] = error.public_message
                else:
                    answers.found[instance] = reply
                group.cancel_scope.cancel()
            if instance not in answers.found:
                answers.failed.setdefault(instance, "no answer; it has left the registry")

        async with anyio.create_task_group() as group:
            for service, instance in targets:
                group.start_soon(one, service, instance)
        return answers

    async def _give_up(self, instance: str, scope: anyio.CancelScope) -> None:
        """Cancel when the instance is registered no more."""
        while self._directory.find(instance) is not None:  # noqa: ASYNC110  # seldom, and cheap
            await anyio.sleep(_LOOK_S)
        scope.cancel()


@asynccontextmanager
async def open_desk(found: Running) -> AsyncIterator[CacheDesk]:
    """Connect to a running stack as its supervisor does, and learn who is there."""
    # What the stack's services were started with, whatever is set here and now.
    config, _ = settings.load(found.run_dir.root / "config.toml", env={})
    bus = await connect(_bus_settings(found, config))
    try:
        kv = JetStreamKV(bus, bucket_name(found.state.stack_id), ttl_s=config.lease_ttl_s)
        directory = Directory(kv, ttl_s=config.lease_ttl_s, metrics=Metrics())
        async with anyio.create_task_group() as group:
            group.start_soon(directory.watch_forever)
            with anyio.move_on_after(_SYNC_S):
                while not directory.is_synced:  # noqa: ASYNC110  # a flag of another task's loop
                    await anyio.sleep(0.02)
            client = Client(bus, Subjects(config.subject_prefix))
            yield CacheDesk(client, directory, config, expected_caches=_expected(found))
            group.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            await bus.close()


def _expected(found: Running) -> list[str]:
    """Caches that the supervisor keeps running."""
    services = found.state.services.items()
    return [state.instance for name, state in services if name == "cache" and state.instance]


def _bus_settings(found: Running, config: settings.StackConfig) -> BusSettings:
    if config.nats_url:
        user, password, url = config.nats_user, config.nats_password, config.nats_url
    else:
        path = found.run_dir.nats / "credentials.json"
        try:
            passwords: dict[str, str] = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read {path}: {error}") from None
        parts = urlsplit(found.state.nats)
        url = f"nats://{parts.hostname}:{parts.port}"
        user, password = nats_config.SUPERVISOR, passwords[nats_config.SUPERVISOR]
    return BusSettings(
        url=url,
        name="finback-cache",
        user=user,
        password=password,
        ca_file=config.nats_ca_file,
        connect_timeout_s=10.0,
    )
