"""The settings of one engine, checked once."""

from dataclasses import dataclass
from typing import Literal

from finback.shared.kv.state_policy import DEFAULT_BOUNDED_TOKENS, ReplayMode
from finback.shared.kv.state_snapshots import STATE_LIFE_S

NumericsMode = Literal["fast", "deterministic", "reference"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Sizes and limits; 0 means "choose" where it says so.

    `num_blocks`: KV blocks of `block_size` tokens; 0 = from `kv_pool_bytes`, and when that is 0 too
    from free memory. `max_model_len`: 0 = the model's; cut to what the pool holds, so that a lone
    sequence always fits. `max_num_batched_tokens`: rows of one step. `max_draft_tokens`: most drafts
    verified at once; `max_span_tokens`: the same of sequences with a grammar, which forces tokens by
    itself. `num_threads`: 0 = the cores of this control group. `overlap_below_ms`: plan
    the next step while one runs only if that one is expected to be shorter than this (a long step
    hides nothing, and a request that arrives meanwhile would wait for two); 0 = never.
    `max_stall_ms`: beside sequences that decode, a step takes no more rows of prompts than are expected
    to be computed in so long; 0 = as many as fit.

    Of models with state slots: `state_replay` says what happens when state is lost while block KV is
    there (`state_policy`); `bounded` computes at most `state_replay_tokens` again. `state_snapshot_bytes`:
    memory for snapshots, each of which lives `state_life_s`.
    """

    num_blocks: int = 0
    kv_pool_bytes: int = 0
    block_size: int = 64
    kv_dtype: str = "auto"
    max_model_len: int = 0
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_queue: int = 256
    max_draft_tokens: int = 4
    max_span_tokens: int = 8
    eos_token_ids: tuple[int, ...] = ()
    mode: NumericsMode = "fast"
    device: str = "cpu"
    num_threads: int = 0
    overlap_below_ms: float = 50.0
    max_stall_ms: float = 0.0
    prefix_caching: bool = True
    cache_key: bytes = b""
    weights_digest: str = ""
    state_replay: ReplayMode = "exact"
    state_replay_tokens: int = DEFAULT_BOUNDED_TOKENS
    state_snapshot_bytes: int = 64 << 20
    state_life_s: float = STATE_LIFE_S

    def __post_init__(self) -> None:
        for name in (
            "block_size",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_queue",
            "state_replay_tokens",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
        for name in (
            "num_blocks",
            "kv_pool_bytes",
            "max_model_len",
            "max_draft_tokens",
            "max_span_tokens",
            "state_snapshot_bytes",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, not {getattr(self, name)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): every sequence takes a row a step"
            )
        if len(self.cache_key) > 64:
            raise ValueError("cache_key must be at most 64 bytes")
