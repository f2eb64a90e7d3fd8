"""A worker without a model: a real actor that hosts prefill and decode and echoes its prompts.

It measures what everything around a model costs, and stands in for one in tests of the APIs. It
answers with the last user message (or the whole bare prompt), then ends; with `ignore_eos` it goes
round. One token a sequence and step. `ECHO_STEP_MS` is the time of a step (0: as fast as the event
loop turns), `ECHO_PREFILL_MS` the wait before the first token. `ECHO_TIMES` names a file: to it goes
a line for each token when the engine stops, `request_id offset published_s` (monotonic clock).
`ECHO_TURN`: the ids that begin and end a user's message, `259:260`, where they are not ChatML's.

    FINBACK_NATS_URL=... python benchmarks/echo_engine.py
"""

import asyncio
import os
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from finback.shared.actor.endpoint import Call
from finback.shared.actor.process import run
from finback.shared.actor.service import Service
from finback.shared.clock import monotonic_s
from finback.shared.errors import ServingError
from finback.shared.wire.messages.control import InstanceRecord
from finback.shared.wire.messages.decode import (
    CreditCommand,
    EndAck,
    FinishReply,
    FinishRequest,
    LoadReport,
    ResumeReply,
    ResumeRequest,
)
from finback.shared.wire.messages.generate import (
    EndInfo,
    GenerationSpec,
    TokenBatch,
    TokenLogprob,
    TokenRow,
)
from finback.shared.wire.messages.prefill import (
    Ack,
    CancelReply,
    CancelRequest,
    PrefillAccepted,
    PrefillRequest,
    TokenChunk,
)

STEP_S: Final = float(os.environ.get("ECHO_STEP_MS", "0")) / 1000
TIMES: Final = os.environ.get("ECHO_TIMES", "")
PREFILL_S: Final = float(os.environ.get("ECHO_PREFILL_MS", "0")) / 1000
IM_START: Final = 1
IM_END: Final = 2
# "user" and the newline after it, which follow <|im_start|>.
_ROLE_TOKENS: Final = 2
_TURN: Final = os.environ.get("ECHO_TURN", "")
_LOAD_S: Final = 0.3
_MAX_PROMPT: Final = 8192

Key = tuple[str, int]


@dataclass(slots=True)
class Sequence:
    """One choice that is being echoed."""

    spec: GenerationSpec
    choice: int
    source: list[int]
    starts_s: float
    up_to: int
    tokens: list[int] = field(default_factory=list)
    end: EndInfo | None = None
    num_steps: int = 0


