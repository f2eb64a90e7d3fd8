"""Block KV of a V4 model: compressed entries and index keys in pages of 128 tokens."""

import warnings
from collections.abc import Iterator

import torch

from finback.shared.models.deepseek_v4.config import BLOCK_TOKENS, V4Config
from finback.shared.models.deepseek_v4.memory_shape import has_indexer
from finback.shared.models.kv_pool import DTYPES, KVPool


class V4Pool(KVPool):
    """A pool with the interface of `KVPool`, whose pages hold entries instead of keys and values.

    `entries[layer]` [num_blocks * per_block, head_dim] and `index_keys[layer]` are None for layers that
    have none. A packed block is: layer by layer the entries of its tokens, then their index keys; the
    rest of its bytes (see `V4Config.kv_geometry`) is zero.
    """

    def __init__(
        self, config: V4Config, *, num_blocks: int, kv_dtype: str, device: str = "cpu"
    ) -> None:
        geometry = config.kv_geometry(BLOCK_TOKENS, kv_dtype)
        super().__init__(
            num_blocks=1,  # its own tables are not used
            block_size=BLOCK_TOKENS,
            num_layers=geometry.num_layers,
            num_kv_heads=geometry.num_kv_heads,
            head_dim=geometry.head_dim,
            kv_dtype=kv_dtype,
            device=device,
        )
        self.num_blocks = num_blocks
        self._ratios = config.ratios
        self._sizes = config.head_dim, config.index_head_dim
        kind = DTYPES[kv_dtype]
        self.entries = tuple(self._table(ratio, config.head_dim, kind) for ratio in config.ratios)
        self.index_keys = tuple(
            self._table(ratio, config.index_head_dim, kind) if has_indexer(ratio) else None
            for ratio in config.ratios
        )

    def _table(self, ratio: int, width: int, kind: torch.dtype) -> torch.Tensor | None:
        if not ratio:
            return None
        num_rows = self.num_blocks * (BLOCK_TOKENS // ratio)
        return torch.zeros((num_rows, width), dtype=kind, device=self.k.device)

    def pack_block(
        self, block_id: int, num_tokens: int, out: bytes | bytearray | memoryview
    ) -> None:
        """See `KVPool`."""
        self._host(num_tokens, out).copy_(self.gather_block(block_id, num_tokens))

    def unpack_block(
        self, block_id: int, num_tokens: int, data: bytes | bytearray | memoryview
    ) -> None:
        """See `KVPool`."""
        self.scatter_block(block_id, num_tokens, self._host(num_tokens, data))

    def gather_block(self, block_id: int, num_tokens: int) -> torch.Tensor:
        """The block in the host layout, on the pool's device: flat."""
        packed = torch.zeros_like(self.empty_block(num_tokens))
        at = 0
        for part in self._parts(block_id, num_tokens):
            packed[at : at + part.numel()] = part.flatten()
            at += part.numel()
        return packed

    def scatter_block(self, block_id: int, num_tokens: int, packed: torch.Tensor) -> None:
        """What `gather_block` gave, into a block of this pool."""
        at = 0
        for part in self._parts(block_id, num_tokens):
            part.copy_(packed[at : at + part.numel()].view(part.shape))
            at += part.numel()

    def empty_block(self, num_tokens: int) -> torch.Tensor:
        """Room on the pool's device for what `gather_block` gives."""
        num_elements = self.num_bytes(num_tokens) // self.k.element_size()
        return torch.empty((num_elements,), dtype=self.k.dtype, device=self.k.device)

    def copy_block(self, source: int, target: int) -> None:
        """Copy a block inside the pool."""
        self.scatter_block(target, BLOCK_TOKENS, self.gather_block(source, BLOCK_TOKENS))

    def touch(self, first: int, end: int) -> bool:
        """See `KVPool`: nothing is done."""
        return False

    def _parts(self, block_id: int, num_tokens: int) -> Iterator[torch.Tensor]:
        """Views of a block's entries that its first `num_tokens` tokens have closed."""
        for ratio, entries, keys in zip(self._ratios, self.entries, self.index_keys, strict=True):
            for table in (entries, keys):
                if table is not None:
                    first = block_id * (BLOCK_TOKENS // ratio)
                    yield table[first : first + num_tokens // ratio]

    def _host(self, num_tokens: int, data: bytes | bytearray | memoryview) -> torch.Tensor:
        view = memoryview(data).cast("B")
        if not 0 < num_tokens <= BLOCK_TOKENS or view.nbytes != self.num_bytes(num_tokens):
            raise ValueError(
                f"{view.nbytes} bytes do not hold {num_tokens} tokens "
                f"({self.num_bytes(num_tokens)} bytes; blocks hold {BLOCK_TOKENS} tokens)"
            )
        with warnings.catch_warnings():
            # A read-only buffer is only ever read from: unpack_block copies out of it.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            return torch.frombuffer(view, dtype=self.k.dtype)
