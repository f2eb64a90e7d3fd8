"""There and back between the two sets of names; transformers itself reads what is made for it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import DeepseekV4ForCausalLM

from finback.services.supervisor.cli_convert import convert as command
from finback.shared.errors import ConfigError
from finback.shared.models.deepseek_v4.convert import convert
from support import v4_formats, v4_tiny
from support.v4_ranks import config_of
from support.v4_steps import prompt


def held(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dict
    return found


def loaded_by_transformers(folder: Path) -> DeepseekV4ForCausalLM:
    model: DeepseekV4ForCausalLM = DeepseekV4ForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    model.set_experts_implementation("eager")
    return model


def check_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def test_there_and_back(tmp_path: Path, folder: Path, oracle: DeepseekV4ForCausalLM) -> None:
    told: list[tuple[int, int]] = []
    files = convert(
        folder,
        tmp_path / "hf",
        layout="transformers",
        max_shard_bytes=100_000,
        on_progress=lambda *at: told.append(at),
    )
    assert len(files) > 2
    assert told[-1][0] == told[-1][1]
    check_same(held(tmp_path / "hf"), oracle.state_dict())
    model = loaded_by_transformers(tmp_path / "hf")
    ids = prompt(150)
    assert torch.equal(v4_tiny.oracle_logits(model, ids), v4_tiny.oracle_logits(oracle, ids))
    convert(tmp_path / "hf", tmp_path / "back", layout="published")
    check_same(held(tmp_path / "back"), held(folder))
    first, last = config_of(folder), config_of(tmp_path / "back")
    assert first == last == config_of(tmp_path / "hf")


@pytest.mark.parametrize("fp8_experts", [False, True], ids=["fp4", "fp8"])
def test_released_formats_are_held_exactly_by_bf16(
    tmp_path: Path, oracle: DeepseekV4ForCausalLM, fp8_experts: bool
) -> None:
    tensors = v4_tiny.published_tensors(oracle)
    stored, recovered = v4_formats.quantised(tensors, fp8_experts=fp8_experts)
    raw = v4_tiny.published_config(oracle.config, quantization_config={"quant_method": "fp8"})
    v4_tiny.write_folder(tmp_path / "v4", stored, raw, num_files=2)
    convert(tmp_path / "v4", tmp_path / "plain", layout="published")
    found = held(tmp_path / "plain")
    assert found.keys() == recovered.keys()
    assert all(torch.equal(found[name].float(), recovered[name].float()) for name in found)
    assert found["layers.0.attn.wq_a.weight"].dtype == torch.bfloat16
    assert found["layers.0.hc_attn_fn"].dtype == torch.float32
    convert(tmp_path / "v4", tmp_path / "hf", layout="transformers", dtype="f32")
    plain = v4_tiny.write_folder(
        tmp_path / "wide",
        {name: t if "tid2eid" in name else t.float() for name, t in recovered.items()},
        v4_tiny.published_config(oracle.config),
    )
    ids = prompt(40)
    ours, theirs = (loaded_by_transformers(at) for at in (tmp_path / "hf", plain))
    assert torch.equal(v4_tiny.oracle_logits(ours, ids), v4_tiny.oracle_logits(theirs, ids))
    assert "quantization_config" not in json.loads((tmp_path / "hf" / "config.json").read_text())


def test_draft_stages_stay_where_they_have_names(
    tmp_path: Path, oracle: DeepseekV4ForCausalLM
) -> None:
    drafts = {"mtp.0.attn_norm.weight": torch.ones(64)}
    tensors = v4_tiny.published_tensors(oracle) | drafts
    v4_tiny.write_folder(tmp_path / "v4", tensors, v4_tiny.published_config(oracle.config))
    convert(tmp_path / "v4", tmp_path / "hf", layout="transformers")
    convert(tmp_path / "v4", tmp_path / "same", layout="published")
    assert not any("mtp" in name for name in held(tmp_path / "hf"))
    check_same(held(tmp_path / "same"), tensors)


def test_what_cannot_be_converted_is_told_before_anything_is_written(
    tmp_path: Path, folder: Path, oracle: DeepseekV4ForCausalLM, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = v4_tiny.published_tensors(oracle)
    del tensors["layers.3.ffn.experts.5.w3.weight"]
    raw = v4_tiny.published_config(oracle.config)
    broken = v4_tiny.write_folder(tmp_path / "broken", tensors, raw)
    out = tmp_path / "out"
    options = {"layout": "transformers", "dtype": "auto", "max_shard_bytes": 1 << 20}
    assert command(broken, out, **options) == 1  # type: ignore[arg-type]  # mixed by purpose
    assert "experts.5.w3.weight is missing" in capsys.readouterr().err
    assert not out.exists()
    with pytest.raises(ConfigError, match="new or empty"):
        convert(folder, tmp_path, layout="published")
    with pytest.raises(ConfigError, match="--to is 'other'"):
        convert(folder, out, layout="other")
    assert command(folder, out, **options) == 0  # type: ignore[arg-type]  # as above
    assert "transformers names" in capsys.readouterr().out
