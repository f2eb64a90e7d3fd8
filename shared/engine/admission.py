"""Who may enter, and as what. Pure."""

import numpy as np

from finback.shared.engine.output import Admission
from finback.shared.engine.sequence import Sequence, SequenceSpec
from finback.shared.engine.stopping import stop_ids
from finback.shared.engine.table import SchedulerConfig, SequenceTable
from finback.shared.kv import block_hash


def refusal(table: SequenceTable, spec: SequenceSpec) -> Admission | None:
    """Why this sequence cannot be taken, or None."""
    config = table.config
    if spec.token_ids.size == 0:
        return refuse("empty", "the prompt has no tokens")
    if spec.token_ids.size >= config.max_model_len:
        return refuse(
            "too_long",
            f"the prompt has {spec.token_ids.size} tokens, which leaves no room for an answer "
            f"in a context of {config.max_model_len}",
        )
    for ids in (spec.token_ids, spec.completion):
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < config.vocab_size:
            return refuse("bad_token", f"a token id is outside of [0, {config.vocab_size})")
    room = min(spec.sampling.max_tokens, config.max_model_len - spec.token_ids.size)
    if spec.completion.size >= room:
        # Where it was begun there was room for more, or it would have ended there.
        return refuse("no_room", f"the answer has {spec.completion.size} tokens of {room} already")
    known = table.by_key.get(spec.key)
    record = table.ended.get(spec.key)
    attempt = known.spec.attempt if known else record.attempt if record else 0
    if attempt >= spec.attempt:
        return refuse("duplicate", f"attempt {attempt} of this choice is known here")
    if spec.mode != "decode" and len(table.waiting) >= config.max_queue:
        return refuse("queue_full", f"{config.max_queue} sequences are waiting")
    return None


def make_sequence(config: SchedulerConfig, spec: SequenceSpec, arrival: int) -> Sequence:
    """The state of a new sequence."""
    num_prompt = int(spec.token_ids.size)
    num_tokens = num_prompt + int(spec.completion.size)
    max_total = num_tokens
    if spec.mode != "prefill":
        max_total = min(num_prompt + spec.sampling.max_tokens, config.max_model_len)
    tokens = np.empty(max_total, dtype=np.int32)
    tokens[:num_prompt] = spec.token_ids
    tokens[num_prompt:num_tokens] = spec.completion
    return Sequence(
        spec=spec,
        order=(spec.priority, arrival),
        tokens=tokens,
        num_prompt=num_prompt,
        num_tokens=num_tokens,
        max_total=max_total,
        root_hash=block_hash.prompt_root(config.cache_key, spec.cache_salt, config.block_size),
        credit=spec.completion.size + spec.credit_tokens,
        stops=stop_ids(spec.sampling, config.eos_token_ids),
    )


def refuse(reason: str, message: str) -> Admission:
    """A refusal as a value."""
    return Admission(accepted=False, reason=reason, message=message)
