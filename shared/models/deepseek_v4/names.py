"""Names and shapes of a V4 checkpoint's tensors, published and transformers'. Torch-free.

A published layer's tensors are `layers.N.<leaf>`, its draft stages' `mtp.N.<leaf>`; some exports put
`model.` in front. transformers has three spellings of its own: in memory (experts stacked), and what
`save_pretrained` writes, which is published names but for a few.
"""

import re
from collections.abc import Iterable
from typing import Final

from finback.shared.models.deepseek_v4.config import V4Config
from finback.shared.models.deepseek_v4.memory_shape import has_indexer, has_overlap

Shape = tuple[int, ...]

TOP: Final = {
    "embed.weight": "model.embed_tokens.weight",
    "head.weight": "lm_head.weight",
    "norm.weight": "model.norm.weight",
    "hc_head_fn": "model.hc_head.hc_fn",
    "hc_head_base": "model.hc_head.hc_base",
    "hc_head_scale": "model.hc_head.hc_scale",
}
_COMPRESSOR: Final = {
    "wkv.weight": "kv_proj.weight",
    "wgate.weight": "gate_proj.weight",
    "norm.weight": "kv_norm.weight",
    "ape": "position_bias",
}
LEAVES: Final = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    **{
        f"hc_{site}_{part}": f"{site}_hc.{part}"
        for site in ("attn", "ffn")
        for part in ("fn", "base", "scale")
    },
    "attn.attn_sink": "self_attn.sinks",
    "attn.wq_a.weight": "self_attn.q_a_proj.weight",
    "attn.q_norm.weight": "self_attn.q_a_norm.weight",
    "attn.wq_b.weight": "self_attn.q_b_proj.weight",
    "attn.wkv.weight": "self_attn.kv_proj.weight",
    "attn.kv_norm.weight": "self_attn.kv_norm.weight",
    "attn.wo_a.weight": "self_attn.o_a_proj.weight",
    "attn.wo_b.weight": "self_attn.o_b_proj.weight",
    "attn.indexer.wq_b.weight": "self_attn.compressor.indexer.q_b_proj.weight",
    "attn.indexer.weights_proj.weight": ("self_attn.compressor.indexer.scorer.weights_proj.weight"),
    **{f"attn.compressor.{ours}": f"self_attn.compressor.{hf}" for ours, hf in _COMPRESSOR.items()},
    **{
        f"attn.indexer.compressor.{ours}": f"self_attn.compressor.indexer.{hf}"
        for ours, hf in _COMPRESSOR.items()
    },
    "ffn.gate.weight": "mlp.gate.weight",
    "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
    "ffn.gate.tid2eid": "mlp.gate.tid2eid",
    "ffn.shared_experts.w1.weight": "mlp.shared_experts.gate_proj.weight",
    "ffn.shared_experts.w2.weight": "mlp.shared_experts.down_proj.weight",
    "ffn.shared_experts.w3.weight": "mlp.shared_experts.up_proj.weight",
}
_FROM_HF: Final = {hf: ours for ours, hf in (TOP | LEAVES).items()}
# What save_pretrained makes of two names; the rest of a file by it is as published.
_SAVED: Final = {"attn.norm.weight": "attn.kv_norm.weight"}
_LAYER: Final = re.compile(r"^(?:model\.)?layers\.(\d+)\.(.+)$")
STACKED: Final = {"mlp.experts.gate_up_proj": ("w1", "w3"), "mlp.experts.down_proj": ("w2",)}


def published(name: str) -> str:
    """The published name of a tensor under any of the spellings; an unknown name stays as it is.

    A stacked tensor of transformers keeps its leaf: `layers.N.mlp.experts.gate_up_proj`.
    """
    if name in _FROM_HF:
        return _FROM_HF[name]
    found = _LAYER.match(name)
    if found is None:
        return name.removeprefix("model.")
    layer, leaf = found.groups()
    return f"layers.{layer}.{_FROM_HF.get(leaf, _SAVED.get(leaf, leaf))}"


def transformers_name(name: str) -> str:
    """The in-memory name in transformers of a published one (experts excepted: they are stacked)."""
    if name in TOP:
        return TOP[name]
    _, layer, leaf = name.split(".", 2)
    return f"model.layers.{layer}.{LEAVES[leaf]}"


