"""From the stack's settings to an engine: what a worker process does first."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from finback.shared.cores import num_cores
from finback.shared.engine.config import EngineConfig, NumericsMode
from finback.shared.engine.device import choose_device
from finback.shared.engine.engine import Engine
from finback.shared.engine.output import StepOutput
from finback.shared.kv.cluster_key import cluster_key
from finback.shared.models.loader import load_model
from finback.shared.models.source import ModelSource, open_source

if TYPE_CHECKING:
    from finback.shared.config import StackConfig

_LOGGER = logging.getLogger(__name__)


def engine_config(config: "StackConfig", source: ModelSource) -> EngineConfig:
    """The engine's share of the settings, and what it must know of the model's text."""
    device = choose_device(config.device)
    return EngineConfig(
        kv_pool_bytes=config.kv_pool_bytes,
        block_size=source.config.block_tokens(config.block_size),
        kv_dtype=config.kv_dtype,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=max(config.max_num_batched_tokens, config.max_num_seqs),
        max_queue=config.max_queue,
        max_draft_tokens=config.draft_tokens if config.drafting else 0,
        max_span_tokens=config.grammar_tokens,
        eos_token_ids=source.text.eos_ids,
        mode=numerics_mode(config),
        device=device,
        # A device of its own computes a whole chunk in a few milliseconds.
        max_stall_ms=config.max_stall_ms if device == "cpu" else 0.0,
        num_threads=config.num_threads or num_cores(),
        prefix_caching=config.prefix_caching,
        state_replay="bounded" if config.state_replay == "bounded" else "exact",
        state_replay_tokens=config.state_replay_tokens,
        state_snapshot_bytes=config.state_snapshot_bytes,
        state_life_s=config.cache_retention_state_s,
        cache_key=cluster_key(config),
        weights_digest=source.digest,
    )


def numerics_mode(config: "StackConfig") -> NumericsMode:
    """Which class of kernels computes; blocks of one class never serve another."""
    if config.kernel_backend == "reference":
        return "reference"
    return "deterministic" if config.deterministic else "fast"


def load_engine(config: "StackConfig", on_step: Callable[[StepOutput], None]) -> Engine:
    """Open the model, load its weights, take the memory. Blocks for as long as that takes."""
    source = open_source(config.model)
    settings = engine_config(config, source)
    # Engines that lie in processes of their own share one copy of the weights.
    share_in = Path(config.run_dir) / "weights" if config.roles_layout == "separate" else None
    return build_engine(
        source,
        settings,
        weights_dtype=config.weights_dtype,
        on_step=on_step,
        share_in=share_in,
    )


def build_engine(
    source: ModelSource,
    settings: EngineConfig,
    *,
    weights_dtype: str,
    on_step: Callable[[StepOutput], None],
    on_failure: Callable[[BaseException], None] | None = None,
    share_in: Path | None = None,
) -> Engine:
    """Load the weights of an opened source into an engine (not started) that owns them.

    `share_in`: as for `load_model`.
    """
    model = load_model(
        source,
        settings.device,
        settings.mode,
        weights_dtype=weights_dtype,
        num_threads=settings.num_threads,
        share_in=share_in,
    )
    try:
        engine = Engine(model, settings, on_step=on_step, on_failure=on_failure, owns_model=True)
    except BaseException:
        model.close()
        raise
    _LOGGER.info(engine.sizes.memory.line())
    return engine
