"""The ranks of a V4 model whose experts are shared out: what each process of a test runs."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from finback.shared.models.deepseek_v4.checkpoint import V4Checkpoint
from finback.shared.models.deepseek_v4.config import V4Config, read_config
from finback.shared.models.deepseek_v4.expert_exchange import GroupExchange
from finback.shared.models.deepseek_v4.load import WeightLoader
from finback.shared.models.deepseek_v4.memory import V4Memory
from finback.shared.models.deepseek_v4.network import V4Network
from finback.shared.models.deepseek_v4.placement import ExpertPlacement
from finback.shared.models.hf_source import read_json
from support.v4_steps import prompt, step


def config_of(folder: Path) -> V4Config:
    """The config of a folder."""
    path = folder / "config.json"
    return read_config(path, read_json(path, required=True))


# Of unequal lengths; the last rank has nothing to do in the second step.
LENGTHS = (33, 5, 21, 12)
BLOCKS = [1, 3]


def logits_of(network: V4Network, rank: int, *, is_idle: bool) -> torch.Tensor:
    """A prompt and, unless idle, one token more."""
    memory = V4Memory(network.config, num_blocks=4, num_slots=1)
    ids = prompt(LENGTHS[rank], seed=rank)
    first = network.logits(network.forward(step((ids, 0, 0, BLOCKS)), memory))
    more = prompt(0 if is_idle else 1, seed=rank + 50)
    batch = step((more, ids.numel(), 0, BLOCKS))
    return torch.cat((first, network.logits(network.forward(batch, memory))))


def rank_main(rank: int, placement: ExpertPlacement, folder: Path, where: Path) -> None:
    """Both forms of the exchange; the logits go to `where`."""
    torch.set_num_threads(1)
    size = placement.num_ranks
    dist.init_process_group(
        "gloo",
        init_method=f"file://{where}/store",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
    )
    config = config_of(folder)
    loader = WeightLoader(V4Checkpoint(folder, config), config, experts=placement.held[rank])
    group = dist.group.WORLD
    assert group is not None
    exchange = GroupExchange(placement, group)
    network = V4Network(config, loader.load(), exchange=exchange)
    with torch.no_grad():
        found: dict[str, Any] = {"exact": logits_of(network, rank, is_idle=rank == size - 1)}
        exchange.set_capacity(max(LENGTHS) * config.num_experts_per_token)
        found["fixed"] = logits_of(network, rank, is_idle=rank == size - 1)
    torch.save(found, where / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