def shapes(config: V4Config) -> dict[str, Shape]:
    """Every tensor of the model proper by its published name; experts one by one, unpacked."""
    d, n = config.hidden_size, config.num_streams
    found: dict[str, Shape] = {
        "embed.weight": (config.vocab_size, d),
        "head.weight": (config.vocab_size, d),
        "norm.weight": (d,),
        "hc_head_fn": (n, n * d),
        "hc_head_base": (n,),
        "hc_head_scale": (1,),
    }
    for index, ratio in enumerate(config.ratios):
        leaves = {**_site_shapes(config), **_attention_shapes(config)}
        leaves |= _mixture_shapes(config, is_hashed=index < config.num_hash_layers)
        if ratio:
            leaves |= _compressor_shapes(config, "attn.compressor", ratio, config.head_dim)
        if has_indexer(ratio):
            leaves |= _indexer_shapes(config, ratio)
        found |= {f"layers.{index}.{leaf}": shape for leaf, shape in leaves.items()}
    return found


def expert_names(layer: int, expert: int) -> tuple[str, str, str]:
    """(w1, w3, w2): gate, up and down of one routed expert."""
    stem = f"layers.{layer}.ffn.experts.{expert}"
    return f"{stem}.w1.weight", f"{stem}.w3.weight", f"{stem}.w2.weight"


def scale_name(name: str) -> str:
    """Where the scales of a quantised tensor are."""
    return f"{name.removesuffix('.weight')}.scale"


def is_draft(name: str) -> bool:
    """A tensor of an MTP layer or of DSpark stages: recognised, and no part of the model proper."""
    return name.startswith("mtp.")


def without(names: Iterable[str], ours: Iterable[str]) -> list[str]:
    """Those of a file that are neither the model's nor a draft stage's."""
    known = set(ours)
    return sorted(name for name in names if name not in known and not is_draft(name))


def _site_shapes(config: V4Config) -> dict[str, Shape]:
    d, n = config.hidden_size, config.num_streams
    width = 2 * n + n * n
    sites: dict[str, Shape] = {"attn_norm.weight": (d,), "ffn_norm.weight": (d,)}
    for site in ("attn", "ffn"):
        sites[f"hc_{site}_fn"] = (width, n * d)
        sites[f"hc_{site}_base"] = (width,)
        sites[f"hc_{site}_scale"] = (3,)
    return sites


def _attention_shapes(config: V4Config) -> dict[str, Shape]:
    d, heads, width = config.hidden_size, config.num_heads, config.head_dim
    inner = config.num_output_groups * config.output_rank
    return {
        "attn.attn_sink": (heads,),
        "attn.wq_a.weight": (config.q_rank, d),
        "attn.q_norm.weight": (config.q_rank,),
        "attn.wq_b.weight": (heads * width, config.q_rank),
        "attn.wkv.weight": (width, d),
        "attn.kv_norm.weight": (width,),
        "attn.wo_a.weight": (inner, heads * width // config.num_output_groups),
        "attn.wo_b.weight": (d, inner),
    }


def _compressor_shapes(config: V4Config, stem: str, ratio: int, width: int) -> dict[str, Shape]:
    channels = width * (2 if has_overlap(ratio) else 1)
    return {
        f"{stem}.wkv.weight": (channels, config.hidden_size),
        f"{stem}.wgate.weight": (channels, config.hidden_size),
        f"{stem}.ape": (ratio, channels),
        f"{stem}.norm.weight": (width,),
    }


def _indexer_shapes(config: V4Config, ratio: int) -> dict[str, Shape]:
    heads, width = config.index_num_heads, config.index_head_dim
    return {
        "attn.indexer.wq_b.weight": (heads * width, config.q_rank),
        "attn.indexer.weights_proj.weight": (heads, config.hidden_size),
        **_compressor_shapes(config, "attn.indexer.compressor", ratio, width),
    }


def _mixture_shapes(config: V4Config, *, is_hashed: bool) -> dict[str, Shape]:
    d, f = config.hidden_size, config.expert_size
    found: dict[str, Shape] = {"ffn.gate.weight": (config.num_experts, d)}
    if is_hashed:
        found["ffn.gate.tid2eid"] = (config.vocab_size, config.num_experts_per_token)
    else:
        found["ffn.gate.bias"] = (config.num_experts,)
    shared = f * config.num_shared_experts
    for stem, width in [("ffn.shared_experts", shared)] + [
        (f"ffn.experts.{expert}", f) for expert in range(config.num_experts)
    ]:
        found[f"{stem}.w1.weight"] = (width, d)
        found[f"{stem}.w3.weight"] = (width, d)
        found[f"{stem}.w2.weight"] = (d, width)
    return found
