"""From a generation on the wire to a sequence of the engine."""

import numpy as np

from finback.shared.engine.output import Admission
from finback.shared.engine.sequence import Mode, SequenceSpec
from finback.shared.errors import InvalidRequest, Overloaded, ServingError, Unavailable
from finback.shared.wire.messages.generate import ChoiceSpec, GenerationSpec

_RETRY_AFTER_S = 1.0


def sequence_spec(
    spec: GenerationSpec, choice: ChoiceSpec, token_ids: bytes, mode: Mode, *, drafting: bool
) -> SequenceSpec:
    """One choice of `spec` as the engine takes it; `token_ids` is the whole prompt, int32 LE."""
    if len(token_ids) % 4 or not token_ids:
        raise InvalidRequest("token_ids must be a prompt of int32 ids", param="token_ids")
    return SequenceSpec(
        key=(spec.request_id, choice.index),
        attempt=spec.attempt,
        token_ids=np.frombuffer(token_ids, dtype="<i4").astype(np.int32),
        sampling=spec.sampling,
        seed=choice.seed,
        mode=mode,
        has_grammar=spec.grammar is not None,
        # A constrained sequence needs a mask a token, which a drafted step cannot have.
        drafting=drafting and spec.drafting and spec.grammar is None,
        credit_tokens=spec.credit_tokens,
        cache_salt=spec.cache_salt.encode(),
    )


def refusal(admission: Admission) -> ServingError:
    """Why the engine did not take a sequence, as the error that its sender gets."""
    text = admission.message or f"the engine refused: {admission.reason}"
    if admission.reason in ("queue_full", "no_blocks"):
        return Overloaded(text, reason=admission.reason, retry_after_s=_RETRY_AFTER_S)
    if admission.reason in ("too_long", "empty", "bad_token"):
        return InvalidRequest(text, param="messages", reason=admission.reason)
    return Unavailable(text, reason=admission.reason)
