"""Which experts a token goes to, and with what weight; plain torch."""

import torch


def route_experts(
    logits: torch.Tensor,
    *,
    top_k: int,
    scaling: float,
    bias: torch.Tensor | None = None,
    experts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(experts int64 [N, top_k], weights float32 [N, top_k]) from float32 logits [N, num_experts].

    s = sqrt(softplus(logits)). Score-routed: the best of s + bias, where `bias` [num_experts] decides
    the choice only. Hash-routed: `experts` [N, top_k] is given. Weights are s at the chosen, divided
    by their sum, times `scaling`. Of equal scores the lower expert wins.
    """
    scores = torch.nn.functional.softplus(logits.float()).sqrt()
    if experts is None:
        ranked = scores if bias is None else scores + bias.float()
        experts = ranked.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    chosen = scores.gather(1, experts.long())
    return experts.long(), chosen / chosen.sum(dim=1, keepdim=True) * scaling
