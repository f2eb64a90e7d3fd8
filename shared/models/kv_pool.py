"""The device's KV blocks and their packing into the canonical host layout."""

import math
import warnings
from typing import Final, Literal

import numpy as np
import torch

from finback.shared.errors import ConfigError
from finback.shared.models.touch import touch

KvDtype = Literal["f32", "bf16", "f16"]
DTYPES: Final = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
_BITS: Final = {2: torch.int16, 4: torch.int32}
"""Types of the same width that NumPy knows as well."""


class KVPool:
    """`k[layer]` and `v[layer]` hold `num_blocks` blocks.

    Layout "token_major": both [num_blocks, block_size, num_kv_heads, head_dim].
    Layout "head_major": k [num_blocks, num_kv_heads, head_dim, block_size] (so that scores of
    neighbouring tokens are computed in one vector), v [num_blocks, num_kv_heads, block_size, head_dim].
    Whatever the layout, a packed block is [layer, k/v, token, head, dim].
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        kv_dtype: str,
        device: str = "cpu",
        layout: Literal["token_major", "head_major"] = "token_major",
    ) -> None:
        if kv_dtype not in DTYPES:
            raise ConfigError(f"kv_dtype is {kv_dtype!r}; use one of {', '.join(DTYPES)}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_layers = num_layers
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.kv_dtype = kv_dtype
        self.layout = layout
        if layout == "head_major":
            # A block's layers lie side by side: memory is touched as blocks are used, a few at a time,
            # where a slab for each layer would touch a huge page of every slab for the first block.
            k_shape = (num_blocks, num_layers, num_kv_heads, head_dim, block_size)
            v_shape = (num_blocks, num_layers, num_kv_heads, block_size, head_dim)
            self.k = _zeros(k_shape, DTYPES[kv_dtype], device).transpose(0, 1)
            self.v = _zeros(v_shape, DTYPES[kv_dtype], device).transpose(0, 1)
        else:
            k_shape = v_shape = (num_layers, num_blocks, block_size, num_kv_heads, head_dim)
            self.k = _zeros(k_shape, DTYPES[kv_dtype], device)
            self.v = _zeros(v_shape, DTYPES[kv_dtype], device)

    @property
    def block_bytes(self) -> int:
        """Bytes of a full packed block."""
        return self.num_bytes(self.block_size)

    def num_bytes(self, num_tokens: int) -> int:
        """Bytes of a packed block of `num_tokens` tokens."""
        item = self.k.element_size()
        return 2 * self.num_layers * num_tokens * self.num_kv_heads * self.head_dim * item

    def token_major(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of a layer as [num_blocks, block_size, num_kv_heads, head_dim], in any layout."""
        if self.layout == "head_major":
            return self.k[layer].permute(0, 3, 1, 2), self.v[layer].permute(0, 2, 1, 3)
        return self.k[layer], self.v[layer]

    def pack_block(
        self, block_id: int, num_tokens: int, out: bytes | bytearray | memoryview
    ) -> None:
        """Write the first `num_tokens` tokens of a block to `out`, `num_bytes(num_tokens)` bytes."""
        host = self._host_view(num_tokens, out)
        for kv, part in enumerate(self._block_views(block_id, num_tokens)):
            _copy(host[:, kv], part)

    def unpack_block(
        self, block_id: int, num_tokens: int, data: bytes | bytearray | memoryview
    ) -> None:
        """Read what `pack_block` wrote into a block of this pool."""
        host = self._host_view(num_tokens, data)
        for kv, part in enumerate(self._block_views(block_id, num_tokens)):
            _copy(part, host[:, kv])

    def unpack_layers(self, block_id: int, first: int, end: int, data: memoryview) -> None:
        """Read layers `first` to `end` - 1 of a full packed block, [layer, k/v, token, head, dim]."""
        size, heads, dim = self.block_size, self.num_kv_heads, self.head_dim
        flat = torch.frombuffer(data, dtype=DTYPES[self.kv_dtype])
        host = flat.view(end - first, 2, size, heads, dim)
        for kv, part in enumerate(self._block_views(block_id, size)):
            _copy(part[first:end], host[:, kv])

    def gather_block(self, block_id: int, num_tokens: int) -> torch.Tensor:
        """The block in the host layout, on the pool's device: [layer, k/v, token, head, dim]."""
        return torch.stack(self._block_views(block_id, num_tokens), dim=1)

    def scatter_block(self, block_id: int, num_tokens: int, packed: torch.Tensor) -> None:
        """What `gather_block` gave, into a block of this pool."""
        for kv, part in enumerate(self._block_views(block_id, num_tokens)):
            part.copy_(packed[:, kv])

    def empty_block(self, num_tokens: int) -> torch.Tensor:
        """Room on the pool's device for what `gather_block` gives."""
        shape = (self.num_layers, 2, num_tokens, self.num_kv_heads, self.head_dim)
        return torch.empty(shape, dtype=self.k.dtype, device=self.k.device)

    def copy_block(self, source: int, target: int) -> None:
        """Copy a block inside the pool."""
        self.k[:, target].copy_(self.k[:, source])
        self.v[:, target].copy_(self.v[:, source])

    def touch(self, first: int, end: int) -> bool:
        """Make the memory of these blocks ready, on the host; see `touch`. False: nothing was done."""
        if self.k.device.type != "cpu" or self.layout != "head_major" or first >= end:
            return False
        parts = (self.k.transpose(0, 1)[first:end], self.v.transpose(0, 1)[first:end])
        return all(touch(part.view(_BITS[part.element_size()]).numpy()) for part in parts)

    def _block_views(self, block_id: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[layer, token, head, dim] views of one block."""
        k, v = self.k[:, block_id], self.v[:, block_id]
        if self.layout == "head_major":
            k, v = k.permute(0, 3, 1, 2), v.permute(0, 2, 1, 3)
        return k[:, :num_tokens], v[:, :num_tokens]

    def _host_view(self, num_tokens: int, data: bytes | bytearray | memoryview) -> torch.Tensor:
        """The buffer as [layer, k/v, token, head, dim]."""
        view = memoryview(data).cast("B")
        if not 0 < num_tokens <= self.block_size or view.nbytes != self.num_bytes(num_tokens):
            raise ValueError(
                f"{view.nbytes} bytes do not hold {num_tokens} tokens "
                f"({self.num_bytes(num_tokens)} bytes; blocks hold {self.block_size} tokens)"
            )
        with warnings.catch_warnings():
            # A read-only buffer is only ever read from: unpack_block copies out of it.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            flat = torch.frombuffer(view, dtype=DTYPES[self.kv_dtype])
        return flat.view(self.num_layers, 2, num_tokens, self.num_kv_heads, self.head_dim)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy equal shapes and types. On the host by NumPy: a block is too small for torch's threads,
    which wait for one another where the cores are busy.
    """
    if target.device.type != "cpu" or source.device.type != "cpu":
        target.copy_(source)
        return
    as_bits = _BITS[target.element_size()]
    np.copyto(target.view(as_bits).numpy(), source.view(as_bits).numpy())


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Zeros, since masked places must hold finite numbers; host pages appear with their first use."""
    if device != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    flat = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(flat).view(dtype).view(shape)
