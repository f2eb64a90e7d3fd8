"""Tiny random models on disk: as transformers saves them, and as GGUF."""

from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import numpy.typing as npt
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SIZES: Final[dict[str, Any]] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}


def tiny_hf_model(architecture: str, **changes: Any) -> Any:
    """A random model of transformers, the same at every call."""
    torch.manual_seed(7)
    settings = {**SIZES, "tie_word_embeddings": False, **changes}
    model: Any
    if architecture == "llama":
        model = LlamaForCausalLM(LlamaConfig(**settings))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**settings))
    return model.eval()


def save_hf(model: PreTrainedModel, folder: Path, max_shard_size: str = "1GB") -> Path:
    """Write config.json and safetensors."""
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def hf_logits(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """float32 [tokens, vocab_size]."""
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    return found


_PARTS: Final = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _gguf_name(name: str) -> str:
    fixed = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in fixed:
        return fixed[name]
    _, _, layer, *part, _ = name.split(".")
    return f"blk.{layer}.{_PARTS['.'.join(part)]}.weight"


def _for_llama(values: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Rows of a head from halves to neighbours, as converters do for Llama files."""
    rows = values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, *values.shape[1:])
    return rows.swapaxes(1, 2).reshape(values.shape)


def ascii_vocabulary() -> tuple[list[str], list[int], list[str]]:
    """96 (spellings, types, merges) for text: three control tokens, ASCII up to `{`, and `th`."""
    tokens = ["<|a|>", "<|b|>", "<|end|>", "Ġ", *map(chr, range(33, 124)), "th"]
    return tokens, [3] * 3 + [1] * (len(tokens) - 3), ["t h"]


def save_gguf(
    model: PreTrainedModel,
    path: Path,
    type_name: str,
    vocabulary: tuple[list[str], list[int], list[str]] | None = None,
) -> Path:
    """Write a GGUF file whose matrices have the given type; norms are float32.

    Without a `vocabulary` it has one that no tokenizer can be made of.
    """
    config = model.config
    architecture = config.model_type
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    names = [f"t{i}" for i in range(config.vocab_size)]
    tokens, token_types, merges = vocabulary or (names, [1] * config.vocab_size, ["t 1"])
    writer.add_token_list(tokens)
    writer.add_token_types(token_types)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(2)
    kind = gguf.GGMLQuantizationType[type_name]
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.float().numpy()
        if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            is_q = ".q_proj." in name
            heads = config.num_attention_heads if is_q else config.num_key_value_heads
            values = np.ascontiguousarray(_for_llama(values, heads))
        if values.ndim == 1:
            writer.add_tensor(_gguf_name(name), values)
        else:
            data = gguf.quants.quantize(values, kind)
            writer.add_tensor(_gguf_name(name), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
