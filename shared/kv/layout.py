"""The canonical host layout of a KV block, and the digest that says whom a block fits.

A block on the host, on a lane or in a file is one contiguous array [layer, k/v, token, head, dim];
a partial block of m tokens is the same with `token` = m (so it is shorter, not padded).
"""

from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

from finback.shared.wire.messages.control import CacheSpec

if TYPE_CHECKING:
    from finback.shared.kv.state import StateSpec  # needs this module itself

LAYOUT_VERSION: Final = 1

ITEM_BYTES: Final = {"f32": 4, "bf16": 2, "f16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockGeometry:
    """The sizes of a model's KV; `kv_dtype` is one of `ITEM_BYTES`."""

    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    kv_dtype: str

    def __post_init__(self) -> None:
        if self.kv_dtype not in ITEM_BYTES:
            raise ValueError(f"kv_dtype must be one of {sorted(ITEM_BYTES)}, not {self.kv_dtype!r}")
        for name in ("block_size", "num_layers", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers, keys and values."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * ITEM_BYTES[self.kv_dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of a full block in the host layout."""
        return self.token_bytes * self.block_size

    def num_bytes(self, num_tokens: int) -> int:
        """Bytes of a (possibly partial) block of `num_tokens` tokens."""
        if not 0 <= num_tokens <= self.block_size:
            raise ValueError(f"a block holds 0 to {self.block_size} tokens, not {num_tokens}")
        return self.token_bytes * num_tokens

    def shape(self, num_tokens: int) -> tuple[int, int, int, int, int]:
        """[layer, k/v, token, head, dim] of a block of `num_tokens` tokens."""
        return (self.num_layers, 2, num_tokens, self.num_kv_heads, self.head_dim)

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks needed for `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)


def salt_of(
    geometry: BlockGeometry,
    *,
    weights_digest: str,
    config: str,
    numerics: str,
    extra: tuple[str, ...] = (),
) -> str:
    """Hex digest over all that makes a block's bytes differ between instances.

    `config` is any stable text of the model's configuration (rope included); `numerics` names the
    numerics class and, in time, the kernel-set version; `extra`: what only some models have.
    """
    parts = (str(LAYOUT_VERSION), weights_digest, config, numerics, *map(str, geometry.shape(0)))
    parts += (geometry.kv_dtype, str(geometry.block_size))
    parts += extra
    text = "".join(f"{len(part)}:{part}" for part in parts)
    return blake2b(text.encode(), digest_size=16, person=b"finback-salt").hexdigest()


def cache_spec(
    geometry: BlockGeometry,
    *,
    weights_digest: str,
    config: str,
    numerics: str,
    state: "StateSpec | None" = None,
    replay: str = "",
) -> CacheSpec:
    """The `CacheSpec` that an instance announces in the registry.

    `state`: what a sequence keeps beside its blocks. `replay` names a way to make it anew that is an
    approximation: whatever it may have touched has a salt of its own.
    """
    extra = () if state is None else (state.describe(), replay)
    return CacheSpec(
        block_size=geometry.block_size,
        num_layers=geometry.num_layers,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        kv_dtype=geometry.kv_dtype,
        block_bytes=geometry.block_bytes,
        salt=salt_of(
            geometry,
            weights_digest=weights_digest,
            config=config,
            numerics=numerics,
            extra=extra,
        ),
        state_bytes=0 if state is None else state.payload_bytes,
        window_tokens=0 if state is None else state.window_tokens,
        replay_tokens=0 if state is None else state.replay_tokens,
    )
