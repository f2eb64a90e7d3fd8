"""A compressor's projected rows into its state, in one Triton kernel."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# (a Triton kernel's arguments have no Python types, and its decorator has none at all)

import torch
import triton
import triton.language as tl


@triton.jit
def _store(
    projected_ptr, bias_ptr, positions_ptr, places_ptr, contents_ptr, gates_ptr, row_stride,
    num_channels, ratio, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < num_channels
    place = tl.load(places_ptr + row)
    phase = tl.load(positions_ptr + row) % ratio
    start = projected_ptr + row * row_stride
    content = tl.load(start + at, mask=inside).to(tl.float32)
    gate = tl.load(start + num_channels + at, mask=inside).to(tl.float32)
    gate += tl.load(bias_ptr + phase * num_channels + at, mask=inside)
    tl.store(contents_ptr + place * num_channels + at, content, mask=inside)
    tl.store(gates_ptr + place * num_channels + at, gate, mask=inside)


def store_tail(
    projected: torch.Tensor,
    bias: torch.Tensor,
    positions: torch.Tensor,
    places: torch.Tensor,
    contents: torch.Tensor,
    gates: torch.Tensor,
) -> None:
    """See reference.py; rows of `projected` may be any distance apart."""
    ratio, num_channels = bias.shape
    if projected.shape[0]:
        _store[(projected.shape[0],)](
            projected, bias, positions, places, contents, gates, projected.stride(0),
            num_channels, ratio, BLOCK=triton.next_power_of_2(num_channels), num_warps=4,
        )  # fmt: skip
