"""The experts of a mixture, each on the rows that were routed to it; plain torch."""

import torch


def expert_mlp(
    hidden: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    *,
    limit: float,
) -> torch.Tensor:
    """sum over a row's experts of down(weight * silu(min(gate, limit)) * clamp(up, -limit, limit)).

    hidden [N, d]; gate_up [E, 2f, d], gate in the first half; down [E, d, f]; experts int64 [N, k],
    -1 is none (it is another rank's); weights [N, k]. Returns float32 [N, d].
    """
    total = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    for expert in sorted(set(experts[experts >= 0].tolist())):
        rows, slots = (experts == expert).nonzero(as_tuple=True)
        inner = clamped_gate(hidden[rows] @ gate_up[expert].t(), limit)
        inner = (inner * weights[rows, slots, None].float()).to(hidden.dtype)
        total.index_add_(0, rows, (inner @ down[expert].t()).float())
    return total


def clamped_gate(gate_up: torch.Tensor, limit: float) -> torch.Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit) of gate_up [N, 2f], float32 [N, f]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return torch.nn.functional.silu(gate) * up
