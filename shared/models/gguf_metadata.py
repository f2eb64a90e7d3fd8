"""A small reader of GGUF headers: metadata and tensor positions, no tensor data. Torch-free.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little endian).
Arrays are kept as positions in the mapped file and decoded when asked for, so that a vocabulary of
150,000 entries costs nothing until a tokenizer is built.
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from finback.shared.errors import ConfigError

_MAGIC: Final = b"GGUF"
_STRING: Final = 8
_ARRAY: Final = 9
_SCALARS: Final = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_MAX_NAME_BYTES: Final = 65_535
_MAX_DIMS: Final = 8

# ggml type: (name, elements of a block, bytes of a block)
TENSOR_TYPES: Final[dict[int, tuple[str, int, int]]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayField:
    """An array of the metadata: where it lies, not what it holds."""

    item_type: int
    count: int
    offset: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """`shape` is row-major, outermost first (GGUF stores it the other way round)."""

    name: str
    type_name: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class _Cursor:
    """Reads forward through the header; every step is checked against the file's end."""

    def __init__(self, data: "mmap.mmap | bytes", path: Path) -> None:
        self.data = data
        self.size = len(data)
        self.position = 0
        self.path = path

    def fail(self, what: str) -> ConfigError:
        return ConfigError(f"{self.path}: {what}; download the model file again")

    def take(self, num_bytes: int) -> int:
        start = self.position
        if num_bytes > self.size - start:
            raise self.fail(f"truncated in its header (at byte {start} of {self.size})")
        self.position = start + num_bytes
        return start

    def scalar(self, fmt: str) -> Any:
        start = self.take(struct.calcsize(fmt))
        return struct.unpack_from(fmt, self.data, start)[0]

    def text(self, max_bytes: int | None = None) -> str:
        length = self.scalar("<Q")
        if max_bytes is not None and length > max_bytes:
            raise self.fail(f"a name of {length} bytes: the header is corrupt")
        start = self.take(length)
        return self.data[start : start + length].decode("utf-8", errors="replace")

    def array(self) -> ArrayField:
        item_type, count = self.scalar("<I"), self.scalar("<Q")
        start = self.position
        if item_type == _STRING:
            self._skip_strings(count)
        elif item_type in _SCALARS:
            self.take(count * struct.calcsize(_SCALARS[item_type]))
        else:
            raise self.fail(f"an array of type {item_type} in its metadata")
        return ArrayField(item_type=item_type, count=count, offset=start, end=self.position)

    def _skip_strings(self, count: int) -> None:
        unpack, data, position, size = (
            struct.Struct("<Q").unpack_from,
            self.data,
            self.position,
            self.size,
        )
        if count > size // 8:
            raise self.fail(f"an array of {count} strings: the header is corrupt")
        for _ in range(count):
            if position + 8 > size:
                raise self.fail("truncated in an array of strings")
            position += 8 + unpack(data, position)[0]
        if position > size:
            raise self.fail("truncated in an array of strings")
        self.position = position

    def value(self) -> Any:
        kind = self.scalar("<I")
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self.array()
        raise self.fail(f"metadata of unknown type {kind}")


