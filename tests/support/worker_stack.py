"""Engine-side services as real processes, and a gateway of a few lines that uses them."""

import asyncio
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from finback.shared.actor.bus import Message
from finback.shared.actor.client import Client
from finback.shared.actor.kv import JetStreamKV
from finback.shared.actor.nats_bus import BusSettings, NatsBus, connect
from finback.shared.actor.registry import Directory, bucket_name
from finback.shared.telemetry.metrics import Metrics
from finback.shared.wire import codec
from finback.shared.wire.messages.control import InstanceRecord
from finback.shared.wire.messages.decode import FinishReply, FinishRequest
from finback.shared.wire.messages.generate import (
    ChoiceSpec,
    EndInfo,
    GenerationSpec,
    GrammarSpec,
    SamplingSpec,
    TokenBatch,
    TokenRow,
)
from finback.shared.wire.messages.prefill import (
    Ack,
    CancelReply,
    CancelRequest,
    PrefillAccepted,
    PrefillFailed,
    PrefillRequest,
)
from finback.shared.wire.subjects import Subjects
from support.service_process import ServiceProcess

_ids = itertools.count(1)
# An engine compiles its kernels at its first start on a machine.
_READY_S = 200.0


@dataclass(slots=True)
class WorkerStack:
    """Service processes over one NATS server. `settings` become `FINBACK_*` variables."""

    url: str
    folder: Path
    prefix: str
    settings: Mapping[str, str] = field(default_factory=dict)
    processes: dict[str, ServiceProcess] = field(default_factory=dict)

    @property
    def env(self) -> dict[str, str]:
        """What every service is told."""
        told = {
            "nats_url": self.url,
            "run_dir": str(self.folder / "run"),
            "shm_dir": str(self.folder / "shm"),
            "stack_id": self.prefix,
            "subject_prefix": self.prefix,
            "num_threads": "1",
            "kv_pool_bytes": str(64 * 2**20),
            "log_level": "info",
            **self.settings,
        }
        return {f"FINBACK_{name.upper()}": value for name, value in told.items()}

    def start(self, *names: str) -> None:
        """Start services; `prefill+decode` is one process with both roles."""
        for name in names:
            roles = name.split("+")
            args = ["--roles", ",".join(roles)] if roles[0] in ("prefill", "decode") else []
            self.processes[name] = ServiceProcess(
                roles[-1], self.env, args, ready_s=_READY_S
            ).start()

    def stop(self) -> None:
        """End everything that was started."""
        for process in reversed(self.processes.values()):
            process.kill()

    def restart(self, name: str) -> None:
        """Kill -9 and start again."""
        self.processes[name].kill()
        self.start(name)


