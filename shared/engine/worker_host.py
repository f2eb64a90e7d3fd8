"""The process of a worker: one engine, and one or more roles over it.

    python -m finback.services.decode --roles prefill,decode

Roles are named by import string, so that no service imports another. A process with both roles has
one instance id and is in the registry under each of its roles.
"""

import argparse
import contextlib
import importlib
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

import anyio

from finback.shared.actor import process
from finback.shared.actor.bus import Bus
from finback.shared.actor.endpoint import Call
from finback.shared.actor.nats_bus import connect
from finback.shared.actor.service import Service, ServiceContext
from finback.shared.clock import monotonic_s
from finback.shared.config import StackConfig
from finback.shared.engine.output import StepOutput
from finback.shared.engine.prefix_fetch import PrefixFetcher
from finback.shared.engine.role import Role
from finback.shared.engine.state_exchange import StateExchange
from finback.shared.engine.warm_up import WarmUp
from finback.shared.engine.write_back import WriteBack
from finback.shared.errors import InvalidRequest, ServingError, Unavailable
from finback.shared.kv.cache_client import CacheClient
from finback.shared.kv.forget_scope import forget_scope
from finback.shared.kv.kv_events import Holding, KvPublisher
from finback.shared.lanes.base import Lane
from finback.shared.lanes.file_lane import FileLane
from finback.shared.lanes.inline import InlineLane
from finback.shared.lanes.nats_lane import NatsLane
from finback.shared.lanes.nats_socket import is_plain
from finback.shared.lanes.peer_lanes import PeerLanes
from finback.shared.lanes.select import LaneSet
from finback.shared.lanes.session import ArenaSession
from finback.shared.lanes.shm_lane import ShmLane
from finback.shared.wire.messages.cache_admin import ForgetPoolRequest
from finback.shared.wire.messages.control import InstanceRecord
from finback.shared.wire.messages.decode import LoadReport
from finback.shared.wire.messages.prefill import Ack

if TYPE_CHECKING:
    from finback.shared.engine.engine import Engine  # brings torch; the caller builds it

ROLES: Final = {
    "prefill": "finback.services.prefill.service:PrefillRole",
    "decode": "finback.services.decode.service:DecodeRole",
}
PREFILL_NICENESS: Final = 4
"""A decode process on the same cores gets about 70 % of them while both have work, all while prefill waits."""
_LOAD_REPORT_S: Final = 0.25
# A cache that did not answer is left alone this long: lane `nats` serves meanwhile.
_ARENA_RETRY_S: Final = 1.0
_CLOSE_S: Final = 2.0
_TIER: Final = "device"

OnStep = Callable[[StepOutput], None]
# Builds the engine (not started yet); runs in a worker thread, because weights take seconds.
LoadEngine = Callable[[StackConfig, OnStep], "Engine"]


