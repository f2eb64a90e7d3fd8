"""Which tensors a model has, under one set of names for both kinds of source. Torch-free."""

from collections.abc import Iterator
from typing import Final

from finback.shared.models.config import ModelConfig

EMBEDDING: Final = "embedding"
HEAD: Final = "head"
FINAL_NORM: Final = "final_norm"
ROPE_FACTORS: Final = "rope_factors"

# part of a layer: (Hugging Face, GGUF)
_LAYER: Final[dict[str, tuple[str, str]]] = {
    "attn_norm": ("input_layernorm", "attn_norm"),
    "q": ("self_attn.q_proj", "attn_q"),
    "k": ("self_attn.k_proj", "attn_k"),
    "v": ("self_attn.v_proj", "attn_v"),
    "o": ("self_attn.o_proj", "attn_output"),
    "q_norm": ("self_attn.q_norm", "attn_q_norm"),
    "k_norm": ("self_attn.k_norm", "attn_k_norm"),
    "mlp_norm": ("post_attention_layernorm", "ffn_norm"),
    "gate": ("mlp.gate_proj", "ffn_gate"),
    "up": ("mlp.up_proj", "ffn_up"),
    "down": ("mlp.down_proj", "ffn_down"),
}


def layer_name(layer: int, part: str) -> str:
    """Our name of a tensor of a layer, for example "3.q"; biases are "3.q.bias"."""
    return f"{layer}.{part}"


def hf_name(name: str) -> str:
    """The Hugging Face name of one of ours."""
    fixed = {
        EMBEDDING: "model.embed_tokens.weight",
        HEAD: "lm_head.weight",
        FINAL_NORM: "model.norm.weight",
        ROPE_FACTORS: "model.rope_factors",
    }
    if name in fixed:
        return fixed[name]
    layer, part, kind = _split(name)
    return f"model.layers.{layer}.{_LAYER[part][0]}.{kind}"


def gguf_name(name: str) -> str:
    """The GGUF name of one of ours."""
    fixed = {
        EMBEDDING: "token_embd.weight",
        HEAD: "output.weight",
        FINAL_NORM: "output_norm.weight",
        ROPE_FACTORS: "rope_freqs.weight",
    }
    if name in fixed:
        return fixed[name]
    layer, part, kind = _split(name)
    return f"blk.{layer}.{_LAYER[part][1]}.{kind}"


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """All tensors that the model needs, with their shapes [out, in]."""
    hidden, vocab = config.hidden_size, config.vocab_size
    found: dict[str, tuple[int, ...]] = {EMBEDDING: (vocab, hidden), FINAL_NORM: (hidden,)}
    if not config.tie_word_embeddings:
        found[HEAD] = (vocab, hidden)
    for layer in range(config.num_layers):
        for part, shape in _layer_shapes(config):
            found[layer_name(layer, part)] = shape
    return found


def _layer_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    yield "attn_norm", (hidden,)
    yield "mlp_norm", (hidden,)
    if config.qk_norm:
        yield "q_norm", (config.head_dim,)
        yield "k_norm", (config.head_dim,)
    matrices = {
        "q": (config.q_size, hidden, config.attention_bias),
        "k": (config.kv_size, hidden, config.attention_bias),
        "v": (config.kv_size, hidden, config.attention_bias),
        "o": (hidden, config.q_size, config.output_bias),
        "gate": (inner, hidden, config.mlp_bias),
        "up": (inner, hidden, config.mlp_bias),
        "down": (hidden, inner, config.mlp_bias),
    }
    for part, (rows, columns, has_bias) in matrices.items():
        yield part, (rows, columns)
        if has_bias:
            yield f"{part}.bias", (rows,)


def _split(name: str) -> tuple[str, str, str]:
    layer, part, *rest = name.split(".")
    return layer, part, rest[0] if rest else "weight"