class EchoEngine(Service):
    """Both roles under one instance id."""

    name: ClassVar[str] = "echo"

    async def start(self) -> None:
        self._sequences: dict[Key, Sequence] = {}
        self._live: dict[Key, Sequence] = {}
        self._chunks: dict[str, tuple[PrefillRequest, list[bytes]]] = {}
        self._work = asyncio.Event()
        self._step = 0
        self._times: list[tuple[str, int, float]] = []
        verbs: list[tuple[str, str, type, Any]] = [
            ("prefill", "generate", PrefillRequest, self._generate),
            ("prefill", "chunk", TokenChunk, self._chunk),
            ("prefill", "cancel", CancelRequest, self._cancel),
            ("decode", "cancel", CancelRequest, self._cancel),
            ("decode", "finish", FinishRequest, self._finish),
            ("decode", "resume", ResumeRequest, self._resume),
            ("decode", "ended", EndAck, self._ended),
            ("decode", "credit", CreditCommand, self._credit),
        ]
        for role, verb, request_type, handler in verbs:
            await self.add_endpoint(
                verb, request_type, handler, scope="instance", role=role, mailbox=4096
            )
        for loop in (self._run, self._beat, self._report):
            self.spawn(loop)

    def record(self) -> InstanceRecord:
        return self.base_record(
            roles=("prefill", "decode"), model=self.config.model_name, max_model_len=_MAX_PROMPT
        )

    def progress(self) -> int:
        return self._step

    async def stop(self) -> None:
        if TIMES:
            lines = (f"{name} {offset} {at_s}\n" for name, offset, at_s in self._times)
            with open(TIMES, "w") as out:  # noqa: ASYNC230 -- it is over, nothing waits
                out.writelines(lines)
        await super().stop()

    # -- what it answers

    async def _generate(self, call: Call[PrefillRequest]) -> PrefillAccepted:
        request = call.message
        if request.num_chunks > 1:
            self._chunks[request.spec.request_id] = (request, [request.spec.token_ids])
        else:
            self._add(request.spec, request.spec.token_ids)
        return PrefillAccepted(instance=self.instance, epoch=self.epoch)

    async def _chunk(self, call: Call[TokenChunk]) -> Ack:
        request, parts = self._chunks[call.message.request_id]
        parts.append(call.message.token_ids)
        if len(parts) == request.num_chunks:
            del self._chunks[call.message.request_id]
            self._add(request.spec, b"".join(parts))
        return Ack()

    def _add(self, spec: GenerationSpec, token_ids: bytes) -> None:
        source = echoed(memoryview(token_ids).cast("i").tolist())
        for choice in spec.choices:
            known = memoryview(choice.token_ids).cast("i").tolist() if choice.token_ids else []
            up_to = len(known) + spec.credit_tokens
            sequence = Sequence(spec, choice.index, source, monotonic_s() + PREFILL_S, up_to, known)
            key = (spec.request_id, choice.index)
            self._sequences[key] = self._live[key] = sequence
        self._work.set()

    async def _cancel(self, call: Call[CancelRequest]) -> CancelReply:
        keys = [
            key
            for key in self._sequences
            if key[0] == call.message.request_id and call.message.choice in (None, key[1])
        ]
        for key in keys:
            del self._sequences[key]
            self._live.pop(key, None)
        return CancelReply(found=bool(keys))

    async def _finish(self, call: Call[FinishRequest]) -> FinishReply:
        key = (call.message.request_id, call.message.choice)
        self._live.pop(key, None)
        sequence = self._sequences.pop(key, None)
        if sequence is None:
            return FinishReply(found=False)
        return FinishReply(found=True, num_steps=sequence.num_steps)

    async def _resume(self, call: Call[ResumeRequest]) -> ResumeReply:
        m = call.message
        sequence = self._sequences.get((m.request_id, m.choice))
        if sequence is None:
            return ResumeReply()
        return ResumeReply(row=row_of(sequence, m.offset, sequence.end))

    async def _ended(self, call: Call[EndAck]) -> None:
        for request_id, choice, _ in call.message.ended:
            self._sequences.pop((request_id, choice), None)

    async def _credit(self, call: Call[CreditCommand]) -> None:
        for request_id, choice, up_to in call.message.grants:
            sequence = self._sequences.get((request_id, choice))
            if sequence is not None:
                sequence.up_to = max(sequence.up_to, up_to)
        self._work.set()

    # -- what it does by itself

    async def _run(self) -> None:
        while True:
            if not self._live:
                self._work.clear()
                await self._work.wait()
            begun_s = monotonic_s()
            await self._run_step()
            # Steps keep their rate, whatever one of them takes.
            await asyncio.sleep(max(0.0, begun_s + STEP_S - monotonic_s()))

    async def _run_step(self) -> None:
        self._step += 1
        now_s = monotonic_s()
        rows: dict[str, list[TokenRow]] = defaultdict(list)
        for key, sequence in list(self._live.items()):
            if now_s < sequence.starts_s or len(sequence.tokens) >= sequence.up_to:
                continue
            offset = len(sequence.tokens)
            advance(sequence)
            rows[sequence.spec.gateway].append(row_of(sequence, offset, sequence.end))
            if TIMES:
                self._times.append((sequence.spec.request_id, offset, monotonic_s()))
            if sequence.end is not None:
                del self._live[key]
        for gateway, batch in rows.items():
            await self._publish(gateway, tuple(batch))
        if not rows:
            await asyncio.sleep(0.001)

    async def _publish(self, gateway: str, rows: tuple[TokenRow, ...]) -> None:
        batch = TokenBatch(epoch=self.epoch, step=self._step, rows=rows)
        try:
            subject = self.subjects.stream(gateway, self.instance)
            await self.client.publish_bare(subject, batch)
        except ServingError as error:
            self.log.warning("cannot publish", error=error.public_message)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self.config.heartbeat_ms / 1000)
            for gateway in {sequence.spec.gateway for sequence in self._live.values()}:
                await self._publish(gateway, ())

    async def _report(self) -> None:
        while True:
            for role in ("prefill", "decode"):
                report = LoadReport(
                    instance=self.instance,
                    epoch=self.epoch,
                    role=role,
                    num_running=len(self._live),
                    num_waiting=0,
                    num_free_blocks=1000,
                    num_blocks=1000,
                )
                await self.client.publish(self.subjects.event(role, "load"), report)
            await asyncio.sleep(_LOAD_S)


