"""Logits against transformers on tiny random models, and against the float32 twin of a file."""

from pathlib import Path
from typing import Any

import pytest
import torch

from finback.shared.models.loader import load_model
from finback.shared.models.source import open_source
from support.forward_batches import Chunk, logits_in_chunks, logits_of
from support.tiny_folders import hf_logits, save_gguf, save_hf, tiny_hf_model

TOKENS = torch.randint(0, 96, (75,), generator=torch.Generator().manual_seed(1)).tolist()
BLOCK = 32
WHOLE_ERROR = 0.05
"""Of logits whose chunk is computed in bfloat16, relative to the largest logit."""

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    ("llama", {"rope_parameters": LLAMA3}),
    ("llama", {"num_attention_heads": 8, "num_key_value_heads": 1}),
    ("qwen3", {}),
    (
        "qwen3",
        {
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
]


@pytest.mark.parametrize(("architecture", "changes"), CASES)
@pytest.mark.parametrize("mode", ["reference", "fast"])
def test_logits_equal_transformers(
    architecture: str, changes: dict[str, Any], mode: Any, tmp_path: Path
) -> None:
    oracle = tiny_hf_model(architecture, **changes)
    model = load_model(open_source(save_hf(oracle, tmp_path)), mode=mode, num_threads=2)
    pool = model.new_pool(8, BLOCK, "f32")
    found = logits_in_chunks(model, pool, TOKENS, [5, 2, 7])
    whole = logits_of(model, model.new_pool(8, BLOCK), [Chunk(token_ids=TOKENS)])
    model.close()
    wanted = hf_logits(oracle, TOKENS)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)
    # Fast mode may compute long chunks in bfloat16.
    assert float((whole - wanted).abs().max() / wanted.abs().max()) < WHOLE_ERROR


def test_old_layout_of_rope_settings(tmp_path: Path) -> None:
    import json

    oracle = tiny_hf_model("llama", rope_parameters=LLAMA3)
    folder = save_hf(oracle, tmp_path)
    raw = json.loads((folder / "config.json").read_text())
    scaling = raw.pop("rope_parameters")
    raw["rope_theta"] = scaling.pop("rope_theta")
    raw["rope_scaling"] = scaling
    (folder / "config.json").write_text(json.dumps(raw))
    model = load_model(open_source(folder), mode="reference")
    found = logits_of(model, model.new_pool(8, BLOCK), [Chunk(token_ids=TOKENS)])
    torch.testing.assert_close(found, hf_logits(oracle, TOKENS), atol=1e-4, rtol=0)


def test_sharded_weights(tmp_path: Path) -> None:
    oracle = tiny_hf_model("qwen3")
    folder = save_hf(oracle, tmp_path, max_shard_size="80KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    model = load_model(open_source(folder), mode="reference")
    found = logits_of(model, model.new_pool(8, BLOCK), [Chunk(token_ids=TOKENS)])
    torch.testing.assert_close(found, hf_logits(oracle, TOKENS), atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_stay_what_they_are(dtype: torch.dtype, tmp_path: Path) -> None:
    rounded = tiny_hf_model("llama").to(dtype)
    model = load_model(open_source(save_hf(rounded, tmp_path)), mode="fast", num_threads=1)
    oracle = tiny_hf_model("llama")  # its rotation stays float32, as it should
    oracle.load_state_dict(rounded.state_dict())
    found = logits_in_chunks(model, model.new_pool(8, BLOCK, "f32"), TOKENS, [0, 1, 2])
    model.close()
    torch.testing.assert_close(found, hf_logits(oracle, TOKENS), atol=1e-4, rtol=0)


@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_gguf_of_every_type(architecture: str, type_name: str, tmp_path: Path) -> None:
    """Fast kernels on the packed file against reference kernels on the dequantised one.

    Q5_0 is held as float16, which rounds its scale times quant once more.
    """
    oracle = tiny_hf_model(architecture)
    source = open_source(save_gguf(oracle, tmp_path / "tiny.gguf", type_name))
    reference = load_model(source, mode="reference")
    wanted = logits_of(reference, reference.new_pool(8, BLOCK), [Chunk(token_ids=TOKENS)])
    fast = load_model(source, mode="fast", num_threads=2)
    found = logits_in_chunks(fast, fast.new_pool(8, BLOCK, "f32"), TOKENS, [0, 1, 2])
    whole = logits_of(fast, fast.new_pool(8, BLOCK), [Chunk(token_ids=TOKENS)])
    fast.close()
    assert float((whole - wanted).abs().max() / wanted.abs().max()) < WHOLE_ERROR
    torch.testing.assert_close(found, wanted, atol=2e-2 if type_name == "Q5_0" else 2e-4, rtol=0)
    if type_name == "F32":  # also proves the order of rotated rows
        torch.testing.assert_close(wanted, hf_logits(oracle, TOKENS), atol=1e-4, rtol=0)
