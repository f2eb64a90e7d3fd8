"""One request and its answer, from a body to a sink: the same for HTTP and NATS, whole or streamed."""

import asyncio
import itertools
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

from opentelemetry import trace

from finback.services.gateway.accounts import Accounts, Bill
from finback.services.gateway.answer import Answer
from finback.services.gateway.answer_events import Usage
from finback.services.gateway.caller import Caller
from finback.services.gateway.desk import Desk
from finback.services.gateway.generation import Generation
from finback.services.gateway.grammar_verdict import WIDENED_HEADER, refusal, widened_header
from finback.services.gateway.lifecycle import Lifecycle
from finback.services.gateway.openai_format import to_json
from finback.services.gateway.served_model import ServedModel
from finback.services.gateway.sink import Sink
from finback.services.gateway.work import Work
from finback.shared.actor.deadline import Deadline
from finback.shared.config import StackConfig
from finback.shared.errors import InvalidRequest, Overloaded, ServingError, Unavailable
from finback.shared.kv.cache_salt import cache_salt_of
from finback.shared.telemetry import metrics as metric_names
from finback.shared.telemetry import tracing
from finback.shared.wire.messages.generate import GenerationSpec, GrammarSpec, SamplingSpec
from finback.shared.wire.messages.sampler import CompileReply, CompileRequest

COMPILE_TIMEOUT_S: Final = 15.0
COMPILE_WAIT_S: Final = 10.0
RETRY_PAUSE_S: Final = 0.1
CREDIT_TOKENS: Final = 1024
PACE_PER_STREAM_S: Final = 0.0005
# Shorter than the time between two tokens of most streams, so that the next one finds it over.
MAX_PACE_S: Final = 0.01
MakeWork = Callable[[], Awaitable[Work]]


