from dataclasses import replace
from typing import Any

import pytest

from finback.shared.kv.layout import BlockGeometry, cache_spec, salt_of
from finback.shared.kv.state import StatePart, StateSpec

GEOMETRY = BlockGeometry(block_size=16, num_layers=3, num_kv_heads=2, head_dim=8, kv_dtype="bf16")
FACTS: dict[str, Any] = {"weights_digest": "w", "config": "c", "numerics": "fast"}


def test_bytes_follow_the_shape() -> None:
    assert GEOMETRY.token_bytes == 3 * 2 * 2 * 8 * 2
    assert GEOMETRY.block_bytes == 16 * GEOMETRY.token_bytes
    assert GEOMETRY.num_bytes(5) == 5 * GEOMETRY.token_bytes
    assert GEOMETRY.shape(5) == (3, 2, 5, 2, 8)
    assert [GEOMETRY.num_blocks(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]


@pytest.mark.parametrize("num_tokens", [-1, 17])
def test_a_block_holds_no_more_than_a_block(num_tokens: int) -> None:
    with pytest.raises(ValueError, match="a block holds"):
        GEOMETRY.num_bytes(num_tokens)


@pytest.mark.parametrize("change", [{"kv_dtype": "int3"}, {"head_dim": 0}])
def test_bad_geometry_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        replace(GEOMETRY, **change)


def test_everything_that_changes_bytes_changes_the_salt() -> None:
    salts = {
        salt_of(GEOMETRY, **FACTS),
        *(salt_of(GEOMETRY, **{**FACTS, name: "x"}) for name in FACTS),
        salt_of(replace(GEOMETRY, kv_dtype="f16"), **FACTS),
        salt_of(replace(GEOMETRY, block_size=32), **FACTS),
        salt_of(replace(GEOMETRY, num_layers=2), **FACTS),
    }
    assert len(salts) == 7


def test_fields_of_the_salt_do_not_run_together() -> None:
    one = salt_of(GEOMETRY, weights_digest="ab", config="c", numerics="fast")
    other = salt_of(GEOMETRY, weights_digest="a", config="bc", numerics="fast")
    assert one != other


def test_spec_says_the_geometry() -> None:
    spec = cache_spec(GEOMETRY, **FACTS)
    assert (spec.block_bytes, spec.kv_dtype) == (GEOMETRY.block_bytes, "bf16")
    assert spec.salt == salt_of(GEOMETRY, **FACTS)


def test_state_and_its_replay_are_part_of_the_salt() -> None:
    part = StatePart(name="window", num_layers=2, lookback_tokens=3, shape=(2, 8), dtype="bf16")
    state = StateSpec(parts=(part,), replay_tokens=6, window_tokens=4)
    exact = cache_spec(GEOMETRY, state=state, **FACTS)
    bounded = cache_spec(GEOMETRY, state=state, replay="bounded-2", **FACTS)
    wider = replace(state, parts=(replace(part, lookback_tokens=4),))
    salts = {spec.salt for spec in (cache_spec(GEOMETRY, **FACTS), exact, bounded)}
    assert len(salts | {cache_spec(GEOMETRY, state=wider, **FACTS).salt}) == 4
    assert (exact.state_bytes, exact.window_tokens, exact.replay_tokens) == (24 + 3 * 64, 4, 6)
