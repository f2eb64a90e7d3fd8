"""A model folder with weights that babbles: it thinks, opens islands and stops by chance.

Its tokens are bytes and a few markers. Nothing is attended to: each token's likelihood is fixed, so
that whatever order there is in an answer comes from a grammar.
"""

import json
from pathlib import Path
from typing import Final

import numpy as np
from safetensors.numpy import save_file

from support.byte_tokenizer import byte_tokenizer_json
from support.thinking_folder import TEMPLATE

NAME: Final = "babbler"
SPECIAL: Final = ("<|im_start|>", "<|im_end|>")
# Added tokens that are text as well.
MARKERS: Final = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<f=", "</f>")
END: Final = 257
OPENS: Final = 256 + len(SPECIAL) + MARKERS.index("<f=")
VOCAB_SIZE: Final = 320
HIDDEN: Final = 64
_RARE: Final = -4.0
# Likelier than others, in nats.
_LOGITS: Final = {
    **dict.fromkeys('abcde "}],:.', 1.0),
    **dict.fromkeys("0123456789fghi", 0.0),
}


def babbler_folder(parent: Path) -> Path:
    """Write the folder; its name is the model's."""
    folder = parent / NAME
    folder.mkdir()
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": END,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(byte_tokenizer_json(SPECIAL, MARKERS))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    save_file(_weights(), folder / "model.safetensors")
    return folder


def _weights() -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    """All embeddings point one way, layers add nothing: logits are the last matrix's first column."""
    embedding = np.zeros((VOCAB_SIZE, HIDDEN), np.float32)
    embedding[:, 0] = 1.0
    head = np.zeros((VOCAB_SIZE, HIDDEN), np.float32)
    head[:, 0] = _logits() / np.sqrt(HIDDEN)  # what the last norm makes of the one
    square, layer = np.zeros((HIDDEN, HIDDEN), np.float32), "model.layers.0"
    names = [f"self_attn.{name}_proj" for name in "qkvo"]
    names += [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    ones = np.ones(HIDDEN, np.float32)
    return {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": head,
        "model.norm.weight": ones,
        f"{layer}.input_layernorm.weight": ones.copy(),
        f"{layer}.post_attention_layernorm.weight": ones.copy(),
        **{f"{layer}.{name}.weight": square.copy() for name in names},
    }


def _logits() -> "np.ndarray[tuple[int, ...], np.dtype[np.float32]]":
    found = np.full(VOCAB_SIZE, _RARE, np.float32)
    for char, logit in _LOGITS.items():
        found[ord(char)] = logit
    found[END] = 1.0
    found[256 + len(SPECIAL) : 256 + len(SPECIAL) + len(MARKERS)] = 1.0
    return found
