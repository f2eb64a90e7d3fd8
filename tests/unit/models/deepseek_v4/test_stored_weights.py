"""Weights that stay in memory as in the file: the same numbers, in the file's memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV4ForCausalLM

from finback.shared.errors import ConfigError
from finback.shared.models.deepseek_v4.checkpoint import V4Checkpoint
from finback.shared.models.deepseek_v4.load import WeightLoader
from finback.shared.models.deepseek_v4.memory import V4Memory
from finback.shared.models.deepseek_v4.network import V4Network
from finback.shared.models.held_weights import v4_held_bytes
from finback.shared.models.loader import load_model
from finback.shared.models.source import open_source
from finback.shared.offline.llm import LLM
from finback.shared.offline.params import SamplingParams
from support import v4_formats, v4_tiny
from support.v4_ranks import config_of
from support.v4_steps import prompt, step


def quantised_folder(path: Path, oracle: Any, *, fp8_experts: bool) -> Path:
    tensors = v4_tiny.published_tensors(oracle)
    stored, _ = v4_formats.quantised(tensors, fp8_experts=fp8_experts)
    return v4_tiny.write_folder(path, stored, v4_tiny.published_config(oracle.config))


def network(folder: Path, *, keeps_stored: bool) -> tuple[V4Network, int]:
    config = config_of(folder)
    loader = WeightLoader(V4Checkpoint(folder, config), config, keeps_stored=keeps_stored)
    weights = loader.load()
    return V4Network(config, weights), weights.num_bytes


@pytest.mark.parametrize("layout", ["fp4", "fp8", "plain", "transformers"])
def test_equal_to_the_dequantised_run(
    layout: str, tmp_path: Path, oracle: DeepseekV4ForCausalLM, folder: Path
) -> None:
    if layout == "transformers":
        oracle.save_pretrained(tmp_path)
        folder = tmp_path
    elif layout != "plain":
        folder = quantised_folder(tmp_path / "v4", oracle, fp8_experts=layout == "fp8")
    found = []
    for keeps_stored in (False, True):
        made, _ = network(folder, keeps_stored=keeps_stored)
        memory = V4Memory(made.config, num_blocks=4, num_slots=1)
        first = step((prompt(40), 0, 0, [1, 2]))
        second = step((prompt(3, seed=1), 40, 0, [1, 2]))
        found.append([made.logits(made.forward(batch, memory)) for batch in (first, second)])
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("fp8_experts", [False, True], ids=["fp4", "fp8"])
def test_memory_is_that_of_the_file_and_as_told_before(
    fp8_experts: bool, tmp_path: Path, oracle: DeepseekV4ForCausalLM
) -> None:
    folder = quantised_folder(tmp_path / "v4", oracle, fp8_experts=fp8_experts)
    config = config_of(folder)
    checkpoint = V4Checkpoint(folder, config)
    told = v4_held_bytes(checkpoint.inventory)
    _, stored = network(folder, keeps_stored=True)
    _, wide = network(folder, keeps_stored=False)
    assert stored == told["stored"] == sum(checkpoint.formats().values())
    assert wide == told["f32"]
    assert stored < wide / 2


def test_a_rank_holds_its_own_experts(tmp_path: Path, oracle: DeepseekV4ForCausalLM) -> None:
    folder = quantised_folder(tmp_path / "v4", oracle, fp8_experts=False)
    config = config_of(folder)
    held = V4Checkpoint(folder, config).hold((4, 1))
    whole = V4Checkpoint(folder, config).hold()
    loader = WeightLoader(V4Checkpoint(folder, config), config, experts=(4, 1), keeps_stored=True)
    layer = loader.load().layers[1]
    assert callable(layer)
    one_expert = layer().mixture.one_expert
    assert one_expert is not None
    gate_up, down = V4Checkpoint(folder, config).experts(1, (4, 1), torch.float32)
    assert torch.equal(one_expert(1)[0][0], gate_up[1])
    assert torch.equal(one_expert(0)[1][0], down[0])
    assert held < whole


def test_llm_serves_them(tmp_path: Path, oracle: DeepseekV4ForCausalLM) -> None:
    folder = quantised_folder(tmp_path / "v4", oracle, fp8_experts=False)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    ids = prompt(140).tolist()
    answers, sizes = [], []
    for dtype in ("auto", "stored"):
        with LLM(folder, num_threads=1, weights_dtype=dtype, max_model_len=512) as llm:
            answers.append(llm.generate([ids], params)[0].token_ids)
            sizes.append(llm.stats().weights_bytes)
    assert answers[0] == answers[1]
    assert sizes[1] < sizes[0] / 2


def test_other_families_keep_theirs_by_auto() -> None:
    with pytest.raises(ConfigError, match="'stored', which is for deepseek_v4 models"):
        load_model(open_source(), weights_dtype="stored")
