"""What to run, and what became of it. Pure: dataclasses in, plans and outputs out.

The engine calls `plan` (up to one step ahead) and `commit` (in the order of the plans). Everything a
client may see leaves through `commit`: that is where a completion's first stop is found and what ran
past it is dropped.
"""

from collections.abc import Callable
from collections.abc import Sequence as Rows
from typing import Final

import numpy as np

from finback.shared.clock import monotonic_s
from finback.shared.engine import admission
from finback.shared.engine.outcome import Committed, chunk_of, end_info
from finback.shared.engine.output import Admission, PrefillProgress, SequenceOutput
from finback.shared.engine.plan import ItemResult, PlanItem, StepPlan
from finback.shared.engine.planner import StepPlanner
from finback.shared.engine.sequence import (
    Sequence,
    SequenceCounts,
    SequenceKey,
    SequenceSpec,
    State,
    TokenIds,
)
from finback.shared.engine.stopping import Stop, find_stop
from finback.shared.engine.table import SchedulerConfig, SequenceTable
from finback.shared.errors import InvariantViolated
from finback.shared.wire.messages.generate import EndInfo

_GOES_ON: Final = Stop(1)
# After a mask that came too late, the sequence's masks are awaited for so many tokens.
_PATIENT_TOKENS: Final = 16


