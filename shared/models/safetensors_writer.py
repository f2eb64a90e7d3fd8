"""Safetensors files written piece by piece, so that no file and no stack is ever whole in memory. Torch-free.

Layout: https://huggingface.co/docs/safetensors (8 bytes of header length, JSON, data).
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from finback.shared.models.safetensors_header import INDEX

_ALIGN: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A tensor to write; `parts` name what its bytes are made of, in order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    parts: tuple[str, ...]


def shards(planned: Iterable[Planned], max_bytes: int) -> list[list[Planned]]:
    """In order, each of at most `max_bytes` or of a single tensor. Pure."""
    found: list[list[Planned]] = []
    filled = 0
    for tensor in planned:
        if not found or filled + tensor.num_bytes > max_bytes:
            found.append([])
            filled = 0
        found[-1].append(tensor)
        filled += tensor.num_bytes
    return found


def shard_names(count: int) -> list[str]:
    """As transformers names them; a single file has no number."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{at:05d}-of-{count:05d}.safetensors" for at in range(1, count + 1)]


def write_shard(path: Path, tensors: Sequence[Planned], data: Iterator[memoryview]) -> None:
    """`data`: the bytes of all parts of all tensors, in order."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.num_bytes],
        }
        at += tensor.num_bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGN)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for piece in data:
            file.write(piece)


def write_index(folder: Path, files: Sequence[tuple[str, Sequence[Planned]]]) -> None:
    """Which file holds what."""
    weight_map = {tensor.name: file for file, tensors in files for tensor in tensors}
    total = sum(tensor.num_bytes for _, tensors in files for tensor in tensors)
    told = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(told, indent=1) + "\n")
