"""The generations in hand: into the engine, out of its steps to their gateways, to their one end."""

from typing import Any

from finback.services.decode.drafts import DraftPump
from finback.services.decode.masks import MaskPump
from finback.services.decode.step_spans import StepSpans
from finback.services.decode.streams import TokenStreams
from finback.services.decode.table import Choice, ChoiceState, Key, Request, RequestTable
from finback.shared.clock import monotonic_s
from finback.shared.drafting.draft_policy import DraftPolicy
from finback.shared.engine.from_wire import refusal, sequence_spec
from finback.shared.engine.output import SequenceOutput, StepOutput
from finback.shared.engine.prefix_hold import PrefixHold
from finback.shared.engine.sequence import Mode, SequenceCounts, TokenIds
from finback.shared.engine.step_clock import StepClock
from finback.shared.engine.worker_host import WorkerHost
from finback.shared.errors import Cancelled, ServingError
from finback.shared.telemetry import tracing
from finback.shared.wire.messages.generate import (
    ChoiceSpec,
    EndInfo,
    GenerationSpec,
    TokenBatch,
    TokenRow,
)


class Generations:
    """Ties the request table to the engine. All methods run on the event loop."""

    def __init__(self, host: WorkerHost) -> None:
        self._host = host
        self.table = RequestTable()
        self.streams = TokenStreams(self._publish, host.epoch)
        policy = DraftPolicy(num_draft_tokens=host.config.draft_tokens)
        self.drafts = DraftPump(host, policy, self._tokens_from, self._parent_of, self._offer_draft)
        self.masks = MaskPump(host, self._completion_from, self._parent_of, self._break)
        self._spans = StepSpans(tracing.record_span)
        self._clock = StepClock()

    # -- in

    async def admit(self, spec: GenerationSpec, prompt: bytes, timeout_s: float) -> Request:
        """Enter a request; an older attempt of it ends first, a void one is refused."""
        older = self.table.get(spec.request_id)
        if older is not None and older.spec.attempt < spec.attempt:
            await self.cancel(spec.request_id, older.spec.attempt, None)
        elif older is not None:
            raise Cancelled("this attempt, or a later one, is known already", reason="fenced")
        if self.table.is_fenced(spec.request_id, spec.attempt):
            raise Cancelled("this attempt was cancelled", reason="fenced")
        now = monotonic_s()
        request = Request(
            spec=spec,
            prompt=prompt,
            parent=tracing.current(),
            heard_s=now,
            deadline_s=now + timeout_s,
        )
        self.table.add(request)
        return request

    def add_first(self, request: Request, mode: Mode, hold: PrefixHold | None = None) -> int:
        """Put the first choice into the engine; returns its cached tokens, raises its refusal.

        `hold`: on its prefix; it is the engine's from now on.
        """
        try:
            return self._add(request, request.spec.choices[0], mode, hold)
        except ServingError:
            self.table.remove(request.request_id)
            raise

    def _add(
        self, request: Request, choice: ChoiceSpec, mode: Mode, hold: PrefixHold | None = None
    ) -> int:
        spec = request.spec
        drafting = self._host.config.drafting
        sequence = sequence_spec(
            spec, choice, request.prompt, mode, drafting=drafting, trace=request.parent
        )
        admission = self._host.engine.add(sequence, hold)
        if not admission.accepted:
            raise refusal(admission)
        request.choices[choice.index].is_in_engine = True
        if spec.grammar is not None:
            self.masks.add(sequence.key, spec.grammar)
        if sequence.drafting:
            self.drafts.add(sequence.key)
        return admission.num_cached_tokens

    def _add_others(self, request: Request) -> None:
        """The first choice's prompt is complete: the others find its full blocks."""
        for spec in request.spec.choices[1:]:
            choice = request.choices[spec.index]
            if choice.is_in_engine or choice.state is not ChoiceState.WAITING:
                continue
            try:
                self._add(request, spec, "full")
            except ServingError as error:
                self.end_with_error(choice, error.code, error.public_message)

    # -- steps

    def on_step(self, output: StepOutput) -> None:
        """Send what a step brought, and ask ahead for what the next ones need."""
        for chunk in output.chunks:
            of_chunk = self.table.get(chunk.key[0], chunk.attempt)
            if of_chunk is not None and chunk.num_tokens > 1:  # one token is a decode step
                self._clock.record_chunk(output, chunk, of_chunk.parent)
        rows: dict[str, list[TokenRow]] = {}
        for row in output.rows:
            request = self.table.get(row.key[0], row.attempt)
            told = None if request is None else self._take(request, row, output)
            if request is not None and told is not None:
                rows.setdefault(request.spec.gateway, []).append(told)
        self.streams.send(output.step, rows)
        self.masks.want(output.want_masks)
        wanted = tuple(key for key, _ in output.want_drafts)
        self.drafts.want(wanted, max(len(output.rows), len(wanted)))

    def _take(self, request: Request, row: SequenceOutput, output: StepOutput) -> TokenRow | None:
        choice = request.choices.get(row.key[1])
        if choice is None or choice.state is ChoiceState.ENDED:
            return None
        num_cached = None
        if choice.state is ChoiceState.WAITING:
            choice.num_cached = num_cached = row.num_cached
            self._first_token(request, choice)
        token_ids = row.token_ids.astype("<i4").tobytes()
        choice.append(row.offset, token_ids, row.logprobs or ())
        self.drafts.step(row.key, row.num_drafted, row.num_accepted)
        self._trace(request, row, output)
        if row.end is not None:
            self._close(choice, row.end)
        return TokenRow(
            request_id=request.request_id,
            choice=choice.index,
            attempt=choice.attempt,
            offset=row.offset,
            token_ids=token_ids,
            logprobs=row.logprobs,
            end=choice.end,
            num_cached_tokens=num_cached,
        )

    def _first_token(self, request: Request, choice: Choice) -> None:
        choice.state = ChoiceState.RUNNING
        if choice.index == request.spec.choices[0].index:
            self._add_others(request)

    def _trace(self, request: Request, row: SequenceOutput, output: StepOutput) -> None:
        self._spans.add(
            row.key,
            request.parent,
            *self._clock.times_ns(output),
            num_rows=output.num_rows,
            num_tokens=len(row.token_ids),
            num_drafted=row.num_drafted,
            num_accepted=row.num_accepted,
        )

    # -- ends

    def _close(self, choice: Choice, end: EndInfo) -> None:
        choice.state = ChoiceState.ENDED
        choice.end = end
        choice.ended_s = monotonic_s()
        self.masks.end(choice.key)
        self.drafts.end(choice.key)
        self._spans.close(choice.key)
        self._host.metrics.count("finback.decode.ends", reason=end.finish_reason)

    def end_with_error(
        self, choice: Choice, code: str, text: str, blamed: str | None = None, reason: str = ""
    ) -> None:
        """End a choice that cannot go on, and tell its gateway.

        `blamed`: the instance that failed, empty if none did; ours if not given.
        """
        request = self.table.get(choice.request_id, choice.attempt)
        if request is None or choice.state is ChoiceState.ENDED:
            return
        self._host.engine.abort(choice.key)
        end = EndInfo(
            finish_reason="error",
            num_prompt_tokens=request.num_prompt_tokens,
            num_completion_tokens=choice.num_tokens,
            error_code=code,
            error_message=text,
            error_instance=self._host.instance if blamed is None else blamed,
            error_reason=reason,
        )
        self._close(choice, end)
        row = choice.row_from(choice.num_tokens)
        self.streams.send(0, {request.spec.gateway: [row]})

    def end_request_with_error(
        self, request: Request, code: str, text: str, blamed: str | None = None, reason: str = ""
    ) -> None:
        """End all choices of a request that are open."""
        for choice in list(request.choices.values()):
            self.end_with_error(choice, code, text, blamed, reason)

    def _break(self, key: Key, code: str, text: str) -> None:
        choice = self.table.choice(key)
        if choice is not None:
            self.end_with_error(choice, code, text, blamed="")

    def finish(self, choice: Choice, num_tokens: int) -> SequenceCounts | None:
        """A stop string ended a choice: its gateway knows, so no end is told."""
        counts = self._host.engine.finish(choice.key, num_tokens)
        if choice.state is not ChoiceState.ENDED:
            self._close(choice, EndInfo(finish_reason="stop", num_completion_tokens=num_tokens))
        return counts

    async def cancel(self, request_id: str, attempt: int, index: int | None) -> bool:
        """Stop a request (or one choice) of an attempt up to this one; returns when it is over."""
        if index is None:
            self.table.fence(request_id, attempt)
        request = self.table.get(request_id)
        if request is None or request.spec.attempt > attempt:
            return False
        for choice in list(request.choices.values()):
            if index is None or choice.index == index:
                await self._cancel_choice(choice)
        if request.is_ended:
            self.forget(request)
        return True

    async def _cancel_choice(self, choice: Choice) -> None:
        if choice.state is not ChoiceState.ENDED:
            self._close(choice, EndInfo(finish_reason="cancelled"))
        if choice.is_in_engine:
            await self._host.engine.abort_and_wait(choice.key)

    def acknowledge(self, request: Request, index: int) -> None:
        """A gateway has all of a choice; the request goes when that is true of all choices."""
        choice = request.choices.get(index)
        if choice is not None and choice.state is ChoiceState.ENDED:
            choice.is_acknowledged = True
        if all(c.is_acknowledged for c in request.choices.values()):
            self.forget(request)

    def forget(self, request: Request) -> None:
        """Nobody will ask for it any more."""
        for choice in request.choices.values():
            self._host.engine.forget(choice.key)
        if self.table.get(request.request_id) is request:
            self.table.remove(request.request_id)

    # -- what the pumps ask

    def _tokens_from(self, key: Key, position: int) -> bytes:
        request = self.table.get(key[0])
        choice = self.table.choice(key)
        if request is None or choice is None:
            return b""
        past_prompt = position - request.num_prompt_tokens
        if past_prompt >= 0:
            return bytes(choice.tokens[past_prompt * 4 :])
        return request.prompt[position * 4 :] + bytes(choice.tokens)

    def _offer_draft(self, key: Key, position: int, token_ids: TokenIds) -> None:
        """To the engine; of a sequence with a grammar to the sampler first, which cuts it."""
        request = self.table.get(key[0])
        if request is None:
            return
        if not self.masks.guess(key, position - request.num_prompt_tokens, token_ids):
            self._host.engine.provide_draft(key, position, token_ids)

    def _completion_from(self, key: Key, position: int) -> bytes:
        choice = self.table.choice(key)
        return b"" if choice is None else bytes(choice.tokens[position * 4 :])

    def _parent_of(self, key: Key) -> Any:
        request = self.table.get(key[0])
        return None if request is None else request.parent

    async def _publish(self, gateway: str, batch: TokenBatch) -> None:
        subject = self._host.subjects.stream(gateway, self._host.instance)
        await self._host.client.publish_bare(subject, batch)
