from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import DeepseekV4ForCausalLM

from finback.shared.models.deepseek_v4.checkpoint import V4Checkpoint
from finback.shared.models.deepseek_v4.config import V4Config
from finback.shared.models.deepseek_v4.load import WeightLoader
from finback.shared.models.deepseek_v4.memory import V4Memory
from finback.shared.models.deepseek_v4.network import V4Network
from support import v4_tiny
from support.v4_ranks import config_of


@pytest.fixture(scope="session")
def oracle() -> DeepseekV4ForCausalLM:
    return v4_tiny.tiny_model()


@pytest.fixture(scope="session")
def folder(oracle: DeepseekV4ForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return v4_tiny.write_folder(
        tmp_path_factory.mktemp("v4") / "published",
        v4_tiny.published_tensors(oracle),
        v4_tiny.published_config(oracle.config),
    )


def network_of(folder: Path) -> V4Network:
    config = config_of(folder)
    return V4Network(config, WeightLoader(V4Checkpoint(folder, config), config).load())


@pytest.fixture(scope="session")
def config(folder: Path) -> V4Config:
    return config_of(folder)


@pytest.fixture(scope="session")
def network(folder: Path) -> V4Network:
    return network_of(folder)


@pytest.fixture
def memory(config: V4Config) -> V4Memory:
    """Filled with what must never be read."""
    made = V4Memory(config, num_blocks=12, num_slots=4, num_spare=5)
    spoil(made)
    return made


def spoil(memory: V4Memory, *, blocks: bool = True) -> None:
    """Rows of a former owner."""
    for layer in memory.layers:
        layer.ring.fill_(torch.nan)
        for tail in (layer.tail, layer.index_tail):
            if tail is not None:
                tail.contents.fill_(torch.nan)
                tail.gates.fill_(torch.nan)
        for table in (layer.entries, layer.index_keys) if blocks else ():
            if table is not None:
                table.fill_(torch.nan)


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield
