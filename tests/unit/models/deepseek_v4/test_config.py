"""config.json in both spellings, and what is odd about published ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from finback.shared.errors import ConfigError
from finback.shared.models.deepseek_v4.config import V4Config, Yarn, read_config
from finback.shared.models.deepseek_v4.rope import frequencies
from support import v4_tiny

PATH = Path("config.json")


def raw(**changes: Any) -> dict[str, Any]:
    made = json.loads(json.dumps(v4_tiny.published_config(v4_tiny.tiny_config())))
    return {key: value for key, value in (made | changes).items() if value is not ...}


def read(**changes: Any) -> V4Config:
    return read_config(PATH, raw(**changes))


def test_both_spellings_say_the_same() -> None:
    theirs = json.loads(v4_tiny.tiny_config(num_nextn_predict_layers=0).to_json_string())
    ours = read(num_nextn_predict_layers=0)
    assert read_config(PATH, theirs) == ours
    assert ours.ratios == v4_tiny.RATIOS
    assert ours.num_hash_layers == v4_tiny.NUM_HASHED
    assert ours.yarn == Yarn(factor=16.0, original_max_len=64)


def test_ratios_behind_the_layers_are_the_draft_stages() -> None:
    assert read(compress_ratios=[0, 4, 128, 4, 0, 0, 0]).ratios == (0, 4, 128, 4)


def test_a_dspark_mark_wins_over_the_mtp_counter() -> None:
    found = read(dspark_block_size=5, dspark_target_layer_ids=[1, 2, 3], num_nextn_predict_layers=1)
    assert (found.num_draft_stages, found.is_dspark) == (3, True)
    found = read(num_nextn_predict_layers=1)
    assert (found.num_draft_stages, found.is_dspark) == (1, False)


def test_a_config_without_expert_dtype_claims_nothing() -> None:
    assert read(expert_dtype=...).expert_dtype == ""
    assert read(expert_dtype="fp4").expert_dtype == "fp4"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"hidden_size": ...}, "hidden_size must be a positive integer"),
        ({"o_groups": "2"}, "o_groups must be a positive integer, not '2'"),
        ({"swiglu_limit": 0}, "swiglu_limit must be a positive number"),
        ({"compress_ratios": [0, 4]}, "compress_ratios must have 4 entries or more"),
        ({"compress_ratios": [0, 4, 128, 2]}, "each 0, 4 or 128"),
        ({"compress_ratios": ..., "layer_types": ["full_attention"] * 4}, "neither"),
        ({"num_key_value_heads": 2}, "only 1 is supported"),
        ({"scoring_func": "sigmoid"}, "only 'sqrtsoftplus' is supported"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "only yarn is"),
        ({"rope_scaling": {"type": "yarn"}}, "lacks factor"),
        ({"num_hash_layers": -1}, "num_hash_layers must be a count"),
    ],
)
def test_a_field_that_is_wrong_is_named(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        read(**changes)


def test_hash_layers_come_first() -> None:
    kinds = ["moe", "hash_moe", "moe", "moe"]
    with pytest.raises(ConfigError, match="begin with all of its hash_moe"):
        read(num_hash_layers=..., mlp_layer_types=kinds)


def test_yarn_frequencies_of_the_published_model() -> None:
    """Kept up to index 15, divided by 16 from 25 on, blended in between (digest, 2.4)."""
    yarn = Yarn(factor=16.0, original_max_len=65536)
    plain, scaled = frequencies(64, 160000.0, None), frequencies(64, 160000.0, yarn)
    assert plain[:16].tolist() == scaled[:16].tolist()
    assert (plain[25:] / 16).tolist() == pytest.approx(scaled[25:].tolist())
    assert float(scaled[20]) == pytest.approx(float(plain[20]) * (0.5 + 0.5 / 16))
