"""The mixture of experts of every layer, routed by a stored table or by score."""

from collections.abc import Callable

import torch

from finback.kernels.expert_mlp.reference import clamped_gate, expert_mlp
from finback.kernels.route_experts.reference import route_experts
from finback.shared.models.deepseek_v4.config import V4Config
from finback.shared.models.deepseek_v4.expert_exchange import ExpertExchange
from finback.shared.models.deepseek_v4.weights import MixtureWeights


class Mixture:
    """One layer's experts; the routed ones may be shared out over ranks."""

    def __init__(self, config: V4Config, weights: MixtureWeights, exchange: ExpertExchange) -> None:
        self._config = config
        self._weights = weights
        self._exchange = exchange

    def __call__(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, d], normed -> [N, d]. A hash-routed layer needs the token ids [N]."""
        config, weights = self._config, self._weights
        experts, shares = route_experts(
            hidden.float() @ weights.gate.float().t(),
            top_k=config.num_experts_per_token,
            scaling=config.routed_scaling,
            bias=weights.bias,
            experts=None if weights.table is None else weights.table[token_ids],
        )
        routed = self._exchange(hidden, experts, shares, self._own)
        inner = clamped_gate(hidden @ weights.shared_gate_up.t(), config.swiglu_limit)
        shared = inner.to(hidden.dtype) @ weights.shared_down.t()
        return (routed + shared.float()).to(hidden.dtype)

    def _own(self, rows: torch.Tensor, slots: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """The experts that are held here, one a row."""
        if self._weights.one_expert is not None:
            return self._one_by_one(rows, slots, shares, self._weights.one_expert)
        return expert_mlp(
            rows,
            self._weights.expert_gate_up,
            self._weights.expert_down,
            slots[:, None],
            shares[:, None],
            limit=self._config.swiglu_limit,
        )

    def _one_by_one(
        self,
        rows: torch.Tensor,
        slots: torch.Tensor,
        shares: torch.Tensor,
        one_expert: Callable[[int], tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        """The same with experts that are made when they are used, one at a time."""
        found = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
        for slot in sorted(set(slots[slots >= 0].tolist())):
            at = (slots == slot).nonzero().flatten()
            found[at] = expert_mlp(
                rows[at],
                *one_expert(slot),
                torch.zeros_like(slots[at])[:, None],
                shares[at][:, None],
                limit=self._config.swiglu_limit,
            )
        return found
