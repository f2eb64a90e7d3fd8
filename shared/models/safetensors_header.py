"""What safetensors files hold and where: names, types, shapes, byte ranges; no data. Torch-free.

Layout: https://huggingface.co/docs/safetensors (8 bytes of header length, JSON, data).
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from finback.shared.errors import ConfigError
from finback.shared.models.hf_source import read_json

INDEX: Final = "model.safetensors.index.json"
_MAX_HEADER_BYTES: Final = 100_000_000
ITEM_BYTES: Final = {
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I8": 1,
    "U8": 1,
    "F8_E4M3": 1,
    "F8_E8M0": 1,
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


def headers_of(folder: Path) -> Iterator[tuple[str, Stored]]:
    """(name, place) of every tensor of a folder's files, file by file; names may come twice."""
    for path in weight_files(folder):
        yield from read_header(path).items()


def weight_files(folder: Path) -> list[Path]:
    """Those that the index names, or where there is none all that lie there."""
    if not (folder / INDEX).is_file():
        return sorted(folder.glob("*.safetensors"))
    weight_map = read_json(folder / INDEX, required=True).get("weight_map")
    if not isinstance(weight_map, Mapping):
        raise ConfigError(f"{folder / INDEX}: holds no weight_map; download it again")
    return [folder / name for name in sorted({str(file) for file in weight_map.values()})]


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
    if found.dtype not in ITEM_BYTES:
        raise ConfigError(f"{path}: tensor {name} has the unsupported type {found.dtype}")
    num_bytes = ITEM_BYTES[found.dtype] * math.prod(shape)
    if found.start < base or found.end > size or found.num_bytes != num_bytes:
        raise ConfigError(f"{path}: tensor {name} is cut short; download the file again")
    return found