class WorkerHost(Service):
    """See above. Roles use it as their view of the process."""

    name: ClassVar[str] = "worker"

    def __init__(
        self, context: ServiceContext, roles: Sequence[str], load_engine: LoadEngine
    ) -> None:
        super().__init__(context)
        self._role_names = tuple(roles)
        self._load_engine = load_engine
        self._roles: dict[str, Role] = {}
        self._arena_retry_s = 0.0
        self._connecting = anyio.Lock()
        self._warm_up: WarmUp | None = None
        self.engine: Engine
        self.nats_lane: NatsLane
        self.peer_lanes: PeerLanes
        self.lanes: LaneSet
        self.cache: CacheClient
        self.prefixes: PrefixFetcher
        self.write_back: WriteBack
        self.arena = ArenaSession(
            context.client,
            owner=self.instance,
            owner_epoch=self.epoch,
            cache_names=self._cache_names,
        )

    # -- lifecycle

    async def start(self) -> None:
        """Load the model, start the engine, then the roles."""
        self.engine = await anyio.to_thread.run_sync(self._load_engine, self.config, self._on_step)
        await self.engine.start()
        self.spawn(self.engine.failed)
        self._warm_up = WarmUp(self.engine)
        await self._warm_up.run()
        self._warm_up = None
        await self._open_lanes()
        await self._open_cache()
        self._roles = {name: _role_class(name)(self) for name in self._role_names}
        for role in self._roles.values():
            await role.start()
        for name in self._role_names:
            await self.serve(name, "forget-pool", ForgetPoolRequest, self._forget_pool, workers=1)
        self.spawn(self._report_load)

    async def _open_lanes(self) -> None:
        """KV bytes get a connection of their own, so that they never stand in front of tokens."""
        settings = process.bus_settings(self.config, self.name)
        # Over plain TCP the lane makes its own connection, and needs a bus only to know the server.
        is_shared = is_plain(settings)
        data_bus = self.context.bus if is_shared else await connect(settings, self.metrics)
        role = self._role_names[0]
        subject = self.subjects.instance(role, self.instance, "lane")
        self.nats_lane = NatsLane(data_bus, subject)
        self.spawn(self._keep_open, None if is_shared else data_bus)
        await self.nats_lane.start()
        lanes: list[Lane] = [InlineLane(), ShmLane(self.arena), self.nats_lane]
        files = await self._open_files()
        self.lanes = LaneSet([*lanes, files] if files is not None else lanes, self.metrics)
        self.peer_lanes = PeerLanes(self.arena, self.nats_lane, files, self.metrics)
        self.spawn(self.arena.run)

    async def _open_cache(self) -> None:
        """Blocks come from the cache of this host and go there; who holds what is told to all."""
        engine, salt = self.engine, self.engine.cache_spec.salt
        self.cache = CacheClient(
            self.arena,
            self.client,
            salt=salt,
            owner=self.instance,
            owner_epoch=self.epoch,
            metrics=self.metrics,
            log=self.log,
        )
        await self.arena.connect()  # the first prompt may be one that is kept
        self.spawn(self.cache.run)
        self.prefixes = PrefixFetcher(
            engine,
            self.cache,
            self.lanes,
            self.metrics,
            by_layers=self.config.cache_fetch_by_layers,
        )
        self.write_back = WriteBack(engine, self.cache, self.metrics)
        self.spawn(self.write_back.run)
        engine.prefixes.on_new_block = self.write_back.offer
        if engine.states is not None:
            self.prefixes.states = StateExchange(engine, self.cache, self.lanes, self.metrics)
            self.spawn(self.prefixes.states.run)
        publisher = KvPublisher(self, name=self._role_names[0], holdings=self._holdings)
        await publisher.start()

        def changed(block_hash: bytes, is_there: bool) -> None:
            tell = publisher.stored if is_there else publisher.removed
            tell(salt, _TIER, (block_hash,))

        engine.prefixes.on_change = changed
        publisher.stored(salt, _TIER, engine.prefixes.hashes())

    def _holdings(self) -> list[Holding]:
        return [(self.engine.cache_spec.salt, _TIER, self.engine.prefixes.hashes())]

    async def _open_files(self) -> FileLane | None:
        """Lane `file`, if there is a folder for it."""
        if not self.config.lane_dir:
            return None
        folder = Path(self.config.lane_dir) / self.config.stack_id
        files = FileLane(folder, self.instance, self.epoch)
        await files.start()
        self.spawn(self._keep_files, files)
        return files

    async def _keep_files(self, files: FileLane) -> None:
        """Remove this worker's files however the process ends, short of kill -9."""
        try:
            await files.run()
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(_CLOSE_S):
                await files.close()

    async def _keep_open(self, bus: Bus | None) -> None:
        """Close lane and connection however the process ends."""
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(_CLOSE_S):
                await self.nats_lane.close()
                if bus is not None:
                    await bus.close()

    async def drain(self) -> None:
        """Let every role finish what it has; prefill first, because it feeds decode."""
        for name in sorted(self._roles, key=lambda n: n != "prefill"):
            await self._roles[name].drain()

    async def stop(self) -> None:
        """Roles first, then the engine, then what they shared."""
        for role in reversed(self._roles.values()):
            await role.stop()
        if self._roles:
            await self.engine.stop()
        self.arena.close()

    def record(self) -> InstanceRecord:
        """What the router needs to know of this worker."""
        engine: Engine | None = getattr(self, "engine", None)
        if engine is None:
            return self.base_record(roles=self._role_names, model=self.config.model_name)
        return self.base_record(
            roles=self._role_names,
            model=self.config.model_name,
            max_model_len=engine.max_model_len,
            num_blocks=engine.num_blocks,
            cache_spec=engine.cache_spec,
        )

    def progress(self) -> int:
        """Steps of the engine."""
        engine: Engine | None = getattr(self, "engine", None)
        return super().progress() + (0 if engine is None else engine.progress)

    # -- for roles

    def sibling(self, name: str) -> Role | None:
        """Another role of this process."""
        return self._roles.get(name)

    async def serve(
        self,
        role: str,
        verb: str,
        request_type: type[Any],
        handler: Callable[[Any], Awaitable[Any]],
        *,
        mailbox: int = 256,
        workers: int = 8,
        takes_work: bool = False,
    ) -> None:
        """Answer `<role>.<instance>.<verb>`; `takes_work`: refused while draining."""
        await self.add_endpoint(
            verb,
            request_type,
            handler,
            scope="instance",
            mailbox=mailbox,
            workers=workers,
            role=role,
            refuse_when_draining=takes_work,
        )

    def _cache_names(self) -> list[str]:
        caches = self.context.directory.instances("cache", state=None)
        return [record.instance for record in caches]

    async def has_arena(self) -> bool:
        """Whether this process shares memory with a cache that has not failed lately (lane `shm`)."""
        if self.cache.is_quiet:
            return False
        if self.arena.is_connected:
            return True
        async with self._connecting:
            if not self.arena.is_connected and monotonic_s() >= self._arena_retry_s:
                await self.arena.connect()
                self._arena_retry_s = monotonic_s() + _ARENA_RETRY_S
        return self.arena.is_connected

    def watch_instances(self, service: str, on_gone: Callable[[str], None]) -> None:
        """Call with each instance of `service` whose registry lease has gone."""
        directory = self.context.directory
        known: set[str] = set()

        def changed() -> None:
            now = {record.instance for record in directory.instances(service, state=None)}
            gone = known - now
            known.clear()
            known.update(now)
            for instance in sorted(gone):
                on_gone(instance)

        directory.on_change(changed)

    # -- loops

    async def _forget_pool(self, call: Call[ForgetPoolRequest]) -> Ack:
        try:
            scope = forget_scope(call.message.tenant, call.message.hashes)
        except ValueError as error:
            raise InvalidRequest(str(error), param="hashes") from None
        self.engine.reset_prefix_cache(scope)
        try:
            await self.write_back.forget(scope)
            if self.prefixes.states is not None:
                await self.prefixes.states.forget(scope)
        except TimeoutError:
            raise Unavailable("blocks are still being stored; ask again") from None
        return Ack()

    def _on_step(self, output: StepOutput) -> None:
        if self._warm_up is not None:
            self._warm_up.on_step(output)
        for role in self._roles.values():
            role.on_step(output)

    async def _report_load(self) -> None:
        while True:
            await anyio.sleep(_LOAD_REPORT_S)
            touch = self.engine.touch_ahead()
            if touch is not None:
                await anyio.to_thread.run_sync(touch)
            for role in self._role_names:
                with contextlib.suppress(ServingError):  # the bus is away: nobody would hear it
                    subject = self.subjects.event(role, "load")
                    await self.client.publish(subject, self._load_of(role))

    def _load_of(self, role: str) -> LoadReport:
        load = self.engine.load()
        return LoadReport(
            instance=self.instance,
            epoch=self.epoch,
            role=role,
            num_running=load.num_running,
            num_waiting=load.num_waiting + self._roles[role].num_queued,
            num_free_blocks=load.num_free_blocks,
            num_blocks=load.num_blocks,
            num_waiting_tokens=load.num_waiting_tokens,
            step_time_ms=load.step_time_ms,
            tokens_per_s=load.tokens_per_s,
        )


