"""Experts shared out over ranks: rows go to the ranks that hold their experts, and come back.

Two forms with the same result. *Exact* sends as many rows as there are, which both sides must be
told first (prompts). *Fixed* sends a constant number of rows to every rank, some of them void, so
that nothing depends on values on the host and a step can be captured (decoding). A rank without
work takes part all the same. What comes back is added up in the order of a row's own choices, so
that the sum does not depend on how many ranks there are.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from finback.shared.models.deepseek_v4.placement import ExpertPlacement

# (rows [P, d], slots int64 [P], weights float32 [P]) -> float32 [P, d]; slot -1 is a void row.
OwnExperts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class ExpertExchange(Protocol):
    """Where the experts' part of a layer is computed."""

    def __call__(
        self, hidden: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, own: OwnExperts
    ) -> torch.Tensor:
        """hidden [N, d], logical experts int64 [N, k], weights [N, k] -> float32 [N, d]."""
        ...


class LocalExchange:
    """All experts are here."""

    def __call__(
        self, hidden: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, own: OwnExperts
    ) -> torch.Tensor:
        """See `ExpertExchange`."""
        num_choices = experts.shape[1]
        rows = hidden.repeat_interleave(num_choices, dim=0)
        return _added(own(rows, experts.flatten(), weights.flatten()), num_choices)


class _Sent(NamedTuple):
    """Rows in the order in which they leave, and where each of them stands in that order."""

    rows: torch.Tensor
    slots: torch.Tensor
    weights: torch.Tensor
    at: torch.Tensor


class GroupExchange:
    """Experts over the ranks of a process group (gloo on CPUs, NCCL on GPUs).

    `capacity`: rows that a rank sends to each other one in the fixed form; None: the exact form. In the
    fixed form a step of N rows of k choices needs a capacity of N * k, so that none is ever dropped.
    """

    def __init__(
        self,
        placement: ExpertPlacement,
        group: dist.ProcessGroup,
        *,
        capacity: int | None = None,
        device: str = "cpu",
    ) -> None:
        if placement.num_ranks != group.size():
            raise ValueError(f"{placement.num_ranks} ranks are placed, {group.size()} are there")
        self._group = group
        self._rank = group.rank()
        self._capacity = capacity
        places = placement.places()
        most = max(map(len, places))
        self._num_slots = placement.num_slots
        self._num_places = torch.tensor([len(found) for found in places], device=device)
        padded = [found + [-1] * (most - len(found)) for found in places]
        self._places = torch.tensor(padded, device=device)

    def set_capacity(self, capacity: int | None) -> None:
        """Change the form, on all ranks between the same two steps."""
        self._capacity = capacity

    def __call__(
        self, hidden: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, own: OwnExperts
    ) -> torch.Tensor:
        """See `ExpertExchange`."""
        num_choices = experts.shape[1]
        places = self._chosen_places(experts).flatten()
        rows = hidden.repeat_interleave(num_choices, dim=0)
        ranks, slots = places // self._num_slots, places % self._num_slots
        if self._capacity is None:
            back, at = self._exact(rows, ranks, slots, weights.flatten(), own)
        else:
            back, at = self._fixed(rows, ranks, slots, weights.flatten(), own, self._capacity)
        return _added(back[at], num_choices)

    def _chosen_places(self, experts: torch.Tensor) -> torch.Tensor:
        """Replicas take turns by row, beginning with this rank's number."""
        turns = torch.arange(experts.shape[0], device=experts.device)[:, None] + self._rank
        return self._places[experts, turns % self._num_places[experts]]

    def _exact(
        self,
        rows: torch.Tensor,
        ranks: torch.Tensor,
        slots: torch.Tensor,
        weights: torch.Tensor,
        own: OwnExperts,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        order = ranks.argsort(stable=True)
        leaving = torch.bincount(ranks, minlength=self._group.size())
        coming = torch.empty_like(leaving)
        dist.all_to_all_single(coming, leaving, group=self._group)
        sizes = leaving.tolist(), coming.tolist()
        mine = own(
            self._swapped(rows[order], *sizes),
            self._swapped(slots[order], *sizes),
            self._swapped(weights[order], *sizes),
        )
        return self._swapped(mine, sizes[1], sizes[0]), order.argsort()

    def _fixed(
        self,
        rows: torch.Tensor,
        ranks: torch.Tensor,
        slots: torch.Tensor,
        weights: torch.Tensor,
        own: OwnExperts,
        capacity: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if rows.shape[0] > capacity:
            raise ValueError(f"{rows.shape[0]} rows do not fit into a capacity of {capacity}")
        is_to = ranks[:, None] == torch.arange(self._group.size(), device=ranks.device)
        within = is_to.cumsum(0).gather(1, ranks[:, None])[:, 0] - 1
        at = ranks * capacity + within
        num_places = self._group.size() * capacity
        sent = _Sent(
            rows=rows.new_zeros((num_places, rows.shape[1])).index_copy_(0, at, rows),
            slots=slots.new_full((num_places,), -1).index_copy_(0, at, slots),
            weights=weights.new_zeros((num_places,)).index_copy_(0, at, weights),
            at=at,
        )
        mine = own(self._swapped(sent.rows), self._swapped(sent.slots), self._swapped(sent.weights))
        return self._swapped(mine), sent.at

    def _swapped(
        self, data: torch.Tensor, leaving: list[int] | None = None, coming: list[int] | None = None
    ) -> torch.Tensor:
        num_coming = data.shape[0] if coming is None else sum(coming)
        found = data.new_empty((num_coming, *data.shape[1:]))
        dist.all_to_all_single(found, data.contiguous(), coming, leaving, group=self._group)
        return found


def _added(each: torch.Tensor, num_choices: int) -> torch.Tensor:
    """[N * k, d] -> [N, d], one choice after the other."""
    by_choice = each.view(each.shape[0] // num_choices, num_choices, each.shape[1])
    total = by_choice[:, 0].clone()
    for choice in range(1, num_choices):
        total += by_choice[:, choice]
    return total