class Exchange:
    """Answers requests. Bounded: above `max_open` requests at once the rest is refused."""

    def __init__(
        self,
        *,
        model: ServedModel,
        desk: Desk,
        lifecycle: Lifecycle,
        accounts: Accounts,
        config: StackConfig,
        max_open: int,
    ) -> None:
        self.model = model
        self.num_open = 0
        self.is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._desk = desk
        self._lifecycle = lifecycle
        self._accounts = accounts
        self.keep_alive_s = config.keep_alive_s
        self._config = config
        self._max_open = max_open
        # Engines tell attempts of a generation apart by its id: no other one may ever have the same,
        # be it of a gateway that died, of another that runs, or of a client that asks twice.
        self._mark = secrets.token_hex(4)
        self._numbers = itertools.count(1)

    async def serve(
        self, endpoint: str, make_work: MakeWork, caller: Caller, sink: Sink, *, asked_model: str
    ) -> None:
        """Answer one generation of any API.

        Raises `ServingError` as long as nothing was sent; afterwards errors go in the stream.
        """
        with self.opened():
            trace.get_current_span().set_attribute("gen_ai.request.model", asked_model)
            caller.grant.check_model(asked_model, self.model.name)
            async with self._accounts.bill(caller) as bill:
                bill.check_early()
                run = _Run(self, endpoint, caller, sink, bill)
                with tracing.span("gateway encode"):
                    work = await make_work()
                _check_ends(work)
                await bill.admit(work)
                grammar = await self.compile(work.grammar, work.grammar_param, caller)
                bill.generations = self._generations(work, grammar, caller, run.notify)
                await run.answer(work, bill.generations)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """One of the requests that are open at once; one too many is refused."""
        self._admit()
        self.num_open += 1
        self._idle.clear()
        self._desk.metrics.gauge("finback.gateway.open_requests", self.num_open)
        try:
            yield
        finally:
            self.num_open -= 1
            self._desk.metrics.gauge("finback.gateway.open_requests", self.num_open)
            if not self.num_open:
                self._idle.set()

    async def wait_idle(self) -> None:
        """Return when no request is open."""
        await self._idle.wait()

    def _admit(self) -> None:
        if self.is_draining:
            raise Unavailable("the gateway is stopping", reason="draining", retry_after_s=1.0)
        if self.num_open >= self._max_open:
            raise Overloaded(
                f"{self.num_open} requests are open already; try again in a moment",
                reason="rate_limit_exceeded",
                retry_after_s=1.0,
            )

    async def compile(
        self, grammar: GrammarSpec | None, param: str, caller: Caller
    ) -> GrammarSpec | None:
        """Have the sampler check and keep a grammar; a sampler that restarts is waited for.

        `param`: the field that is to blame for one that it cannot enforce.
        """
        if grammar is None:
            return None
        waiting = Deadline.after(COMPILE_WAIT_S)
        while True:
            try:
                reply = await self._desk.client.call(
                    self._desk.subjects.service("sampler", "compile"),
                    CompileRequest(
                        model=self.model.name, grammar=grammar, vocab_size=self.model.vocab_size
                    ),
                    CompileReply,
                    timeout_s=COMPILE_TIMEOUT_S,
                    request_id=caller.request_id,
                )
            except InvalidRequest as error:
                raise refusal(error, grammar, param) from error
            except Unavailable as error:
                if waiting.is_expired:
                    raise Unavailable(
                        "no sampler can check the grammar", reason="no_sampler", retry_after_s=1.0
                    ) from error
                await asyncio.sleep(RETRY_PAUSE_S)
            else:
                _tell(reply, grammar, caller)
                return replace(grammar, grammar_id=reply.grammar_id)

    def _generations(
        self, work: Work, grammar: GrammarSpec | None, caller: Caller, notify: asyncio.Event
    ) -> list[Generation]:
        deadline = Deadline.after(self._config.request_timeout_s)
        samplings = work.samplings
        if grammar is not None:
            # The caller's stop tokens count only where the grammar may end: see `guarded_choice`.
            own = self.own_stop_ids(work)
            samplings = tuple(_without(sampling, own) for sampling in samplings)
        return [
            Generation(
                GenerationSpec(
                    request_id=f"{caller.request_id}~{self._mark}.{next(self._numbers)}",
                    attempt=1,
                    model=self.model.name,
                    token_ids=prompt.token_ids,
                    sampling=sampling,
                    choices=work.choices,
                    gateway=self._desk.instance,
                    tenant=caller.tenant,
                    traffic_class=work.caching.traffic_class or caller.grant.traffic_class,
                    grammar=grammar,
                    credit_tokens=CREDIT_TOKENS,
                    # What one tenant has sent must not make another's answer come sooner.
                    cache_salt=cache_salt_of(caller.tenant, work.caching.cache_salt),
                    retention_s=work.caching.retention_s,
                    session=work.caching.session,
                    drafting=self._config.drafting,
                ),
                block_hashes=prompt.block_hashes,
                deadline=deadline,
                notify=notify,
                is_eager=work.is_stream or bool(work.stops) or samplings != work.samplings,
            )
            for prompt, sampling in zip(work.prompts, samplings, strict=True)
        ]

    def own_stop_ids(self, work: Work) -> frozenset[int]:
        """Stop tokens that are the caller's own, and not the model's ends."""
        asked = {token_id for sampling in work.samplings for token_id in sampling.stop_token_ids}
        return frozenset(asked - set(self.model.tokenizer.eos_ids))

    def pace_s(self) -> float:
        """How long a stream gathers tokens before it writes: nothing with few streams open.

        A write costs the same for one token as for ten, so that with many streams the gateway
        would spend most of its time on writes that nobody can tell apart.
        """
        return min(MAX_PACE_S, self.num_open * PACE_PER_STREAM_S) if self.num_open > 8 else 0.0

    @property
    def desk(self) -> Desk:
        return self._desk

    @property
    def lifecycle(self) -> Lifecycle:
        return self._lifecycle


def _tell(reply: CompileReply, grammar: GrammarSpec, caller: Caller) -> None:
    """What is not enforced is told in the answer's head, and in the trace."""
    tracing.annotate(**{"finback.grammar.kind": grammar.kind})
    if reply.widened:
        told = widened_header(reply.widened)
        caller.headers[WIDENED_HEADER] = told
        tracing.annotate(**{"finback.grammar.widened": told})


def _check_ends(work: Work) -> None:
    """An answer that is kept to a grammar ends where the grammar does: nothing may forbid that."""
    if work.grammar is None:
        return
    for sampling in work.samplings:
        name = "ignore_eos" if sampling.ignore_eos else "min_tokens"
        if sampling.ignore_eos or sampling.min_tokens:
            raise InvalidRequest(
                f"{name} cannot be used here: the answer is kept to {work.grammar_param or 'a format'}"
                " and ends where that does",
                param=name,
            )


def _without(sampling: SamplingSpec, own: frozenset[int]) -> SamplingSpec:
    left = tuple(token_id for token_id in sampling.stop_token_ids if token_id not in own)
    return replace(sampling, stop_token_ids=left)


