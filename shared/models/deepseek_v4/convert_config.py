"""A V4 config.json in either spelling: as published, or as transformers writes it. Torch-free."""

from collections.abc import Mapping
from typing import Any, Final

from finback.shared.models.deepseek_v4.config import CSA_RATIO, HCA_RATIO, V4Config

_CSA: Final = "compressed_sparse_attention"
_HCA: Final = "heavily_compressed_attention"
_KINDS: Final = {0: "sliding_attention", CSA_RATIO: _CSA, HCA_RATIO: _HCA}
# What only one of the spellings has, and what says how the weights were stored.
_SPELT: Final = (
    "compress_rates",
    "compress_ratios",
    "dtype",
    "expert_dtype",
    "layer_types",
    "mlp_layer_types",
    "num_hash_layers",
    "partial_rotary_factor",
    "quantization_config",
    "rope_parameters",
    "rope_scaling",
    "topk_method",
    "torch_dtype",
    "transformers_version",
)


def transformers_config(raw: Mapping[str, Any], config: V4Config, dtype: str) -> dict[str, Any]:
    """`raw` in transformers' spelling. `dtype`: "float32" or "bfloat16"."""
    share = config.rope_dim / config.head_dim
    compress = {
        **_yarn(config, "rope_type"),
        "rope_theta": config.compress_rope_theta,
        "partial_rotary_factor": share,
    }
    if config.yarn is not None:
        compress["attention_factor"] = 1.0  # V4 scales no attention, whatever the length
    hashed = config.num_hash_layers
    return _common(raw, config) | {
        "architectures": ["DeepseekV4ForCausalLM"],
        "compress_rates": {_CSA: CSA_RATIO, _HCA: HCA_RATIO},
        "dtype": dtype,
        "layer_types": [_KINDS[ratio] for ratio in config.ratios],
        "mlp_layer_types": ["hash_moe"] * hashed + ["moe"] * (config.num_layers - hashed),
        "partial_rotary_factor": share,
        "rope_parameters": {
            "main": {
                "rope_type": "default",
                "rope_theta": config.rope_theta,
                "partial_rotary_factor": share,
            },
            "compress": compress,
        },
    }


def published_config(raw: Mapping[str, Any], config: V4Config, dtype: str) -> dict[str, Any]:
    """`raw` as DeepSeek publishes it; the ratios of draft stages are 0."""
    stages = max(1, config.num_draft_stages)
    found = _common(raw, config) | {
        "architectures": ["DeepseekV4ForCausalLM"],
        "compress_ratios": [*config.ratios, *[0] * stages],
        "num_hash_layers": config.num_hash_layers,
        "topk_method": "noaux_tc",
        "torch_dtype": dtype,
    }
    if config.yarn is not None:
        found["rope_scaling"] = _yarn(config, "type")
    return found


def _common(raw: Mapping[str, Any], config: V4Config) -> dict[str, Any]:
    kept = {name: value for name, value in raw.items() if name not in _SPELT}
    return kept | {
        "rope_theta": config.rope_theta,
        "compress_rope_theta": config.compress_rope_theta,
        "qk_rope_head_dim": config.rope_dim,
    }


def _yarn(config: V4Config, key: str) -> dict[str, Any]:
    """The scaling of the compressed layers; `key` is what its kind is called."""
    if config.yarn is None:
        return {key: "default"}
    return {
        key: "yarn",
        "factor": config.yarn.factor,
        "original_max_position_embeddings": config.yarn.original_max_len,
        "beta_fast": config.yarn.beta_fast,
        "beta_slow": config.yarn.beta_slow,
    }
