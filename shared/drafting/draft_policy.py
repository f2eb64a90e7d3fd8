"""Pure: whether a sequence is worth a draft at its next step.

A verified draft costs rows in a step, and asking for one costs a message. Both pay only where
drafts are found and accepted, which depends on the text and changes along it. So each sequence keeps
a moving average of the tokens it gained per drafted step; below a floor it is left alone and probed
at growing intervals, and it comes back as soon as a probe is accepted.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from finback.shared.engine.step_times import StepTime

_MIN_STEPS: Final = 4
_LEAST_GAIN: Final = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPolicy:
    """`gain` is accepted draft tokens per verifying step; the floor is where drafting stops paying.

    `min_gain` holds until the machine's own step times tell better (see `break_even`).

    `max_rows`: drafting stops when the running sequences with their drafts would need more rows in
    one step, because a batch that big is bound by arithmetic and rows are no longer nearly free.
    """

    num_draft_tokens: int = 4
    min_gain: float = 0.35
    weight: float = 0.3
    first_probe_steps: int = 8
    max_probe_steps: int = 64
    max_idle_steps: int = 4
    max_rows: int = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftHistory:
    """What one sequence has seen of drafts. `wait_steps`: steps left until it may ask again."""

    gain: float = 1.0
    wait_steps: int = 0
    probe_steps: int = 0
    num_empty: int = 0


def break_even(times: Iterable[StepTime], num_running: int, num_draft_tokens: int) -> float | None:
    """The gain that pays for a drafted step of all `num_running` sequences; None if not known yet.

    A step with drafts costs `drafted` ms and brings 1 + gain tokens a sequence, one without costs
    `plain` ms and brings one: it pays from drafted / plain - 1 on. Half of the draft is always
    taken as enough, so that a slow moment of the machine does not switch a good drafter off.
    """
    plain_ms = drafted_ms = None
    num_rows = num_running * (1 + num_draft_tokens)
    for row in times:
        if row.num_steps >= _MIN_STEPS and row.low <= num_running <= row.high:
            plain_ms = row.recent_ms
        if row.num_steps >= _MIN_STEPS and row.low <= num_rows <= row.high:
            drafted_ms = row.recent_ms
    if not plain_ms or not drafted_ms:
        return None
    return min(max(drafted_ms / plain_ms - 1.0, _LEAST_GAIN), num_draft_tokens / 2)


def should_ask(policy: DraftPolicy, history: DraftHistory, num_running: int) -> bool:
    """True if a draft is worth asking for now, with `num_running` sequences in the batch."""
    rows = num_running * (1 + policy.num_draft_tokens)
    return history.wait_steps <= 0 and rows <= policy.max_rows


def after_step(history: DraftHistory) -> DraftHistory:
    """Count one step that the sequence took part in."""
    if history.wait_steps <= 0:
        return history
    return replace(history, wait_steps=history.wait_steps - 1)


def after_verify(
    policy: DraftPolicy, history: DraftHistory, num_drafted: int, num_accepted: int
) -> DraftHistory:
    """Learn from a step that verified `num_drafted` tokens and kept `num_accepted` of them."""
    if num_drafted <= 0:
        return history
    gain = (1.0 - policy.weight) * history.gain + policy.weight * num_accepted
    if history.probe_steps and num_accepted:
        return DraftHistory(gain=max(gain, float(num_accepted)))
    if gain >= policy.min_gain:
        return replace(history, gain=gain, num_empty=0)
    wait = min(max(history.probe_steps * 2, policy.first_probe_steps), policy.max_probe_steps)
    return DraftHistory(gain=gain, wait_steps=wait, probe_steps=wait)


def after_empty(policy: DraftPolicy, history: DraftHistory) -> DraftHistory:
    """Learn from an answer without a draft: nothing was lost but a message, so wait a little."""
    num_empty = history.num_empty + 1
    wait = min(num_empty // 4, policy.max_idle_steps)
    return replace(history, num_empty=num_empty, wait_steps=max(history.wait_steps, wait))