class Scheduler:
    """Continuous batching over one block pool. `now_s`: a monotonic clock, for what expires."""

    def __init__(self, config: SchedulerConfig, now_s: Callable[[], float] = monotonic_s) -> None:
        self.config = config
        self.table = SequenceTable(config, now_s)
        self._planner = StepPlanner(self.table)
        self._num_arrived = 0
        self._news = Committed()

    # -- sequences come and go

    def add(self, spec: SequenceSpec) -> Admission:
        """Queue a sequence (mode decode: reserve its blocks), or refuse it with a reason."""
        refused = admission.refusal(self.table, spec)
        if refused is not None:
            return refused
        self._num_arrived += 1
        sequence = admission.make_sequence(self.config, spec, self._num_arrived)
        if spec.mode == "decode":
            if not self.table.take_blocks(sequence, sequence.num_tokens):
                return admission.refuse("no_blocks", "no KV blocks are free for this prompt now")
            sequence.state = State.RESERVED
            num_cached = sequence.num_computed
        else:
            num_cached = self.table.num_cached(sequence)
            self.table.enqueue(sequence)
        older = self.table.by_key.get(spec.key)
        if older is not None:
            self.table.end(older)
        self.table.ended.pop(spec.key, None)
        self.table.by_key[spec.key] = sequence
        if spec.has_grammar and spec.mode == "full":
            self._news.want_masks.append((spec.key, sequence.num_completion))
        return Admission(accepted=True, num_cached_tokens=num_cached)

    def activate(
        self, key: SequenceKey, num_computed_tokens: int, num_cached_tokens: int | None = None
    ) -> bool:
        """A reserved sequence has the KV of its first tokens; from now on it is queued."""
        sequence = self.table.by_key.get(key)
        if sequence is None or sequence.state is not State.RESERVED:
            return False
        known = min(num_computed_tokens, sequence.num_tokens - 1)
        self.table.take_over(sequence, known)
        if num_cached_tokens is not None:
            sequence.num_cached = max(sequence.num_cached, num_cached_tokens)
        self.table.enqueue(sequence)
        if sequence.spec.has_grammar:
            self._news.want_masks.append((key, sequence.num_completion))
        return True

    def abort(self, key: SequenceKey) -> Sequence | None:
        """End a live sequence silently; None if it is not known."""
        sequence = self.table.by_key.get(key)
        if sequence is not None:
            self.table.end(sequence)
        return sequence

    def finish(self, key: SequenceKey, num_tokens: int) -> SequenceCounts | None:
        """End a choice with its first `num_tokens` completion tokens; also one that has ended."""
        sequence = self.table.by_key.get(key)
        if sequence is not None:
            self.table.forget_past(sequence, sequence.num_prompt + num_tokens)
            self.table.end(sequence, sequence.num_prompt + num_tokens)
            return sequence.counts(min(num_tokens, sequence.num_completion))
        record = self.table.ended.pop(key, None)
        if record is None:
            return None
        counts = record.counts
        return SequenceCounts(
            num_prompt_tokens=counts.num_prompt_tokens,
            num_cached_tokens=counts.num_cached_tokens,
            num_completion_tokens=min(num_tokens, counts.num_completion_tokens),
            num_draft_tokens=counts.num_draft_tokens,
            num_accepted_tokens=counts.num_accepted_tokens,
            num_steps=counts.num_steps,
        )

    def release(self, key: SequenceKey) -> None:
        """Mode prefill: its blocks are no longer needed (they stay findable as prefixes)."""
        sequence = self.table.by_key.get(key)
        if sequence is not None and sequence.spec.mode == "prefill":
            self.table.end(sequence)

    def grant(self, key: SequenceKey, up_to_offset: int) -> bool:
        """Raise the completion length up to which a sequence may run."""
        sequence = self.table.by_key.get(key)
        if sequence is None or up_to_offset <= sequence.credit:
            return False
        sequence.credit = up_to_offset
        return True

    def provide_mask(self, key: SequenceKey, position: int, bitmask: bytes) -> Sequence | None:
        """Keep the mask of the next completion index; None for another index: it is stale."""
        sequence = self.table.by_key.get(key)
        if sequence is None or position != sequence.num_completion:
            return None
        sequence.mask = (position, bitmask)
        return sequence

    def tokens(self, key: SequenceKey) -> TokenIds | None:
        """The committed completion of a live or remembered choice."""
        sequence = self.table.by_key.get(key)
        if sequence is not None:
            return sequence.tokens[sequence.num_prompt : sequence.num_tokens].copy()
        record = self.table.ended.get(key)
        return None if record is None else record.token_ids

    # -- steps

    def plan(self, max_chunk_rows: int | None = None) -> StepPlan | None:
        """The next step, or None when nothing can run now; see `StepPlanner.plan`."""
        plan = self._planner.plan(max_chunk_rows)
        for sequence in self._planner.held:
            self._report_progress(self._news, sequence)
        self._planner.held.clear()
        return plan

    def take_news(self) -> Committed:
        """What happened outside of a step since the last call."""
        news, self._news = self._news, Committed()
        return news

    def commit(self, plan: StepPlan, results: Rows[ItemResult]) -> Committed:
        """Take the results of the oldest uncommitted plan."""
        if len(results) != len(plan.items):
            raise InvariantViolated(f"step {plan.step} has {len(results)} results")
        out = Committed()
        for item, result in zip(plan.items, results, strict=True):
            sequence = item.sequence
            sequence.land()
            if result.is_late:
                sequence.num_patient = _PATIENT_TOKENS
            if item.arrival is not None and sequence.arriving is not None:
                self.table.holds.settle(sequence.arriving)
                sequence.arriving = None
            if sequence.state is State.ENDED:
                self.table.retire(sequence)
            elif result.is_void:
                self.table.begin_again(sequence)
            elif result.error:
                self.table.pool.unregister(sequence.block_ids)
                sequence.last_state = None
                self._end(out, sequence, end_info(sequence, "error", error=result.error))
            else:
                self._commit_item(out, item, result)
        return out

    def _commit_item(self, out: Committed, item: PlanItem, result: ItemResult) -> None:
        sequence = item.sequence
        is_current = sequence.incarnation == item.incarnation and sequence.state is State.RUNNING
        if is_current:
            if item.is_chunk:
                out.chunks.append(chunk_of(sequence, item.num_rows))
            sequence.num_computed += result.num_computed
            if result.states:
                self._take_states(sequence, item, result)
        if sequence.spec.mode == "prefill":
            self.table.register_blocks(sequence)
            if sequence.num_computed >= sequence.target:
                self.table.leave_slot(sequence)
                sequence.state = State.HELD
            self._report_progress(out, sequence)
            return
        if result.token_ids:
            self._commit_tokens(out, sequence, result, is_current=is_current)
        elif is_current:
            self.table.register_blocks(sequence)

    def _take_states(self, sequence: Sequence, item: PlanItem, result: ItemResult) -> None:
        """A prompt's snapshot serves others at once; that of an answer when it ends."""
        sequence.last_state = result.states[-1]
        if item.is_chunk:
            self.table.keep_state(sequence, sequence.num_tokens)

    def _commit_tokens(
        self, out: Committed, sequence: Sequence, result: ItemResult, *, is_current: bool
    ) -> None:
        offset = sequence.num_completion
        sampling = sequence.spec.sampling
        kept = result.token_ids
        stop = _GOES_ON
        # One token that ends nothing is what nearly every commit brings.
        if (
            len(kept) > 1
            or kept[0] in sequence.stops
            or sequence.num_tokens + 1 >= sequence.max_total
        ):
            stop = find_stop(
                kept,
                num_completion=offset,
                max_completion=sequence.max_total - sequence.num_prompt,
                min_tokens=sampling.min_tokens,
                stops=sequence.stops,
            )
            kept = kept[: stop.num_kept]
        end = sequence.num_tokens + stop.num_kept
        sequence.tokens[sequence.num_tokens : end] = kept
        sequence.num_tokens = end
        sequence.num_steps += 1
        sequence.num_patient = max(0, sequence.num_patient - len(kept))
        sequence.num_drafted += result.num_drafted
        sequence.num_accepted += stop.num_kept - 1
        if is_current:
            self.table.register_blocks(sequence)
        row = SequenceOutput(
            key=sequence.spec.key,
            attempt=sequence.spec.attempt,
            offset=offset,
            token_ids=sequence.tokens[end - len(kept) : end].copy(),
            logprobs=None if result.logprobs is None else result.logprobs[: stop.num_kept],
            end=None
            if stop.reason is None
            else end_info(sequence, stop.reason, stop.stop_token_id),
            num_drafted=result.num_drafted,
            num_accepted=stop.num_kept - 1,
            num_cached=sequence.num_cached_prompt,
        )
        out.rows.append(row)
        if row.end is not None:
            self.table.remember(sequence)
            self.table.end(sequence)
            return
        if sequence.spec.has_grammar:
            out.want_masks.append((sequence.spec.key, sequence.num_completion))
        if sequence.spec.drafting and self.config.max_draft_tokens:
            out.want_drafts.append((sequence.spec.key, sequence.num_tokens))

    def _end(self, out: Committed, sequence: Sequence, end: EndInfo) -> None:
        out.rows.append(
            SequenceOutput(
                key=sequence.spec.key,
                attempt=sequence.spec.attempt,
                offset=sequence.num_completion,
                token_ids=np.empty(0, dtype=np.int32),
                end=end,
            )
        )
        self.table.remember(sequence)
        self.table.end(sequence)

    def _report_progress(self, out: Committed, sequence: Sequence) -> None:
        is_last = sequence.state is State.HELD
        if sequence.num_computed > sequence.num_reported or is_last:
            sequence.num_reported = sequence.num_computed
            out.prefilled.append(
                PrefillProgress(
                    key=sequence.spec.key,
                    attempt=sequence.spec.attempt,
                    num_computed_tokens=sequence.num_computed,
                    is_last=is_last,
                )
            )
