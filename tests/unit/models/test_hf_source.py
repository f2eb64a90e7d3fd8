"""Hugging Face folders that are wrong: one line that names the thing."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from finback.shared.errors import ConfigError
from finback.shared.models.config import ModelConfig
from finback.shared.models.loader import load_model
from finback.shared.models.source import open_source
from support.tiny_folders import save_hf, tiny_hf_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_hf(tiny_hf_model("llama"), tmp_path / "tiny-llama")


def _change(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    raw.update(changes)
    path.write_text(json.dumps(raw))


def test_names_and_ids(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    _change(folder, eos_token_id=2)
    source = open_source(folder)
    assert (source.kind, source.name) == ("hf", "tiny-llama")
    assert source.text.eos_ids == (2, 5, 7)
    assert source.text.chat_template == "{{ messages }}"
    (folder / "chat_template.jinja").write_text("newer")
    assert open_source(folder).text.chat_template == "newer"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"hidden_size": "64"}, "hidden_size must be a positive integer"),
        ({"num_hidden_layers": -1}, "num_hidden_layers must be a positive integer"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope type 'yarn'"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "rope settings lack"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding-window attention is supported for"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries; it must name 2 layers"),
        ({"layer_types": ["full_attention", "linear"]}, "layer_types holds 'linear'"),
    ],
)
def test_config_errors(folder: Path, changes: dict[str, Any], message: str) -> None:
    _change(folder, **changes)
    with pytest.raises(ConfigError, match=message):
        open_source(folder)


def test_windows_that_cannot_be(tmp_path: Path) -> None:
    folder = save_hf(tiny_hf_model("qwen3"), tmp_path / "tiny-qwen")
    window = ["full_attention", "sliding_attention"]
    _change(folder, layer_types=window)
    with pytest.raises(ConfigError, match="use_sliding_window or sliding_window is missing"):
        open_source(folder)
    _change(folder, use_sliding_window=True, sliding_window=4.5)
    with pytest.raises(ConfigError, match="sliding_window must be a positive integer"):
        open_source(folder)
    _change(folder, sliding_window=4)
    source = open_source(folder)
    assert isinstance(source.config, ModelConfig)
    assert (source.config.window_layers, source.config.num_kv_layers) == ((1,), 1)
    _change(folder, layer_types=window[1:] * 2)
    with pytest.raises(ConfigError, match="at least one must be full_attention"):
        open_source(folder)


def test_missing_and_malformed_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        open_source(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json: missing"):
        open_source(folder)


def test_no_weights(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(ConfigError, match="weights are missing"):
        open_source(folder)


def _edit_weights(folder: Path, edit: Any) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def test_missing_tensor(folder: Path) -> None:
    _edit_weights(folder, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.up_proj\.weight is missing"):
        load_model(open_source(folder), mode="reference")


def test_unknown_tensor(folder: Path) -> None:
    _edit_weights(folder, lambda t: t.update({"model.extra.weight": torch.zeros(1)}))
    with pytest.raises(ConfigError, match=r"model\.extra\.weight is not known"):
        load_model(open_source(folder), mode="reference")


def test_wrong_shape(folder: Path) -> None:
    _edit_weights(folder, lambda t: t.update({"model.norm.weight": torch.zeros(63)}))
    with pytest.raises(ConfigError, match=r"model\.norm\.weight is \[63\], expected \[64\]"):
        load_model(open_source(folder), mode="reference")


def test_unsupported_tensor_type(folder: Path) -> None:
    _edit_weights(folder, lambda t: t.update({"model.norm.weight": torch.zeros(64).int()}))
    with pytest.raises(ConfigError, match="unsupported type I32"):
        load_model(open_source(folder), mode="reference")


def test_truncated_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ConfigError, match="corrupt or truncated"):
        load_model(open_source(folder), mode="reference")


def test_index_names_a_missing_file(tmp_path: Path) -> None:
    folder = save_hf(tiny_hf_model("llama"), tmp_path, max_shard_size="80KB")
    max(folder.glob("*.safetensors")).unlink()
    with pytest.raises(ConfigError, match="missing; the index names it"):
        load_model(open_source(folder), mode="reference")


def test_deterministic_mode_refuses_what_it_cannot_promise(tmp_path: Path) -> None:
    folder = save_hf(tiny_hf_model("llama", attention_bias=True), tmp_path)
    with pytest.raises(
        ConfigError, match="deterministic mode cannot run this model: it has biases"
    ):
        load_model(open_source(folder), mode="deterministic")
