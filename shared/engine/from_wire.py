"""From a generation on the wire to a sequence of the engine."""

from typing import Any

import numpy as np

from finback.shared.engine.output import Admission
from finback.shared.engine.sequence import Mode, SequenceSpec, TokenIds
from finback.shared.errors import InvalidRequest, Overloaded, ServingError, Unavailable
from finback.shared.kv.cache_client import StoreTerms
from finback.shared.wire.messages.generate import ChoiceSpec, GenerationSpec

_RETRY_AFTER_S = 1.0


def sequence_spec(
    spec: GenerationSpec,
    choice: ChoiceSpec,
    token_ids: bytes,
    mode: Mode,
    *,
    drafting: bool,
    trace: Any = None,
) -> SequenceSpec:
    """One choice of `spec` as the engine takes it; `token_ids` is the whole prompt, int32 LE.

    `trace`: the context of the request's spans.
    """
    _check_ids(choice, token_ids)
    return SequenceSpec(
        key=(spec.request_id, choice.index),
        attempt=spec.attempt,
        token_ids=np.frombuffer(token_ids, dtype="<i4").astype(np.int32),
        completion=np.frombuffer(choice.token_ids, dtype="<i4").astype(np.int32),
        sampling=spec.sampling,
        seed=choice.seed,
        mode=mode,
        has_grammar=spec.grammar is not None,
        # A constrained sequence needs a mask a token, which a drafted step cannot have.
        drafting=drafting and spec.drafting and spec.grammar is None,
        credit_tokens=spec.credit_tokens,
        cache_salt=spec.cache_salt.encode(),
        tenant=spec.tenant,
        traffic_class=spec.traffic_class,
        retention_s=spec.retention_s,
        trace=trace,
    )


def _check_ids(choice: ChoiceSpec, token_ids: bytes) -> None:
    if len(token_ids) % 4 or not token_ids:
        raise InvalidRequest("token_ids must be a prompt of int32 ids", param="token_ids")
    if len(choice.token_ids) % 4:
        raise InvalidRequest("a choice's token_ids must be int32 ids", param="choices")


def known_tokens(choice: ChoiceSpec, token_ids: bytes) -> TokenIds:
    """The prompt, and what there is of the choice already: what its blocks are named by."""
    _check_ids(choice, token_ids)
    return np.frombuffer(token_ids + choice.token_ids, dtype="<i4").astype(np.int32)


def store_terms(spec: GenerationSpec) -> StoreTerms:
    """For whom a generation's blocks are kept."""
    return StoreTerms(
        request_id=spec.request_id,
        attempt=spec.attempt,
        tenant=spec.tenant,
        traffic_class=spec.traffic_class,
        retention_s=spec.retention_s,
    )


def num_known_tokens(spec: GenerationSpec, token_ids: bytes) -> int:
    """Tokens that a hand-over covers, but for the last: the prompt and what choice 0 has of it."""
    return (len(token_ids) + len(spec.choices[0].token_ids)) // 4


def refusal(admission: Admission) -> ServingError:
    """Why the engine did not take a sequence, as the error that its sender gets."""
    text = admission.message or f"the engine refused: {admission.reason}"
    if admission.reason in ("queue_full", "no_blocks"):
        return Overloaded(text, reason=admission.reason, retry_after_s=_RETRY_AFTER_S)
    if admission.reason in ("too_long", "empty", "bad_token"):
        return InvalidRequest(text, param="messages", reason=admission.reason)
    return Unavailable(text, reason=admission.reason)
