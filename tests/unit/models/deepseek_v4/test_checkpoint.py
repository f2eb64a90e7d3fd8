"""Folders in every layout and number format; and such as are incomplete, odd or broken."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV4ForCausalLM

from finback.shared.errors import ConfigError
from finback.shared.models.deepseek_v4.checkpoint import V4Checkpoint
from finback.shared.models.deepseek_v4.names import published, shapes, transformers_name
from support import v4_formats, v4_tiny
from support.v4_ranks import config_of

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def tensors(oracle: DeepseekV4ForCausalLM) -> Tensors:
    return v4_tiny.published_tensors(oracle)


def write(path: Path, oracle: DeepseekV4ForCausalLM, tensors: Tensors, **more: Any) -> Path:
    raw = v4_tiny.published_config(oracle.config)
    return v4_tiny.write_folder(path, tensors, raw, **more)


def check_equal(folder: Path, expected: Tensors) -> None:
    config = config_of(folder)
    checkpoint = V4Checkpoint(folder, config)
    for name in shapes(config):
        if ".experts." not in name:
            assert torch.equal(checkpoint.tensor(name, torch.float32), expected[name].float()), name
    for layer in range(config.num_layers):
        gate_up, down = checkpoint.experts(layer, (4, 1), torch.float32)
        for at, expert in enumerate((4, 1)):
            stem = f"layers.{layer}.ffn.experts.{expert}"
            parts = [expected[f"{stem}.{part}.weight"].float() for part in ("w1", "w3")]
            assert torch.equal(gate_up[at], torch.cat(parts))
            assert torch.equal(down[at], expected[f"{stem}.w2.weight"].float())


def test_the_published_layout_in_several_files(
    tmp_path: Path, oracle: DeepseekV4ForCausalLM, tensors: Tensors
) -> None:
    check_equal(write(tmp_path, oracle, tensors, num_files=3), tensors)


def test_a_prefix_on_every_name(
    tmp_path: Path, oracle: DeepseekV4ForCausalLM, tensors: Tensors
) -> None:
    prefixed = {f"model.{name}": tensor for name, tensor in tensors.items()}
    check_equal(write(tmp_path, oracle, prefixed), tensors)


def test_as_transformers_saves_it(
    tmp_path: Path, oracle: DeepseekV4ForCausalLM, tensors: Tensors
) -> None:
    oracle.save_pretrained(tmp_path)
    check_equal(tmp_path, tensors)


def test_the_names_that_transformers_uses_in_memory(
    tmp_path: Path, oracle: DeepseekV4ForCausalLM, tensors: Tensors
) -> None:
    state = {name: tensor.clone() for name, tensor in oracle.state_dict().items()}
    check_equal(write(tmp_path, oracle, state), tensors)
    ours = {published(name) for name in state}
    plain = [name for name in ours if "mlp.experts" not in name]
    assert {transformers_name(name) for name in plain} == {
        n for n in state if "experts." not in n or "shared" in n
    }


@pytest.mark.parametrize("fp8_experts", [False, True])
def test_released_number_formats(
    tmp_path: Path, oracle: DeepseekV4ForCausalLM, tensors: Tensors, fp8_experts: bool
) -> None:
    stored, recovered = v4_formats.quantised(tensors, fp8_experts=fp8_experts)
    folder = write(tmp_path, oracle, stored)
    check_equal(folder, recovered)
    found = V4Checkpoint(folder, config_of(folder)).formats()
    assert ("I8" in found) != fp8_experts


def test_draft_stages_are_recognised(
    tmp_path: Path, oracle: DeepseekV4ForCausalLM, tensors: Tensors
) -> None:
    drafts = {f"mtp.{stage}.attn_norm.weight": torch.ones(64) for stage in range(3)}
    folder = write(tmp_path, oracle, tensors | drafts)
    assert V4Checkpoint(folder, config_of(folder)).num_draft_tensors == 3


def test_progress_counts_bytes(
    tmp_path: Path, oracle: DeepseekV4ForCausalLM, tensors: Tensors
) -> None:
    folder = write(tmp_path, oracle, tensors)
    told: list[tuple[int, int]] = []
    checkpoint = V4Checkpoint(folder, config_of(folder), on_progress=lambda *at: told.append(at))
    checkpoint.tensor("embed.weight", torch.float32)
    checkpoint.tensor("norm.weight", torch.float32)
    sizes = [tensors[name].nbytes for name in ("embed.weight", "norm.weight")]
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert told == [(sizes[0], total), (sum(sizes), total)]


def without(tensors: Tensors, name: str) -> Tensors:
    return {key: tensor for key, tensor in tensors.items() if key != name}


def test_what_is_missing_unknown_or_misshapen_is_named(
    tmp_path: Path, oracle: DeepseekV4ForCausalLM, tensors: Tensors
) -> None:
    stored, _ = v4_formats.quantised(tensors)
    cases = [
        (
            without(tensors, "layers.2.attn.compressor.ape"),
            "layers.2.attn.compressor.ape is missing",
        ),
        (without(tensors, "layers.3.ffn.experts.5.w3.weight"), "experts.5.w3.weight is missing"),
        (
            tensors | {"layers.0.attn.wz": torch.ones(2)},
            "1 tensors are not known, such as layers.0",
        ),
        (tensors | {"norm.weight": torch.ones(7)}, r"norm.weight is \[7\], expected \[64\]"),
        (without(stored, "layers.1.attn.wq_a.scale"), "wq_a.weight needs layers.1.attn.wq_a.scale"),
        (
            without(stored, "layers.1.ffn.experts.0.w2.scale"),
            "needs layers.1.ffn.experts.0.w2.scale",
        ),
        (tensors | {"model.norm.weight": torch.ones(64)}, "norm.weight is there twice"),
    ]
    for at, (held, text) in enumerate(cases):
        folder = write(tmp_path / str(at), oracle, held)
        with pytest.raises(ConfigError, match=text):
            V4Checkpoint(folder, config_of(folder))


def test_a_file_that_is_cut_short_or_no_safetensors(tmp_path: Path, folder: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    file = broken / "model.safetensors"
    whole = file.read_bytes()
    for data, text in (
        (whole[:-1], "is cut short"),
        (whole[:100], "corrupt or truncated"),
        (b"", "corrupt or truncated"),
        ((8).to_bytes(8, "little") + b"not json", "cannot be read"),
    ):
        file.write_bytes(data)
        with pytest.raises(ConfigError, match=text):
            V4Checkpoint(broken, config_of(broken))


def test_an_index_that_names_a_file_that_is_not_there(tmp_path: Path, folder: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    index = {"weight_map": {"norm.weight": "gone.safetensors"}}
    (broken / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"gone.safetensors: missing"):
        V4Checkpoint(broken, config_of(broken))


def test_a_type_that_is_not_known(tmp_path: Path, folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["norm.weight"] = tensors["norm.weight"].double()
    save_file(tensors, str(tmp_path / "model.safetensors"))
    shutil.copy(folder / "config.json", tmp_path)
    with pytest.raises(ConfigError, match=r"norm\.weight has the unsupported type F64"):
        V4Checkpoint(tmp_path, config_of(tmp_path))