def _role_class(name: str) -> Callable[[WorkerHost], Role]:
    module, _, attribute = ROLES[name].partition(":")
    return cast("Callable[[WorkerHost], Role]", getattr(importlib.import_module(module), attribute))


def host_class(
    service: str, roles: Sequence[str], load_engine: LoadEngine
) -> Callable[[ServiceContext], WorkerHost]:
    """A `WorkerHost` that goes by the name of `service`."""

    class Named(WorkerHost):
        name = service

        def __init__(self, context: ServiceContext) -> None:
            super().__init__(context, roles, load_engine)

    return Named


def run(service: str, argv: Sequence[str]) -> int:
    """Run a worker process until it is told to stop; return the exit code."""
    from finback.shared.engine.build import load_engine  # torch: not for `--help`

    parser = argparse.ArgumentParser(prog=f"finback.services.{service}", add_help=False)
    parser.add_argument("--roles", default=service, type=_roles, help="comma-separated roles")
    given, _ = parser.parse_known_args(argv)
    if given.roles == ("prefill",):
        os.nice(PREFILL_NICENESS)
    return process.run(host_class(service, given.roles, load_engine), argv=argv, options=(parser,))


def _roles(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = sorted(set(names) - set(ROLES))
    if unknown or not names:
        raise argparse.ArgumentTypeError(f"roles are {', '.join(ROLES)}, not {text!r}")
    return names