@dataclass(slots=True)
class Answer:
    """What came for one choice."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    end: EndInfo | None = None
    num_ends: int = 0
    first_s: float = 0.0
    last_s: float = 0.0


class Generation:
    """One request of `MiniGateway`."""

    def __init__(self, spec: GenerationSpec) -> None:
        self.spec = spec
        self.answers = {choice.index: Answer() for choice in spec.choices}
        self.failed: PrefillFailed | None = None
        self.changed = asyncio.Event()
        self.sent_s = time.monotonic()

    @property
    def is_over(self) -> bool:
        return self.failed is not None or all(a.end for a in self.answers.values())

    def take(self, row: TokenRow) -> None:
        """One row off the stream; offsets must be contiguous."""
        answer = self.answers[row.choice]
        new = np.frombuffer(row.token_ids, dtype="<i4").tolist()
        if row.offset != len(answer.tokens):
            raise AssertionError(f"offset {row.offset} after {len(answer.tokens)} tokens")
        answer.last_s = time.monotonic()
        answer.first_s = answer.first_s or answer.last_s
        answer.tokens += new
        answer.logprobs += [entry.logprob for entry in row.logprobs or ()]
        if row.end is not None:
            answer.end = row.end
            answer.num_ends += 1
        self.changed.set()

    async def wait(self, timeout_s: float = 60.0) -> "Generation":
        """Until it is over."""
        async with asyncio.timeout(timeout_s):
            while not self.is_over:
                self.changed.clear()
                await self.changed.wait()
        return self

    async def wait_tokens(self, num_tokens: int, timeout_s: float = 60.0) -> None:
        """Until choice 0 has that many tokens (or is over)."""
        async with asyncio.timeout(timeout_s):
            while len(self.answers[0].tokens) < num_tokens and not self.is_over:
                self.changed.clear()
                await self.changed.wait()

    @property
    def tokens(self) -> list[int]:
        return self.answers[0].tokens

    @property
    def end(self) -> EndInfo:
        end = self.answers[0].end
        if end is None:
            raise AssertionError(f"not ended; failed: {self.failed}")
        return end


class MiniGateway:
    """Places generations on given instances and collects their tokens."""

    def __init__(self, bus: NatsBus, prefix: str, instance: str = "gateway-000001") -> None:
        self.bus = bus
        self.subjects = Subjects(prefix)
        self.client = Client(bus, self.subjects)
        self.instance = instance
        self.open: dict[str, Generation] = {}
        self.num_batches = 0
        self.num_heartbeats = 0
        self.directory = Directory(
            JetStreamKV(bus, bucket_name(prefix), ttl_s=3), ttl_s=3, metrics=Metrics()
        )
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def connect(
        cls, url: str, prefix: str, instance: str = "gateway-000001"
    ) -> "MiniGateway":
        """Connect, listen, watch the registry."""
        gateway = cls(await connect(BusSettings(url=url, name="gateway")), prefix, instance)
        await gateway.bus.subscribe(gateway.subjects.streams_for(instance), gateway._on_tokens)
        await gateway.bus.subscribe(
            gateway.subjects.instance("gateway", instance, "failed"), gateway._on_failed
        )
        gateway._tasks.append(asyncio.create_task(gateway.directory.watch_forever()))
        return gateway

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.bus.close()

    def _on_tokens(self, message: Message) -> None:
        batch = codec.decode(message.data, TokenBatch)
        self.num_batches += 1
        self.num_heartbeats += not batch.rows
        for row in batch.rows:
            generation = self.open.get(row.request_id)
            if generation is not None and generation.spec.attempt == row.attempt:
                generation.take(row)

    def _on_failed(self, message: Message) -> None:
        failed = codec.decode(message.data, PrefillFailed)
        generation = self.open.get(failed.request_id)
        if generation is not None and generation.spec.attempt == failed.attempt:
            generation.failed = failed
            generation.changed.set()
        if message.reply:
            reply = self.bus.publish(message.reply, codec.encode(Ack()))
            self._tasks.append(asyncio.ensure_future(reply))

    async def instance_of(self, service: str, *, but: Sequence[str] = ()) -> InstanceRecord:
        """A serving instance of a role."""
        async with asyncio.timeout(30):
            while True:
                for record in self.directory.instances(service):
                    if record.instance not in but:
                        return record
                await asyncio.sleep(0.02)

    def spec(
        self,
        prompt: Sequence[int],
        sampling: SamplingSpec,
        *,
        request_id: str = "",
        attempt: int = 1,
        seeds: Sequence[int] = (1,),
        grammar: GrammarSpec | None = None,
        credit_tokens: int = 4096,
        drafting: bool = True,
        traffic_class: str = "chat",
        tenant: str = "",
        cache_salt: str = "",
        retention_s: float | None = None,
    ) -> GenerationSpec:
        """A request of ours."""
        return GenerationSpec(
            request_id=request_id or f"req-{next(_ids)}",
            attempt=attempt,
            model="m",
            token_ids=np.asarray(prompt, dtype="<i4").tobytes(),
            sampling=sampling,
            choices=tuple(ChoiceSpec(index=i, seed=seed) for i, seed in enumerate(seeds)),
            gateway=self.instance,
            grammar=grammar,
            credit_tokens=credit_tokens,
            drafting=drafting,
            traffic_class=traffic_class,
            tenant=tenant,
            cache_salt=cache_salt,
            retention_s=retention_s,
        )

    async def place(
        self, spec: GenerationSpec, prefill: InstanceRecord, decode: InstanceRecord
    ) -> Generation:
        """Send it to prefill; returns once accepted."""
        generation = self.open[spec.request_id] = Generation(spec)
        await self.client.call(
            self.subjects.instance("prefill", prefill.instance, "generate"),
            PrefillRequest(spec=spec, decode_instance=decode.instance, decode_epoch=decode.epoch),
            PrefillAccepted,
            timeout_s=10,
            request_id=spec.request_id,
            attempt=spec.attempt,
        )
        return generation

    async def generate(
        self, prompt: Sequence[int], sampling: SamplingSpec, **more: object
    ) -> Generation:
        """Place on whatever serves and wait for the end."""
        prefill, decode = await self.instance_of("prefill"), await self.instance_of("decode")
        spec = self.spec(prompt, sampling, **more)  # type: ignore[arg-type]  # passed through
        return await (await self.place(spec, prefill, decode)).wait()

    async def cancel(self, role: str, instance: str, spec: GenerationSpec) -> bool:
        """Acknowledged cancel of all choices."""
        reply = await self.client.call(
            self.subjects.instance(role, instance, "cancel"),
            CancelRequest(request_id=spec.request_id, attempt=spec.attempt),
            CancelReply,
            timeout_s=5,
        )
        return reply.found

    async def finish(self, decode: str, spec: GenerationSpec, num_tokens: int) -> FinishReply:
        """A stop string was found."""
        return await self.client.call(
            self.subjects.instance("decode", decode, "finish"),
            FinishRequest(
                request_id=spec.request_id, choice=0, attempt=spec.attempt, num_tokens=num_tokens
            ),
            FinishReply,
            timeout_s=5,
        )
