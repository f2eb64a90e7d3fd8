"""Which rank holds which expert: logical experts to physical places, replicas allowed. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPlacement:
    """`held[rank]` lists the logical experts of a rank by slot; all ranks have as many slots.

    The physical number of a place is rank * num_slots + slot.
    """

    num_experts: int
    held: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if len({len(slots) for slots in self.held}) != 1 or not self.held[0]:
            raise ValueError("every rank must hold the same number of experts, at least one")
        everywhere = {expert for slots in self.held for expert in slots}
        if everywhere != set(range(self.num_experts)):
            raise ValueError(f"experts {set(range(self.num_experts)) ^ everywhere} have no place")

    @property
    def num_ranks(self) -> int:
        """Ranks of the group."""
        return len(self.held)

    @property
    def num_slots(self) -> int:
        """Experts a rank holds, replicas counted."""
        return len(self.held[0])

    def places(self) -> list[list[int]]:
        """Physical numbers of every logical expert's replicas, ascending."""
        found: list[list[int]] = [[] for _ in range(self.num_experts)]
        for rank, slots in enumerate(self.held):
            for slot, expert in enumerate(slots):
                found[expert].append(rank * self.num_slots + slot)
        return found


def even_placement(
    num_experts: int, num_ranks: int, replicated: Sequence[int] = ()
) -> ExpertPlacement:
    """Contiguous shares; `replicated` experts get a second place, far from their first.

    Raises ValueError unless experts and replicas can be shared out evenly.
    """
    total = num_experts + len(replicated)
    if total % num_ranks:
        raise ValueError(
            f"{num_experts} experts and {len(replicated)} replicas are not a multiple of "
            f"{num_ranks} ranks"
        )
    num_slots = total // num_ranks
    # The replicas stand in front, so that they come to lie on other ranks than their originals.
    order = [*sorted(replicated, reverse=True), *range(num_experts)]
    held = tuple(tuple(order[at : at + num_slots]) for at in range(0, total, num_slots))
    return ExpertPlacement(num_experts=num_experts, held=held)
