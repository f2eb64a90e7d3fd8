"""Experts over several processes (gloo): the same logits as in one, in both forms of the exchange."""

from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from finback.shared.models.deepseek_v4.network import V4Network
from finback.shared.models.deepseek_v4.placement import ExpertPlacement, even_placement
from support.v4_ranks import logits_of, rank_main


@pytest.mark.parametrize(
    "placement",
    [even_placement(6, 2), even_placement(6, 4, replicated=(2, 5))],
    ids=["two ranks", "four ranks, two replicas"],
)
def test_ranks_together_are_one_model(
    placement: ExpertPlacement, folder: Path, network: V4Network, tmp_path: Path
) -> None:
    size = placement.num_ranks
    spawn = get_context("spawn")
    ranks = [
        spawn.Process(target=rank_main, args=(rank, placement, folder, tmp_path), daemon=True)
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=90)
    assert [process.exitcode for process in ranks] == [0] * size
    for rank in range(size):
        found = torch.load(tmp_path / f"{rank}.pt")
        expected = logits_of(network, rank, is_idle=rank == size - 1)
        for form in ("exact", "fixed"):
            torch.testing.assert_close(found[form], expected, atol=2e-5, rtol=0)


def test_an_even_placement() -> None:
    assert even_placement(6, 2).held == ((0, 1, 2), (3, 4, 5))
    placement = even_placement(6, 4, replicated=(2, 5))
    assert placement.held == ((5, 2), (0, 1), (2, 3), (4, 5))
    assert placement.places()[2] == [1, 4]


@pytest.mark.parametrize(
    ("held", "text"),
    [(((0, 1), (2,)), "same number"), (((0, 1), (1, 3)), "have no place"), (((),), "at least one")],
)
def test_a_placement_that_is_none(held: tuple[tuple[int, ...], ...], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ExpertPlacement(num_experts=4, held=held)
    with pytest.raises(ValueError, match="not a multiple"):
        even_placement(6, 4)
