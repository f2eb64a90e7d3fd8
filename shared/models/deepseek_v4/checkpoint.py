"""A V4 folder's tensors under their published names, whatever they are called and stored as."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import torch

from finback.shared.errors import ConfigError
from finback.shared.models.deepseek_v4 import number_formats
from finback.shared.models.deepseek_v4.config import V4Config
from finback.shared.models.deepseek_v4.names import (
    STACKED,
    expert_names,
    published,
    scale_name,
    shapes,
    without,
)
from finback.shared.models.deepseek_v4.safetensors_file import Stored, read, read_header
from finback.shared.models.hf_source import read_json

_INDEX: Final = "model.safetensors.index.json"
# (bytes read, bytes in all)
OnProgress = Callable[[int, int], None]


class V4Checkpoint:
    """Headers are read and checked when it is opened, data when it is asked for.

    `fp8_block`: the edge of a block of fp8 scales.
    """

    def __init__(
        self, folder: Path, config: V4Config, *, on_progress: OnProgress | None = None
    ) -> None:
        """Raises `ConfigError` unless every tensor is used and every parameter is there."""
        self._config = config
        self._on_progress = on_progress
        self._num_read = 0
        self._stored = _find(folder)
        self.fp8_block = _fp8_block(folder)
        self.num_draft_tensors = sum(name.startswith("mtp.") for name in self._stored)
        self._check(str(folder))
        self.num_bytes = sum(stored.num_bytes for stored in self._stored.values())

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A tensor by its published name, dequantised; tables of integers stay integers."""
        stored = self._stored[name]
        if stored.dtype == "F8_E4M3":
            scale = self._read(scale_name(name))
            found = number_formats.dequantise_fp8(self._read(name), scale, self.fp8_block)
        elif scale_name(name) in self._stored and stored.dtype in ("I8", "U8"):
            scale = self._read(scale_name(name))
            found = number_formats.dequantise_fp4(self._read(name), scale)
        else:
            found = self._read(name)
        return (
            found
            if stored.dtype.startswith("I") and not found.is_floating_point()
            else found.to(dtype)
        )

    def experts(
        self, layer: int, experts: tuple[int, ...], dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(gate_up [E, 2f, d], down [E, d, f]) of these experts of a layer; no other is read."""
        stacked = f"layers.{layer}.mlp.experts.gate_up_proj"
        if stacked in self._stored:
            chosen = list(experts)
            down = self._read(f"layers.{layer}.mlp.experts.down_proj")
            return self._read(stacked)[chosen].to(dtype), down[chosen].to(dtype)
        size, d = self._config.expert_size, self._config.hidden_size
        gate_up = torch.empty((len(experts), 2 * size, d), dtype=dtype)
        down = torch.empty((len(experts), d, size), dtype=dtype)
        for at, expert in enumerate(experts):
            gate_name, up_name, down_name = expert_names(layer, expert)
            gate_up[at, :size] = self.tensor(gate_name, dtype)
            gate_up[at, size:] = self.tensor(up_name, dtype)
            down[at] = self.tensor(down_name, dtype)
        return gate_up, down

    def formats(self) -> dict[str, int]:
        """Bytes by stored type, of the model proper."""
        found: dict[str, int] = {}
        for name, stored in self._stored.items():
            if not name.startswith("mtp."):
                found[stored.dtype] = found.get(stored.dtype, 0) + stored.num_bytes
        return found

    def _read(self, name: str) -> torch.Tensor:
        stored = self._stored[name]
        found = read(stored)
        self._num_read += stored.num_bytes
        if self._on_progress is not None:
            self._on_progress(self._num_read, self.num_bytes)
        return found

    def _check(self, where: str) -> None:
        wanted = shapes(self._config)
        for layer in range(self._config.num_layers):
            self._unstack(layer, wanted)
        used = set(wanted)
        for name, shape in wanted.items():
            stored = self._stored.get(name)
            if stored is None:
                raise ConfigError(f"{where}: tensor {name} is missing; the model is incomplete")
            used |= self._check_one(where, name, stored, shape)
        left = without(self._stored, used)
        if left:
            some = ", ".join(left[:3])
            raise ConfigError(f"{where}: {len(left)} tensors are not known, such as {some}")

    def _unstack(self, layer: int, wanted: dict[str, tuple[int, ...]]) -> None:
        """Where a file stacks a layer's experts, the stacks are wanted and not the single ones."""
        if f"layers.{layer}.mlp.experts.gate_up_proj" not in self._stored:
            return
        count, d, size = (
            self._config.num_experts,
            self._config.hidden_size,
            self._config.expert_size,
        )
        for expert in range(count):
            for name in expert_names(layer, expert):
                del wanted[name]
        for leaf, parts in STACKED.items():
            shape = (count, 2 * size, d) if len(parts) == 2 else (count, d, size)
            wanted[f"layers.{layer}.{leaf}"] = shape

    def _check_one(self, where: str, name: str, stored: Stored, shape: tuple[int, ...]) -> set[str]:
        """Check one tensor's shape; returns the names of its scales."""
        scale = self._stored.get(scale_name(name))
        is_packed = stored.dtype in ("I8", "U8")
        expected = (*shape[:-1], shape[-1] // 2) if is_packed else shape
        if stored.shape != expected:
            raise ConfigError(
                f"{where}: tensor {name} is {list(stored.shape)}, expected {list(expected)}; "
                "config and weights do not fit each other"
            )
        if not is_packed and stored.dtype != "F8_E4M3":
            return set()
        if is_packed:
            blocks = (shape[0], -(-shape[1] // number_formats.FP4_GROUP))
        else:
            blocks = (-(-shape[0] // self.fp8_block), -(-shape[1] // self.fp8_block))
        if scale is None or scale.dtype != "F8_E8M0" or scale.shape != blocks:
            raise ConfigError(
                f"{where}: tensor {name} needs {scale_name(name)}, F8_E8M0 {list(blocks)}"
            )
        return {scale_name(name)}


def _find(folder: Path) -> dict[str, Stored]:
    """Every tensor by its published name; two spellings of one are a contradiction."""
    found: dict[str, Stored] = {}
    for path in _files(folder):
        for name, stored in read_header(path).items():
            ours = published(name)
            if ours in found:
                raise ConfigError(f"{folder}: tensor {ours} is there twice")
            found[ours] = stored
    return found


def _files(folder: Path) -> list[Path]:
    if not (folder / _INDEX).is_file():
        return sorted(folder.glob("*.safetensors"))
    weight_map = read_json(folder / _INDEX, required=True).get("weight_map")
    if not isinstance(weight_map, Mapping):
        raise ConfigError(f"{folder / _INDEX}: holds no weight_map; download it again")
    return [folder / name for name in sorted({str(file) for file in weight_map.values()})]


def _fp8_block(folder: Path) -> int:
    """The edge of a block of scales; `quantization_config` tells it, else the published 128."""
    told = read_json(folder / "config.json", required=True).get("quantization_config") or {}
    block = told.get("weight_block_size") or [number_formats.FP8_BLOCK] * 2
    if len(block) != 2 or block[0] != block[1] or not isinstance(block[0], int) or block[0] < 1:
        raise ConfigError(f"{folder}/config.json: weight_block_size {block} is not supported")
    return block[0]
