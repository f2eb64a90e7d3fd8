"""One safetensors file read by byte range: no mapping, so that what was read leaves no pages behind.

Layout: https://huggingface.co/docs/safetensors (8 bytes of header length, JSON, data).
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from finback.shared.errors import ConfigError

_MAX_HEADER_BYTES: Final = 100_000_000
_PIECE_BYTES: Final = 64 * 1024 * 1024
DTYPES: Final = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Where a tensor lies: bytes [start, end) of `path`."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        """Length of the data."""
        return self.end - self.start


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors of a file by name. Raises `ConfigError` for a file that contradicts itself."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
                raise ConfigError(f"{path}: corrupt or truncated; download it again")
            header = json.loads(file.read(length))
    except FileNotFoundError:
        raise ConfigError(f"{path}: missing; the index names it") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); download it again") from None
    header.pop("__metadata__", None)
    return {name: _stored(path, name, entry, 8 + length, size) for name, entry in header.items()}


def _stored(path: Path, name: str, entry: Any, base: int, size: int) -> Stored:
    try:
        begin, end = (int(at) for at in entry["data_offsets"])
        shape = tuple(int(n) for n in entry["shape"])
        found = Stored(
            path=path, dtype=str(entry["dtype"]), shape=shape, start=base + begin, end=base + end
        )
    except (KeyError, TypeError, ValueError):
        raise ConfigError(f"{path}: the entry of tensor {name} makes no sense") from None
    if found.dtype not in DTYPES:
        raise ConfigError(f"{path}: tensor {name} has the unsupported type {found.dtype}")
    width = torch.empty(0, dtype=DTYPES[found.dtype]).element_size()
    num_elements = 1
    for extent in shape:
        num_elements *= extent
    if found.start < base or found.end > size or found.num_bytes != width * num_elements:
        raise ConfigError(f"{path}: tensor {name} is cut short; download the file again")
    return found


def read(stored: Stored) -> torch.Tensor:
    """The tensor, in memory of its own."""
    data = torch.empty(stored.num_bytes, dtype=torch.uint8)
    view = data.numpy().data
    descriptor = os.open(stored.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        done = 0
        while done < stored.num_bytes:
            piece = view[done : done + _PIECE_BYTES]
            num_read = os.preadv(descriptor, [piece], stored.start + done)
            if num_read <= 0:
                raise ConfigError(f"{stored.path}: cut short while it was read")
            done += num_read
        os.posix_fadvise(descriptor, stored.start, stored.num_bytes, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    return data.view(DTYPES[stored.dtype]).view(stored.shape)
