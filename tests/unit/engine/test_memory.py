from pathlib import Path
from typing import Any

import pytest

from finback.shared.engine.config import EngineConfig
from finback.shared.engine.memory import (
    MemoryPlan,
    cgroup_free_bytes,
    free_memory_bytes,
    plan_memory,
)
from finback.shared.errors import ConfigError
from finback.shared.kv.layout import BlockGeometry

MIB = 1 << 20
GEOMETRY = BlockGeometry(block_size=64, num_layers=30, num_kv_heads=3, head_dim=64, kv_dtype="bf16")


def _plan(config: EngineConfig, free_bytes: int = 4096 * MIB, **facts: Any) -> MemoryPlan:
    sizes = {"model_max_len": 8192, "vocab_size": 49152, "hidden_size": 576, "weights_bytes": 90e6}
    return plan_memory(config, GEOMETRY, free_bytes=free_bytes, **{**sizes, **facts})


def test_left_alone_it_takes_two_full_sequences() -> None:
    plan = _plan(EngineConfig())
    assert plan.num_blocks == 2 * 8192 // 64
    assert plan.max_model_len == 8192
    assert plan.kv_bytes == plan.num_blocks * GEOMETRY.block_bytes


def test_with_little_memory_it_takes_a_quarter_and_shortens_the_context() -> None:
    plan = _plan(EngineConfig(), free_bytes=512 * MIB)
    assert plan.kv_bytes <= 128 * MIB
    assert plan.max_model_len == plan.num_blocks * 64 < 8192


def test_what_was_asked_for_is_taken() -> None:
    assert _plan(EngineConfig(num_blocks=7)).num_blocks == 7
    assert _plan(EngineConfig(kv_pool_bytes=9 * GEOMETRY.block_bytes + 1)).num_blocks == 9
    assert _plan(EngineConfig(max_model_len=1000)).max_model_len == 1000
    assert _plan(EngineConfig(max_model_len=10**6)).max_model_len == 8192


@pytest.mark.parametrize(
    ("config", "free_bytes"),
    [
        (EngineConfig(kv_pool_bytes=8192 * MIB), 4096 * MIB),
        (EngineConfig(), 64 * MIB),
        (EngineConfig(num_blocks=1), 4096 * MIB),
    ],
)
def test_what_does_not_fit_is_said_in_one_line(config: EngineConfig, free_bytes: int) -> None:
    with pytest.raises(ConfigError, match="out of memory") as caught:
        _plan(config, free_bytes=free_bytes)
    assert "\n" not in str(caught.value)
    assert "MiB" in str(caught.value)


def test_the_sum_is_one_line() -> None:
    line = _plan(EngineConfig()).line()
    assert line.startswith("memory: weights 86 MiB + KV 360 MiB (256 blocks) + workspace")


def test_a_control_group_limits_what_is_free(tmp_path: Path) -> None:
    assert cgroup_free_bytes(tmp_path) is None
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 100\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert cgroup_free_bytes(tmp_path) is None
    (tmp_path / "memory.max").write_text("1000\n")
    assert cgroup_free_bytes(tmp_path) == 400


def test_this_machine_has_memory() -> None:
    assert free_memory_bytes() > MIB
