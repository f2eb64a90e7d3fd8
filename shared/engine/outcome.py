"""What commits bring, and how sequences are described to their owner. Pure."""

from dataclasses import dataclass, field

from finback.shared.engine.output import PrefillProgress, PromptChunk, SequenceOutput, StepOutput
from finback.shared.engine.plan import StepResult
from finback.shared.engine.sequence import Sequence, SequenceKey
from finback.shared.errors import InvariantViolated
from finback.shared.wire.messages.generate import EndInfo


@dataclass(slots=True)
class Committed:
    """What a retired step brought (the scheduler's part of a `StepOutput`)."""

    rows: list[SequenceOutput] = field(default_factory=list)
    prefilled: list[PrefillProgress] = field(default_factory=list)
    chunks: list[PromptChunk] = field(default_factory=list)
    want_masks: list[tuple[SequenceKey, int]] = field(default_factory=list)
    want_drafts: list[tuple[SequenceKey, int]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.rows or self.prefilled or self.want_masks or self.want_drafts)


def chunk_of(sequence: Sequence, num_tokens: int) -> PromptChunk:
    return PromptChunk(
        key=sequence.spec.key,
        attempt=sequence.spec.attempt,
        start=sequence.num_computed,
        num_tokens=num_tokens,
    )


def end_info(
    sequence: Sequence, reason: str, stop_token_id: int | None = None, error: str = ""
) -> EndInfo:
    return EndInfo(
        finish_reason=reason,
        stop_token_id=stop_token_id,
        num_prompt_tokens=sequence.num_prompt,
        num_cached_tokens=sequence.num_cached_prompt,
        num_completion_tokens=sequence.num_completion,
        num_draft_tokens=sequence.num_drafted,
        num_accepted_tokens=sequence.num_accepted,
        num_steps=sequence.num_steps,
        error_code=InvariantViolated.code if error else "",
        error_message=error,
    )


def step_output(committed: Committed, step: int, result: StepResult | None = None) -> StepOutput:
    """The output of a retired step; without a result, what happened outside of one."""
    return StepOutput(
        step=step,
        rows=tuple(committed.rows),
        prefilled=tuple(committed.prefilled),
        chunks=tuple(committed.chunks),
        want_masks=tuple(committed.want_masks),
        want_drafts=tuple(committed.want_drafts),
        num_rows=result.num_rows if result else 0,
        started_s=result.started_s if result else 0.0,
        duration_ms=result.duration_ms if result else 0.0,
    )
