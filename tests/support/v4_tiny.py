"""A tiny random DeepSeek V4 by transformers, which is the oracle, and its folder as published.

No term is left at a neutral value: sinks, position biases, mixing bases and hash tables are drawn too.
"""

import json
import math
import warnings
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, DynamicCache

from finback.shared.codec.load import load_tokenizer
from finback.shared.models.deepseek_v4 import names
from finback.shared.models.source import open_source

RATIOS: Final = (0, 4, 128, 4)
WINDOW: Final = 12
NUM_HASHED: Final = 1
_STD: Final = {"sinks": 1.0, "position_bias": 0.5, "base": 1.0, "hc_base": 1.0}
_KINDS: Final = {
    0: "sliding_attention",
    4: "compressed_sparse_attention",
    128: "heavily_compressed_attention",
}


def tiny_config(**changes: Any) -> DeepseekV4Config:
    """Small everywhere, but with real selections: 8 of up to 70 entries, 2 of 6 experts."""
    settings: dict[str, Any] = {
        "vocab_size": 160,
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": len(RATIOS),
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "partial_rotary_factor": 0.25,
        "q_lora_rank": 24,
        "o_groups": 2,
        "o_lora_rank": 16,
        "n_routed_experts": 6,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.5,
        "compress_ratios": list(RATIOS),
        "num_hash_layers": NUM_HASHED,
        "sliding_window": WINDOW,
        # Many heads: with few, scores of exactly 0 tie at the cut, and versions break ties apart.
        "index_n_heads": 16,
        "index_head_dim": 32,
        "index_topk": 8,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "swiglu_limit": 1.0,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 1024,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 16,
            "original_max_position_embeddings": 64,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        "pad_token_id": None,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
    }
    return DeepseekV4Config(**(settings | changes))


def tiny_model(seed: int = 11, settings: dict[str, Any] | None = None) -> DeepseekV4ForCausalLM:
    """The same model at every call; `settings` change its config."""
    config = tiny_config(**(settings or {}))
    config._attn_implementation = "eager"
    model: DeepseekV4ForCausalLM = DeepseekV4ForCausalLM(config)
    model.train(False)
    model.set_experts_implementation("eager")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in sorted(_drawn(model).items()):
            tensor.copy_(_draw(name, tensor, config, generator))
    return model


def _drawn(model: DeepseekV4ForCausalLM) -> dict[str, torch.Tensor]:
    ends = ("tid2eid", "e_score_correction_bias")
    buffers = {name: held for name, held in model.named_buffers() if name.endswith(ends)}
    return {**dict(model.named_parameters()), **buffers}


def _draw(name: str, like: torch.Tensor, config: Any, generator: torch.Generator) -> torch.Tensor:
    leaf = name.rpartition(".")[2]
    if leaf == "tid2eid":
        order = torch.rand(like.shape[0], config.n_routed_experts, generator=generator)
        return order.argsort(dim=1)[:, : like.shape[1]].to(like.dtype)
    noise = torch.randn(like.shape, generator=generator)
    if leaf in _STD:
        return noise * _STD[leaf]
    if leaf == "e_score_correction_bias":
        return noise * 0.2
    if leaf in ("scale", "hc_scale"):
        return 0.7 + 0.1 * noise
    if "norm" in name:
        return 1.0 + 0.1 * noise
    if "embed_tokens" in name:
        return noise
    gain = 2.0 if "gate_proj" in name and "compressor" in name else 1.3
    return noise * gain / math.sqrt(like.shape[-1])


@torch.no_grad()
def oracle_logits(model: DeepseekV4ForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """float32 [len(ids), vocab]: the whole prompt at once."""
    logits: torch.Tensor = model(input_ids=ids.view(1, -1), use_cache=False).logits[0]
    return logits


@torch.no_grad()
def oracle_state(model: DeepseekV4ForCausalLM, ids: torch.Tensor) -> Any:
    """transformers' cache after a prompt."""
    cache = DynamicCache(config=model.config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer versions call the argument `cache`
        model(input_ids=ids.view(1, -1), past_key_values=cache, use_cache=True)
    return cache


def published_tensors(model: DeepseekV4ForCausalLM) -> dict[str, torch.Tensor]:
    """All weights under published names, one tensor an expert."""
    found = {}
    for name, tensor in model.state_dict().items():
        ours = names.published(name)
        leaf = ours.split(".", 2)[-1]
        if leaf not in names.STACKED:
            found[ours] = tensor.contiguous().clone()
            continue
        layer = ours.split(".")[1]
        for expert, rows in enumerate(tensor):
            parts = names.STACKED[leaf]
            for part, piece in zip(parts, rows.chunk(len(parts)), strict=True):
                key = f"layers.{layer}.ffn.experts.{expert}.{part}.weight"
                found[key] = piece.contiguous().clone()
    return found


def published_config(config: DeepseekV4Config, **changes: Any) -> dict[str, Any]:
    """config.json with the published fields."""
    raw = config.to_dict()
    yarn = raw["rope_parameters"]["compress"]
    out = {
        key: value
        for key, value in raw.items()
        if key not in ("rope_parameters", "layer_types", "mlp_layer_types", "compress_rates")
    }
    ratio_of = {kind: ratio for ratio, kind in _KINDS.items()}
    out |= {
        "compress_ratios": [*(ratio_of[kind] for kind in raw["layer_types"]), 0],
        "num_hash_layers": NUM_HASHED,
        "topk_method": "noaux_tc",
        "compress_rope_theta": yarn["rope_theta"],
        "rope_scaling": {
            "type": "yarn",
            **{
                key: yarn[key]
                for key in ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings")
            },
        },
    }
    return out | changes


def write_folder(
    folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any], num_files: int = 1
) -> Path:
    """A model folder; more than one file gets an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    keys = sorted(tensors)
    if num_files == 1:
        save_file(tensors, str(folder / "model.safetensors"))
        return folder
    weight_map: dict[str, str] = {}
    for at in range(num_files):
        name = f"model-{at + 1:05d}-of-{num_files:05d}.safetensors"
        part = {key: tensors[key] for key in keys[at::num_files]}
        save_file(part, str(folder / name))
        weight_map |= dict.fromkeys(part, name)
    index = json.dumps({"weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index)
    return folder


def text_folder(folder: Path, **changes: Any) -> Path:
    """A tiny model with SmolLM2's vocabulary, tokenizer and template, so that it can be talked to."""
    embedded = open_source()
    settings = {"vocab_size": embedded.config.vocab_size, **changes}
    model = tiny_model(settings=settings)
    ids = list(embedded.text.eos_ids)
    raw = published_config(model.config, eos_token_id=ids)
    path = write_folder(folder, published_tensors(model), raw)
    (path / "tokenizer.json").write_text(load_tokenizer(embedded.text).to_json())
    template = {"chat_template": embedded.text.chat_template}
    (path / "tokenizer_config.json").write_text(json.dumps(template))
    return path
