"""How many KV blocks fit: weights + KV + workspace against what is free. Torch-free."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from finback.shared.engine.config import EngineConfig
from finback.shared.errors import ConfigError
from finback.shared.kv.layout import BlockGeometry

_MIB: Final = 1 << 20
# Of what is free, a pool that nobody asked for takes at most this share: others live here too.
_AUTO_SHARE: Final = 0.25
_MIN_TOKENS: Final = 256
_CGROUP: Final = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The sum, in bytes. `free_bytes` is what was there after the weights were loaded.

    `state_bytes`: slots and snapshots of a model that keeps state beside its blocks.
    """

    num_blocks: int
    max_model_len: int
    weights_bytes: int
    kv_bytes: int
    workspace_bytes: int
    free_bytes: int
    state_bytes: int = 0

    def line(self) -> str:
        """The sum in one line, for the log."""
        state = f" + state {_mib(self.state_bytes)}" if self.state_bytes else ""
        total = self.weights_bytes + self.kv_bytes + self.state_bytes + self.workspace_bytes
        return (
            f"memory: weights {_mib(self.weights_bytes)} + KV {_mib(self.kv_bytes)} "
            f"({self.num_blocks} blocks){state} + workspace {_mib(self.workspace_bytes)} = "
            f"{_mib(total)}, "
            f"of {_mib(self.weights_bytes + self.free_bytes)} free; context {self.max_model_len}"
        )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / _MIB:.0f} MiB"


def cgroup_free_bytes(root: Path = _CGROUP) -> int | None:
    """What this control group may still take (its page cache counts as free), or None."""
    try:
        limit = (root / "memory.max").read_text().strip()
        used = int((root / "memory.current").read_text())
        stat = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if limit == "max":
        return None
    return max(0, int(limit) - used + int(stat.get("inactive_file", 0)))


def free_memory_bytes() -> int:
    """Host memory that can be taken now."""
    available = int(psutil.virtual_memory().available)
    limited = cgroup_free_bytes()
    return available if limited is None else min(available, limited)


def plan_memory(
    config: EngineConfig,
    geometry: BlockGeometry,
    *,
    model_max_len: int,
    vocab_size: int,
    hidden_size: int,
    weights_bytes: int,
    free_bytes: int,
    state_bytes: int = 0,
) -> MemoryPlan:
    """Choose the pool. Raises `ConfigError` when what was asked for does not fit. Pure.

    Left to itself the pool takes at most a quarter of what is free, and no more than two sequences
    of full length (or 256 tokens for each of `max_num_seqs`) need. `state_bytes` is taken first.
    """
    block = geometry.block_bytes
    wanted_len = min(config.max_model_len or model_max_len, model_max_len)
    workspace = workspace_bytes(config, vocab_size=vocab_size, hidden_size=hidden_size)
    room = free_bytes - workspace - state_bytes
    if state_bytes and room <= 0:
        raise ConfigError(
            f"out of memory: the state of {config.max_num_seqs} sequences and its snapshots take "
            f"{_mib(state_bytes)}, the workspace {_mib(workspace)}, and {_mib(free_bytes)} are free; "
            "lower max_num_seqs or state_snapshot_bytes"
        )
    if config.num_blocks:
        num_blocks = config.num_blocks
    elif config.kv_pool_bytes:
        num_blocks = config.kv_pool_bytes // block
    else:
        tokens = max(2 * wanted_len, 256 * config.max_num_seqs)
        num_blocks = min(geometry.num_blocks(tokens), int(_AUTO_SHARE * max(0, room)) // block)
    if num_blocks * block > room:
        raise ConfigError(
            f"out of memory: the KV pool of {_mib(num_blocks * block)} and a workspace of "
            f"{_mib(workspace)} do not fit in the {_mib(free_bytes)} that are free beside weights "
            f"of {_mib(weights_bytes)}; lower kv_pool_bytes or max_model_len"
        )
    held = num_blocks * config.block_size
    if held < min(_MIN_TOKENS, wanted_len):
        raise ConfigError(
            f"out of memory: {_mib(free_bytes)} are free beside weights of {_mib(weights_bytes)}; "
            f"the KV pool would hold {held} tokens only ({_mib(block)} a block of "
            f"{config.block_size}); free memory or set kv_pool_bytes"
        )
    return MemoryPlan(
        num_blocks=num_blocks,
        max_model_len=min(wanted_len, held),
        weights_bytes=weights_bytes,
        kv_bytes=num_blocks * block,
        workspace_bytes=workspace,
        free_bytes=free_bytes,
        state_bytes=state_bytes,
    )


def workspace_bytes(config: EngineConfig, *, vocab_size: int, hidden_size: int) -> int:
    """What a largest step needs beside weights and KV: logits twice, and about 24 hidden rows."""
    rows = config.max_num_batched_tokens
    sampled = min(
        rows, config.max_num_seqs * (1 + max(config.max_draft_tokens, config.max_span_tokens))
    )
    return 4 * (2 * sampled * vocab_size + 24 * rows * hidden_size)