def echoed(prompt: list[int]) -> list[int]:
    """The tokens to answer with: the last user message's, or the whole of a bare prompt."""
    if _TURN:
        begin, end = map(int, _TURN.split(":"))
        if begin not in prompt:
            return prompt
        said = prompt[len(prompt) - prompt[::-1].index(begin) :]
        return said[: said.index(end)] if end in said else said
    starts = [at for at, token_id in enumerate(prompt) if token_id == IM_START]
    if len(starts) < 2:
        return [token_id for token_id in prompt if token_id > IM_END] or [30]
    said = prompt[starts[-2] + 1 + _ROLE_TOKENS : starts[-1]]
    return [token_id for token_id in said[: said.index(IM_END)] if token_id > IM_END] or [30]


def advance(sequence: Sequence) -> None:
    """Append the next token; the end comes with the last one."""
    sampling, at = sequence.spec.sampling, len(sequence.tokens)
    sequence.num_steps += 1
    is_done = at >= len(sequence.source) and not sampling.ignore_eos
    token_id = IM_END if is_done else sequence.source[at % len(sequence.source)]
    sequence.tokens.append(token_id)
    stops = token_id in sampling.stop_token_ids and at + 1 > sampling.min_tokens
    if stops or at + 1 >= sampling.max_tokens:
        sequence.end = EndInfo(
            finish_reason="stop" if stops else "length",
            stop_token_id=token_id if stops else None,
            num_prompt_tokens=len(sequence.spec.token_ids) // 4,
            num_completion_tokens=at + 1,
            num_steps=sequence.num_steps,
        )


def row_of(sequence: Sequence, offset: int, end: EndInfo | None) -> TokenRow:
    """The row with everything from `offset` on."""
    tokens = sequence.tokens[offset:]
    logprobs = None
    if sequence.spec.sampling.num_logprobs is not None:
        logprobs = tuple(fake_logprob(t, sequence.spec.sampling.num_logprobs) for t in tokens)
    return TokenRow(
        request_id=sequence.spec.request_id,
        choice=sequence.choice,
        attempt=sequence.spec.attempt,
        offset=offset,
        token_ids=b"".join(t.to_bytes(4, "little") for t in tokens),
        logprobs=logprobs,
        end=end,
    )


def fake_logprob(token_id: int, num_top: int) -> TokenLogprob:
    """Made-up values of the right shape."""
    tops = tuple([token_id, *(100 + at for at in range(num_top))][:num_top])
    return TokenLogprob(
        logprob=-0.25, top_ids=tops, top_logprobs=tuple(-0.25 - at for at in range(num_top))
    )


if __name__ == "__main__":
    sys.exit(run(EchoEngine))
