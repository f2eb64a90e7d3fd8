"""The mixture of experts of every layer, routed by a stored table or by score."""

import torch

from finback.kernels.expert_mlp.reference import clamped_gate, expert_mlp
from finback.kernels.route_experts.reference import route_experts
from finback.shared.models.deepseek_v4.config import V4Config
from finback.shared.models.deepseek_v4.weights import MixtureWeights


class Mixture:
    """One layer's experts; all of them are here."""

    def __init__(self, config: V4Config, weights: MixtureWeights) -> None:
        self._config = config
        self._weights = weights

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
        routed = expert_mlp(
            hidden,
            weights.expert_gate_up,
            weights.expert_down,
            experts,
            shares,
            limit=config.swiglu_limit,
        )
        inner = clamped_gate(hidden @ weights.shared_gate_up.t(), config.swiglu_limit)
        shared = inner.to(hidden.dtype) @ weights.shared_down.t()
        return (routed + shared.float()).to(hidden.dtype)
