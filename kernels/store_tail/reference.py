"""A compressor's projected rows into its state, in plain torch."""

import torch


def store_tail(
    projected: torch.Tensor,
    bias: torch.Tensor,
    positions: torch.Tensor,
    places: torch.Tensor,
    contents: torch.Tensor,
    gates: torch.Tensor,
) -> None:
    """projected [N, 2C]: contents, then gates. bias [ratio, C] float32 is added to a token's gates by
    its position's phase; rows go to `places` int64 [N] of contents and gates, float32 [M, C].
    """
    content, gate = projected.float().chunk(2, dim=1)
    contents[places] = content
    gates[places] = gate + bias[positions % bias.shape[0]]
