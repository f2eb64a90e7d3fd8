"""The file format of packed weights, to be mapped by several processes.

Magic, length of the header, header (JSON), then at multiples of 64 bytes: weights, tables of tiles
(int64 [num_tiles, 2], offset in the file and kind), norms (float32). The header holds a digest of all of it.
"""

import json
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt
import torch

from finback.kernels.linear.cpu_packing import PackedMatrix
from finback.shared.models.cpu_weights import CpuWeights, LayerWeights

MAGIC: Final = b"finback packed weights 1\n"
_ALIGN: Final = 64

Bytes = npt.NDArray[np.uint8]
Entry = dict[str, Any]


def write(file: BinaryIO, weights: CpuWeights) -> None:
    """The whole file, into one that is empty."""
    body = _Body()
    header: Entry = {
        "embedding": body.matrix(weights.embedding),
        "head": None if weights.head is weights.embedding else body.matrix(weights.head),
        "final_norm": body.tensor(weights.final_norm),
        "layers": [
            {str(int(column)): body.item(item) for column, item in layer.items()}
            for layer in weights.layers
        ],
    }
    digest = blake2b(digest_size=16)
    for at, part in body.parts:
        digest.update(at.to_bytes(8, "little"))
        digest.update(part)
    header |= {"num_bytes": body.end, "digest": digest.hexdigest(), "parts": body.spans()}
    text = json.dumps(header).encode()
    file.write(MAGIC + len(text).to_bytes(8, "little") + text)
    start = _aligned(file.tell())
    for at, part in body.parts:
        file.seek(start + at)
        file.write(part)
    file.truncate(start + body.end)


class _Body:
    """Parts and where they go, counted from the start of the body."""

    def __init__(self) -> None:
        self.parts: list[tuple[int, memoryview]] = []
        self.end = 0

    def spans(self) -> list[tuple[int, int]]:
        return [(at, part.nbytes) for at, part in self.parts]

    def add(self, data: npt.NDArray[Any]) -> int:
        at = self.end
        self.parts.append((at, np.ascontiguousarray(data).reshape(-1).view(np.uint8).data))
        self.end = _aligned(at + data.nbytes)
        return at

    def item(self, item: PackedMatrix | torch.Tensor) -> Entry:
        return self.matrix(item) if isinstance(item, PackedMatrix) else self.tensor(item)

    def tensor(self, tensor: torch.Tensor) -> Entry:
        return {"at": self.add(tensor.float().numpy()), "shape": list(tensor.shape)}

    def matrix(self, matrix: PackedMatrix) -> Entry:
        tiles, start = matrix.tiles.copy(), self.end
        for owner in matrix.owners:
            low = owner.ctypes.data
            inside = (matrix.tiles[:, 0] >= low) & (matrix.tiles[:, 0] < low + owner.nbytes)
            tiles[inside, 0] = matrix.tiles[inside, 0] - low + self.add(owner)
        entry = {"start": start, "end": self.end, "num_tiles": len(tiles)}
        return {
            **entry,
            "tiles": self.add(tiles),
            "num_columns": matrix.num_columns,
            "num_k": matrix.num_k,
        }


# -- reading


def read(path: Path) -> CpuWeights | None:
    """Map a file; None if there is none, or none that is whole."""
    try:
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                return None
            length = int.from_bytes(file.read(8), "little")
            header: Entry = json.loads(file.read(length))
            start = _aligned(file.tell())
        body = np.memmap(path, np.uint8, "r", start)
        if body.nbytes != header["num_bytes"] or _digest(body, header) != header["digest"]:
            return None
    except (OSError, ValueError, KeyError, TypeError, MemoryError):
        return None
    return _weights(body, header)


def _digest(body: Bytes, header: Entry) -> str:
    digest = blake2b(digest_size=16)
    for at, num_bytes in header["parts"]:
        digest.update(int(at).to_bytes(8, "little"))
        digest.update(body[at : at + num_bytes].data)
    return digest.hexdigest()


def _weights(body: Bytes, header: Entry) -> CpuWeights:
    embedding = _matrix(body, header["embedding"])
    layers: list[LayerWeights] = [
        {
            int(column): _matrix(body, entry) if "tiles" in entry else _tensor(body, entry)
            for column, entry in layer.items()
        }
        for layer in header["layers"]
    ]
    return CpuWeights(
        embedding=embedding,
        head=embedding if header["head"] is None else _matrix(body, header["head"]),
        final_norm=_tensor(body, header["final_norm"]),
        layers=layers,
    )


def _matrix(body: Bytes, entry: Entry) -> PackedMatrix:
    at, num_tiles = entry["tiles"], entry["num_tiles"]
    tiles = body[at : at + 16 * num_tiles].view(np.int64).reshape(num_tiles, 2).copy()
    tiles[:, 0] += body.ctypes.data
    return PackedMatrix(
        tiles=np.asarray(tiles),
        num_columns=entry["num_columns"],
        num_k=entry["num_k"],
        owners=(body[entry["start"] : entry["end"]],),
    )


def _tensor(body: Bytes, entry: Entry) -> torch.Tensor:
    """Copied: torch wants memory that can be written."""
    at, shape = entry["at"], entry["shape"]
    values = np.array(body[at : at + 4 * int(np.prod(shape))].view(np.float32))
    return torch.from_numpy(values).view(shape)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN
