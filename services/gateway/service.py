"""The gateway actor: loads the codec, opens both doors, watches the engines, drains."""

import gc
from typing import ClassVar, Final

import anyio

from finback.services.gateway.accounts import Accounts
from finback.services.gateway.admissions import Admissions
from finback.services.gateway.auth import KeyRing, check_bind
from finback.services.gateway.desk import Desk
from finback.services.gateway.endpoints import (
    core_endpoints,
    endpoint_table,
    usage_endpoints,
)
from finback.services.gateway.exchange import Exchange
from finback.services.gateway.forgetting import Forgetting
from finback.services.gateway.front import Front
from finback.services.gateway.http_app import make_app
from finback.services.gateway.http_server import HttpServer, listen
from finback.services.gateway.idempotency import Recordings
from finback.services.gateway.ledger import Ledger
from finback.services.gateway.lifecycle import Lifecycle
from finback.services.gateway.messages_work import messages_endpoints
from finback.services.gateway.nats_api import NatsApi
from finback.services.gateway.request_ids import RequestIds
from finback.services.gateway.responses_room import ResponsesRoom, open_responses
from finback.services.gateway.served_model import ServedModel
from finback.services.gateway.text_tools import TextTools
from finback.services.gateway.usage_api import UsageApi
from finback.services.gateway.usage_meter import UsageMeter
from finback.shared.actor.endpoint import Call
from finback.shared.actor.service import Service
from finback.shared.codec.load import load_codec
from finback.shared.config import StackConfig
from finback.shared.kv.cluster_key import cluster_key
from finback.shared.models.source import open_source
from finback.shared.usage_store import UsageStore, usage_path
from finback.shared.wire.messages.control import InstanceLost, InstanceRecord
from finback.shared.wire.messages.prefill import Ack, PrefillFailed

NEEDED: Final = ("router", "prefill", "decode")


class GatewayService(Service):
    """Owns every request from its arrival to its end."""

    name: ClassVar[str] = "gateway"
    desk: Desk
    exchange: Exchange
    responses: ResponsesRoom

    async def start(self) -> None:
        """Load, subscribe, listen; ready for requests when this returns."""
        context, config = self.context, self.config
        keys = KeyRing(config.api_keys_file)
        if not config.http_is_private:
            check_bind(config.http_host, keys)
        listening = listen(config.http_host, config.http_port)
        host, port = listening.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        model = load_model(config)
        self.desk = Desk(
            bus=context.bus,
            client=self.client,
            subjects=self.subjects,
            config=config,
            instance=self.instance,
            metrics=self.metrics,
            log=self.log,
            spawn=self.spawn,
            has_other=self._has_other_decode,
        )
        self.accounts = self._open_accounts(model)
        self.exchange = Exchange(
            model=model,
            desk=self.desk,
            lifecycle=Lifecycle(self.desk, replace_wait_s=config.replace_wait_s),
            accounts=self.accounts,
            config=config,
            max_open=config.max_open_requests,
        )
        self.responses = await open_responses(
            config,
            exchange=self.exchange,
            directory=context.directory,
            instance=self.instance,
            metrics=self.metrics,
            log=self.log,
        )
        front = Front(
            exchange=self.exchange,
            keys=keys,
            recordings=Recordings(),
            request_ids=RequestIds(),
            endpoints=endpoint_table(
                core_endpoints(self.exchange, TextTools(self.exchange)),
                messages_endpoints(self.exchange),
                usage_endpoints(UsageApi(self.accounts.meter)),
                self.responses.endpoints,
            ),
        )
        await self._subscribe()
        self._nats_api = NatsApi(
            bus=context.bus,
            subjects=self.subjects,
            front=front,
            spawn=self.spawn,
            metrics=self.metrics,
            log=self.log,
        )
        await self._nats_api.start()
        app = make_app(front, self.metrics, self.readiness, self.log)
        self._server = HttpServer(app, drain_timeout_s=config.drain_timeout_s)
        self._is_server_done = anyio.Event()
        self._listening = listening
        context.directory.on_change(self._note_limits)
        self._note_limits()
        self.spawn(self._serve_http)
        self.spawn(self.desk.watch)
        self.responses.run(self.spawn, self.metrics, self.log)
        # What was made at the start stays: the collector need not walk it while requests wait.
        gc.collect()
        gc.freeze()
        self.log.info("listening", http=self.url, model=model.name)

    def _open_accounts(self, model: ServedModel) -> Accounts:
        context, config = self.context, self.config
        ledger = Ledger(
            client=self.client,
            subjects=self.subjects,
            instance=self.instance,
            metrics=self.metrics,
            log=self.log,
        )
        admissions = Admissions(
            client=self.client,
            subjects=self.subjects,
            directory=context.directory,
            instance=self.instance,
            ledger=ledger,
        )
        meter = UsageMeter(
            UsageStore(usage_path(config)),
            retention_days=config.usage_retention_days,
            metrics=self.metrics,
            log=self.log,
        )
        context.directory.on_change(admissions.router_may_have_changed)
        self.spawn(ledger.run)
        self.spawn(meter.run)
        return Accounts(admissions, meter, config, model.name)

    async def _subscribe(self) -> None:
        streams = self.subjects.streams_for(self.instance)
        subscription = await self.context.bus.subscribe(streams, self.desk.on_tokens)
        self._subscriptions.append(subscription)
        lost = self.subjects.event("supervisor", "instance-lost")
        await self.listen(lost, InstanceLost, self._on_lost)
        await self.add_endpoint("failed", PrefillFailed, self._on_failed, scope="instance")
        await Forgetting(self, self.exchange.model).start()
        self.context.bus.on_reconnect(self.desk.on_reconnect)

    async def _serve_http(self) -> None:
        try:
            await self._server.serve_on(self._listening)
        finally:
            self._is_server_done.set()

    def _note_limits(self) -> None:
        """The longest sequence that an engine can hold: its pool may be smaller than the model."""
        records = self.context.directory.instances("decode")
        self.exchange.model.note_engine_limit(max((r.max_model_len for r in records), default=0))

    def _has_other_decode(self, decode: str) -> bool:
        records = self.context.directory.instances("decode")
        return any(record.instance != decode for record in records)

    def _on_lost(self, event: InstanceLost) -> None:
        self.context.directory.forget(event.instance)
        self.desk.on_lost(event)

    async def _on_failed(self, call: Call[PrefillFailed]) -> Ack:
        await self.desk.on_failed(call.message)
        return Ack()

    def readiness(self) -> dict[str, bool]:
        """What has to be there before a request can be answered."""
        directory = self.context.directory
        checks = {f"{name} serving": bool(directory.instances(name)) for name in NEEDED}
        return {
            "nats connected": self.context.bus.is_connected,
            **checks,
            "not draining": not self.is_draining,
        }

    def record(self) -> InstanceRecord:
        return self.base_record(
            model=self.config.model_name, endpoints={"http": getattr(self, "url", "")}
        )

    async def drain(self) -> None:
        """Refuse new requests, finish the open ones."""
        self.exchange.is_draining = True
        await self._nats_api.drain()
        self._server.close()
        await self.exchange.wait_idle()
        await self._is_server_done.wait()

    async def _close_accounts(self) -> None:
        """What is counted is written down, what has ended is told."""
        await self.accounts.admissions.ledger.tell_ends()
        await self.accounts.meter.try_flush()

    async def stop(self) -> None:
        if not self._is_server_done.is_set():
            self._server.close(at_once=True)
            with anyio.move_on_after(1):
                await self._is_server_done.wait()
        await self._close_accounts()
        await self.responses.close()


def load_model(config: StackConfig) -> ServedModel:
    """The text side of the model; its metadata is read, its weights are not."""
    source = open_source(config.model)
    codec = load_codec(
        source.text,
        architecture=source.config.architecture,
        output_format=config.output_format,
    )
    limit = source.config.max_model_len
    return ServedModel(
        name=config.model_name,
        aliases=config.model_aliases,
        max_model_len=min(limit, config.max_model_len or limit),
        vocab_size=source.config.vocab_size,
        digest=source.digest,
        block_size=source.config.block_tokens(config.block_size),
        tokenizer=codec.tokenizer,
        numerics="deterministic" if config.deterministic else "fast",
        cluster_key=cluster_key(config),
        encode_cache_bytes=config.encode_cache_mb * 2**20,
        output_format=codec.output,
        grammar_strictness=config.grammar_strictness,
        prompt_format=codec.prompt,
    )
