"""Inputs of kernel tests, and the device they run on: the interpreter's CPU or an NVIDIA device."""

import os
from dataclasses import dataclass

import torch


def device() -> str:
    """Where Triton kernels run in this process."""
    return "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


def matrix_dtype() -> torch.dtype:
    """The 16-bit type of matrices: the interpreter multiplies bfloat16 as if it were integers."""
    return torch.float16 if device() == "cpu" else torch.bfloat16


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """Standard normal float32 of one's own, made on the CPU so that every device sees the same."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(*shape, generator=generator) * scale).to(device())


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """|found - wanted| / |wanted| over all elements, in float64; NaN never passes a comparison."""
    difference = (found.double() - wanted.double()).norm()
    return float(difference / wanted.double().norm().clamp(min=1e-30))


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Head counts and width of an attention layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def qkv_size(self) -> int:
        """Width of the merged projection."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


QWEN3_06B = Heads(num_heads=16, num_kv_heads=8, head_dim=128)
QWEN3_8B = Heads(num_heads=32, num_kv_heads=8, head_dim=128)
SMOLLM2 = Heads(num_heads=9, num_kv_heads=3, head_dim=64)


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedCase:
    """Filled blocks, and tables that name them in a shuffled order."""

    k_blocks: torch.Tensor
    v_blocks: torch.Tensor
    block_tables: torch.Tensor
    context_lens: torch.Tensor


def paged_case(heads: Heads, context_lens: list[int], block_size: int = 64) -> PagedCase:
    """Blocks for the contexts; blocks that no context uses hold NaN, so that reading one shows."""
    most = max(max(context_lens), 1)
    width = -(-most // block_size)
    num_blocks = len(context_lens) * width + 1
    shape = (num_blocks, block_size, heads.num_kv_heads, heads.head_dim)
    k = normal(*shape, seed=1).to(matrix_dtype())
    v = normal(*shape, seed=2).to(matrix_dtype())
    order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(3)) + 1
    tables = order.view(len(context_lens), width).int()
    for s, context_len in enumerate(context_lens):
        unused = tables[s, -(-context_len // block_size) :].long().to(k.device)
        k[unused] = float("nan")
        v[unused] = float("nan")
    k[0] = v[0] = float("nan")
    return PagedCase(
        k_blocks=k,
        v_blocks=v,
        block_tables=tables.to(k.device),
        context_lens=torch.tensor(context_lens, dtype=torch.int32, device=k.device),
    )


def angles(num_positions: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, [num_positions, head_dim / 2] float32."""
    frequencies = 10_000.0 ** (-torch.arange(0, head_dim, 2).float() / head_dim)
    phase = torch.arange(num_positions).float()[:, None] * frequencies[None, :]
    return phase.cos().to(device()), phase.sin().to(device())
