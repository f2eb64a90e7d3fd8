"""What an engine's numbers are, from its model, its settings and the memory that is free."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from finback.shared.engine.config import EngineConfig
from finback.shared.engine.device import Device
from finback.shared.engine.memory import MemoryPlan, plan_memory
from finback.shared.engine.state_book import StateRules
from finback.shared.engine.table import SchedulerConfig
from finback.shared.errors import ConfigError
from finback.shared.kv.layout import BlockGeometry, cache_spec
from finback.shared.kv.state import StateSpec
from finback.shared.kv.state_policy import ReplayRule
from finback.shared.models.causal_lm import StatefulLM
from finback.shared.wire.messages.control import CacheSpec

if TYPE_CHECKING:
    from finback.shared.models.causal_lm import CausalLM


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSizes:
    """Chosen once, before anything is allocated."""

    geometry: BlockGeometry
    memory: MemoryPlan
    cache_spec: CacheSpec
    vocab_size: int
    rollback_tokens: int
    state: StateSpec | None = None

    def scheduler_config(self, config: EngineConfig) -> SchedulerConfig:
        """The scheduler's share of the numbers."""
        return SchedulerConfig(
            num_blocks=self.memory.num_blocks,
            block_size=config.block_size,
            max_model_len=self.memory.max_model_len,
            vocab_size=self.vocab_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_queue=config.max_queue,
            max_draft_tokens=config.max_draft_tokens,
            max_span_tokens=self._span_tokens(config),
            eos_token_ids=config.eos_token_ids,
            prefix_caching=config.prefix_caching,
            cache_key=config.cache_key,
            state=self._state_rules(config),
        )

    def _span_tokens(self, config: EngineConfig) -> int:
        """A model with state goes back by no more tokens than its windows have room for."""
        return config.max_span_tokens if self.state is None else config.max_draft_tokens

    def _state_rules(self, config: EngineConfig) -> StateRules | None:
        if self.state is None:
            return None
        return StateRules(
            rule=_replay_rule(self.state, config),
            snapshot_bytes=config.state_snapshot_bytes,
            life_s=config.state_life_s,
        )


def choose_sizes(model: "CausalLM", config: EngineConfig, device: Device) -> EngineSizes:
    """Fit a pool beside the model's weights. Raises `ConfigError` when there is no room."""
    facts = model.config
    kv_dtype = model.default_kv_dtype if config.kv_dtype == "auto" else config.kv_dtype
    geometry = facts.kv_geometry(config.block_size, kv_dtype)
    # Drafts that were refused, and the token that was sampled behind them.
    rollback = config.max_draft_tokens + 1
    state, state_bytes = None, 0
    if isinstance(model, StatefulLM):
        state = model.state_spec(kv_dtype)
        _check_periods(state, config)
        state_bytes = config.max_num_seqs * state.slot_bytes(rollback)
        state_bytes += config.state_snapshot_bytes
    memory = plan_memory(
        config,
        geometry,
        model_max_len=facts.max_model_len,
        vocab_size=facts.vocab_size,
        hidden_size=facts.hidden_size,
        weights_bytes=model.weights_bytes,
        free_bytes=device.free_bytes(),
        state_bytes=state_bytes,
    )
    spec = cache_spec(
        geometry,
        weights_digest=config.weights_digest,
        config=facts.describe(),
        numerics=model.numerics,
        state=state,
        replay="" if state is None else _replay_rule(state, config).name,
    )
    return EngineSizes(
        geometry=geometry,
        memory=memory,
        cache_spec=spec,
        vocab_size=facts.vocab_size,
        rollback_tokens=rollback,
        state=state,
    )


def _check_periods(state: StateSpec, config: EngineConfig) -> None:
    """Snapshots lie at the ends of blocks, where nothing that a compressor collects may be open."""
    for part in state.parts:
        if config.block_size % part.period_tokens:
            raise ConfigError(
                f"block_size is {config.block_size}; this model needs a multiple of "
                f"{part.period_tokens}, which its state {part.name!r} repeats after"
            )


def _replay_rule(state: StateSpec, config: EngineConfig) -> ReplayRule:
    return ReplayRule(
        mode=config.state_replay,
        exact_tokens=state.replay_tokens,
        bounded_tokens=config.state_replay_tokens,
        align_tokens=state.align_tokens,
    )