class _Run:
    """The answer of one request on its way to its sink, with its times."""

    def __init__(
        self, exchange: Exchange, endpoint: str, caller: Caller, sink: Sink, bill: Bill
    ) -> None:
        self.notify = asyncio.Event()
        self._exchange = exchange
        self._endpoint = endpoint
        self._caller = caller
        self._sink = sink
        self._bill = bill
        self._begun_ns = time.time_ns()
        self._first_ns = 0

    async def answer(self, work: Work, generations: Sequence[Generation]) -> None:
        """Run the generations and send what they say; leaving early cancels them."""
        answer = Answer(
            generations,
            self._exchange.desk,
            self._exchange.model.tokenizer,
            stops=work.stops,
            notify=self.notify,
            output=work.output,
            has_token_ids=work.has_token_ids,
            own_stop_ids=self._exchange.own_stop_ids(work),
        )
        lifecycle = self._exchange.lifecycle
        tasks = [asyncio.create_task(lifecycle.run(generation)) for generation in generations]
        try:
            if work.is_stream:
                await self._stream(work, answer)
            else:
                await self._whole(work, answer)
        finally:
            for task in tasks:
                task.cancel()
            # Their own clean-up (cancels, reports) must be through; a bug in them is raised.
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def _whole(self, work: Work, answer: Answer) -> None:
        async for events in answer.events(self._exchange.keep_alive_s, self._exchange.pace_s):
            if events:
                self._note_first(answer)
                work.protocol.add(events)
        usage = await answer.usage()
        self._report(answer, usage)
        await self._sink.reply(200, to_json(work.protocol.body(usage)))

    async def _stream(self, work: Work, answer: Answer) -> None:
        sink, is_open = self._sink, False
        try:
            async for events in answer.events(self._exchange.keep_alive_s, self._exchange.pace_s):
                if not is_open:
                    is_open = True
                    await sink.open_stream()
                    if opening := work.protocol.opening():
                        await sink.send(opening)
                if not events:
                    ping = work.protocol.ping()
                    await (sink.keep_alive() if ping is None else sink.send([ping]))
                    continue
                self._note_first(answer)
                documents = work.protocol.chunks(events)
                await sink.send(documents)
        except ServingError as error:
            if not is_open:
                raise
            await sink.send(work.protocol.failure(error))
            await sink.close_stream("error")
            self._exchange.desk.metrics.count("finback.gateway.stream_errors", code=error.code)
            return
        usage = await answer.usage()
        self._report(answer, usage)
        last = work.protocol.last_chunks(usage)
        if last:
            await sink.send(last)
        await sink.close_stream("end")

    def _note_first(self, answer: Answer) -> None:
        """Once: when the first token came, which a whole answer shows only at its end."""
        if self._first_ns:
            return
        self._first_ns = min(g.first_row_ns or time.time_ns() for g in answer.generations)
        ttft_s = (self._first_ns - self._begun_ns) / 1e9
        self._exchange.desk.metrics.observe(metric_names.TIME_TO_FIRST_TOKEN, ttft_s)
        span = trace.get_current_span()
        span.set_attribute("gen_ai.response.time_to_first_token", ttft_s)

    def _report(self, answer: Answer, usage: Usage) -> None:
        """Metrics and the tenant's bill add up to the usage that clients are told."""
        self._bill.settle(usage)
        metrics = self._exchange.desk.metrics
        total_s = (time.time_ns() - self._begun_ns) / 1e9
        metrics.observe(metric_names.REQUEST_DURATION, total_s)
        for name, count in (
            ("prompt", usage.num_prompt_tokens),
            ("completion", usage.num_completion_tokens),
            ("cached", usage.num_cached_tokens),
            ("draft", usage.num_draft_tokens),
            ("accepted", usage.num_accepted_tokens),
        ):
            metrics.count("finback.gateway.tokens", count, kind=name)
        if usage.num_completion_tokens > 1 and self._first_ns:
            decode_s = (time.time_ns() - self._first_ns) / 1e9
            per_token_s = decode_s / (usage.num_completion_tokens - 1)
            metrics.observe(metric_names.TIME_PER_OUTPUT_TOKEN, per_token_s)
        span = trace.get_current_span()
        span.set_attribute("gen_ai.usage.input_tokens", usage.num_prompt_tokens)
        span.set_attribute("gen_ai.usage.output_tokens", usage.num_completion_tokens)
        span.set_attribute("finback.num_cached_tokens", usage.num_cached_tokens)
        span.set_attribute("finback.num_draft_tokens", usage.num_draft_tokens)
        span.set_attribute("finback.num_accepted_tokens", usage.num_accepted_tokens)
        if self._first_ns:
            attributes: dict[str, Any] = {
                "finback.num_tokens": usage.num_completion_tokens,
                "finback.num_events": answer.num_events,
                "finback.busy_us": answer.busy_ns // 1000,
            }
            tracing.record_span(
                "gateway detokenise", self._first_ns, time.time_ns(), tracing.current(), attributes
            )