class GgufHeader:
    """Metadata values (arrays as `ArrayField`) and tensors of one mapped file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data = _map(path)
        cursor = _Cursor(self._data, path)
        self.version = _check_start(cursor)
        num_tensors, num_fields = cursor.scalar("<Q"), cursor.scalar("<Q")
        self.fields: Mapping[str, Any] = {
            cursor.text(_MAX_NAME_BYTES): cursor.value() for _ in range(num_fields)
        }
        raw = [_tensor(cursor) for _ in range(num_tensors)]
        alignment = int(self.fields.get("general.alignment", 32))
        if alignment < 1:
            raise cursor.fail(f"general.alignment is {alignment}")
        self.data_offset = -(-cursor.position // alignment) * alignment
        self.header_bytes = cursor.position
        self.tensors = {info.name: self._placed(info) for info in raw}

    def _placed(self, info: TensorInfo) -> TensorInfo:
        offset = self.data_offset + info.offset
        if offset + info.num_bytes > len(self._data):
            raise ConfigError(
                f"{self.path}: truncated: tensor {info.name} ends at byte "
                f"{offset + info.num_bytes} of {len(self._data)}; download the model file again"
            )
        return TensorInfo(
            name=info.name,
            type_name=info.type_name,
            shape=info.shape,
            offset=offset,
            num_bytes=info.num_bytes,
        )

    def strings(self, key: str) -> list[str]:
        """The strings of an array field."""
        array = self._array(key, _STRING)
        data, position = self._data, array.offset
        unpack = struct.Struct("<Q").unpack_from
        found = []
        for _ in range(array.count):
            start = position + 8
            position = start + unpack(data, position)[0]
            found.append(data[start:position].decode("utf-8", errors="replace"))
        return found

    def numbers(self, key: str) -> npt.NDArray[Any]:
        """The numbers of an array field, copied."""
        array = self.fields[key]
        if not isinstance(array, ArrayField) or array.item_type == _STRING:
            raise ConfigError(f"{self.path}: {key} is not an array of numbers")
        dtype = np.dtype(_SCALARS[array.item_type])
        return np.frombuffer(self._data, dtype, array.count, array.offset).copy()

    def raw(self, info: TensorInfo) -> npt.NDArray[np.uint8]:
        """A read-only view of a tensor's bytes in the mapped file."""
        return np.frombuffer(self._data, np.uint8, info.num_bytes, info.offset)

    def release_pages(self) -> None:
        """Drop the mapped pages from this process; they are read again when touched."""
        self._data.madvise(mmap.MADV_DONTNEED)

    def header(self) -> bytes:
        """All bytes before the tensor data: what a digest is made of."""
        return self._data[: self.header_bytes]

    def _array(self, key: str, item_type: int) -> ArrayField:
        array = self.fields.get(key)
        if not isinstance(array, ArrayField) or array.item_type != item_type:
            raise ConfigError(f"{self.path}: its metadata lacks {key}; use a complete GGUF file")
        return array


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such model file; check the path given as model") from None
    except ValueError:  # an empty file cannot be mapped
        raise ConfigError(f"{path}: the model file is empty; download it again") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def _check_start(cursor: _Cursor) -> int:
    if cursor.size < 4 or cursor.data[:4] != _MAGIC:
        raise ConfigError(f"{cursor.path}: not a GGUF file (it does not begin with GGUF)")
    cursor.take(4)
    version = int(cursor.scalar("<I"))
    if version not in (2, 3):
        raise ConfigError(f"{cursor.path}: GGUF version {version}; versions 2 and 3 are supported")
    return version


def _tensor(cursor: _Cursor) -> TensorInfo:
    name = cursor.text(_MAX_NAME_BYTES)
    num_dims = cursor.scalar("<I")
    if num_dims > _MAX_DIMS:
        raise cursor.fail(f"tensor {name} has {num_dims} dimensions: the header is corrupt")
    shape = tuple(cursor.scalar("<Q") for _ in range(num_dims))[::-1]
    type_id, offset = cursor.scalar("<I"), cursor.scalar("<Q")
    if type_id not in TENSOR_TYPES:
        raise ConfigError(
            f"{cursor.path}: tensor {name} has the unsupported type {type_id}; "
            f"use a file of {', '.join(sorted(kind for kind, _, _ in TENSOR_TYPES.values()))}"
        )
    type_name, block_elements, block_bytes = TENSOR_TYPES[type_id]
    count = 1
    for size in shape:
        count *= size
    if shape and shape[-1] % block_elements:
        raise cursor.fail(f"tensor {name}: rows of {shape[-1]} do not fit {type_name}")
    return TensorInfo(
        name=name,
        type_name=type_name,
        shape=shape,
        offset=offset,
        num_bytes=count // block_elements * block_bytes,
    )
