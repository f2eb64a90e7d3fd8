"""What the offline API gives back. Torch-free."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """At one position: the chosen token's logprob, and by id those of the likeliest."""

    logprob: float
    top: Mapping[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The answer to prompt `index` of a call.

    `token_ids`: up to the token that completes a stop string, or with the stop token that ended it;
    neither is in `text`. `finish_reason`: `stop`, or `length` for max_tokens or the context's end.
    `stop_reason`: the stop string, or the caller's own stop token, if one ended it. `logprobs`: one
    entry a token, None unless asked for. `num_cached_tokens`: leading prompt tokens whose KV was
    reused. Drafted tokens were guessed, accepted ones guessed rightly.
    """

    index: int
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    num_cached_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionChunk:
    """What is new in the answer to prompt `index`; `finish_reason` set: it is the last chunk.

    Text may come later than its tokens: a character waits until it is whole, and what could be the
    beginning of a stop string until that is decided.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LLMStats:
    """Counts since the start; tokens are those of answers that have ended.

    `device_busy_s`: time in which a step ran. `kv_bytes`: the whole pool of `num_kv_blocks`, of
    which `num_free_kv_blocks` are held by no sequence (they may still serve prefix hits).
    """

    num_steps: int
    num_preemptions: int
    num_completions: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_completion_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    device_busy_s: float
    weights_bytes: int
    kv_bytes: int
    num_kv_blocks: int
    num_free_kv_blocks: int
