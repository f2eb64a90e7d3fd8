"""A V4 folder rewritten under transformers' names or the published ones, tensor by tensor.

fp8 and fp4 are dequantised; bf16 holds their values exactly (codes of at most four significant bits times
powers of two). What steers (mixes, biases, sinks) keeps its type, tables of experts too.
"""

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch

from finback.shared.errors import ConfigError
from finback.shared.models.deepseek_v4.checkpoint import OnProgress, V4Checkpoint
from finback.shared.models.deepseek_v4.config import read_config
from finback.shared.models.deepseek_v4.convert_config import published_config, transformers_config
from finback.shared.models.deepseek_v4.names import (
    expert_names,
    is_draft,
    scale_name,
    shapes,
    transformers_name,
)
from finback.shared.models.deepseek_v4.safetensors_file import DTYPES, read
from finback.shared.models.hf_source import read_json
from finback.shared.models.safetensors_header import ITEM_BYTES, Stored
from finback.shared.models.safetensors_writer import (
    Planned,
    shard_names,
    shards,
    write_index,
    write_shard,
)

LAYOUTS: Final = ("transformers", "published")
_DTYPES: Final = {"auto": "", "f32": "F32", "bf16": "BF16"}
_EXACT: Final = ("attn_sink", "ape", "gate.bias", "_fn", "_base", "_scale")
_BESIDE: Final = (
    "tokenizer*",
    "generation_config.json",
    "chat_template*",
    "special_tokens_map.json",
)


def convert(
    folder: Path,
    out: Path,
    *,
    layout: str,
    dtype: str = "auto",
    max_shard_bytes: int = 4 << 30,
    on_progress: OnProgress | None = None,
) -> list[Path]:
    """The files written. Checks all headers first; holds one tensor, or one expert of a stack, at a time.

    `dtype`: "f32", "bf16", or "auto": as stored, and bf16 for what is dequantised. Raises `ConfigError`.
    """
    if layout not in LAYOUTS:
        raise ConfigError(f"--to is {layout!r}; use {' or '.join(LAYOUTS)}")
    if dtype not in _DTYPES:
        raise ConfigError(f"--dtype is {dtype!r}; use {', '.join(_DTYPES)}")
    source = _Source(folder, _DTYPES[dtype])
    planned = source.plan(layout)
    _check_room(out, sum(tensor.num_bytes for tensor in planned))
    out.mkdir(parents=True, exist_ok=True)
    parts = shards(planned, max_shard_bytes)
    files = list(zip(shard_names(len(parts)), parts, strict=True))
    progress = _Progress(sum(tensor.num_bytes for tensor in planned), on_progress)
    for name, tensors in files:
        write_shard(out / name, tensors, progress.counted(source.data(tensors)))
    if len(files) > 1:
        write_index(out, files)
    for pattern in _BESIDE:
        for beside in sorted(folder.glob(pattern)):
            shutil.copyfile(beside, out / beside.name)
    # Last: a folder without it is none that could be taken for a model.
    (out / "config.json").write_text(json.dumps(source.told(layout), indent=2) + "\n")
    return [out / name for name, _ in files]


def _check_room(out: Path, num_bytes: int) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out}: is there already; name a folder that is new or empty")
    there = out.absolute()
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    if num_bytes > free:
        raise ConfigError(f"{out}: needs {num_bytes} bytes, and {free} are free there")


class _Progress:
    def __init__(self, total: int, tell: OnProgress | None) -> None:
        self._done, self._total, self._tell = 0, total, tell

    def counted(self, data: Iterator[memoryview]) -> Iterator[memoryview]:
        for piece in data:
            yield piece
            self._done += piece.nbytes
            if self._tell is not None:
                self._tell(self._done, self._total)


class _Source:
    """What is read, by published names; experts one by one even where a file stacks them."""

    def __init__(self, folder: Path, dtype: str) -> None:
        path = folder / "config.json"
        self._raw = read_json(path, required=True)
        self._config = read_config(path, self._raw)
        self._checkpoint = V4Checkpoint(folder, self._config)
        self._stored = self._checkpoint.inventory.stored
        self._dtype = dtype
        self._shapes = shapes(self._config)

    def told(self, layout: str) -> dict[str, object]:
        """The config.json of the layout."""
        kind = self._dtype or self._type_of("embed.weight")
        name = "float32" if kind == "F32" else "bfloat16"
        spelt = transformers_config if layout == "transformers" else published_config
        return spelt(self._raw, self._config, name)

    def plan(self, layout: str) -> list[Planned]:
        """Draft stages have no names in transformers, and stay behind there."""
        if layout == "published":
            drafts = [name for name in self._stored if is_draft(name) and not self._is_scale(name)]
            return [self._one(name, name) for name in [*self._shapes, *sorted(drafts)]]
        plain = [name for name in self._shapes if ".ffn.experts." not in name]
        found = [self._one(transformers_name(name), name) for name in plain]
        return found + [
            stack for layer in range(self._config.num_layers) for stack in self._stacks(layer)
        ]

    def data(self, tensors: list[Planned]) -> Iterator[memoryview]:
        """Part by part."""
        for tensor in tensors:
            for part in tensor.parts:
                found = self._read(part, DTYPES[tensor.dtype]).contiguous()
                yield found.view(-1).view(torch.uint8).numpy().data

    def _one(self, name: str, part: str) -> Planned:
        shape = self._shape(part)
        return self._planned(name, shape, (part,))

    def _stacks(self, layer: int) -> list[Planned]:
        config, stem = self._config, f"model.layers.{layer}.mlp.experts"
        names = [expert_names(layer, expert) for expert in range(config.num_experts)]
        wide = (config.num_experts, 2 * config.expert_size, config.hidden_size)
        high = (config.num_experts, config.hidden_size, config.expert_size)
        gate_up = tuple(part for gate, up, _ in names for part in (gate, up))
        down = tuple(part for _, _, part in names)
        return [
            self._planned(f"{stem}.gate_up_proj", wide, gate_up),
            self._planned(f"{stem}.down_proj", high, down),
        ]

    def _planned(self, name: str, shape: tuple[int, ...], parts: tuple[str, ...]) -> Planned:
        kinds = {self._type_of(part) for part in parts}
        kind = kinds.pop() if len(kinds) == 1 else "F32"
        num_bytes = math.prod(shape) * ITEM_BYTES[kind]
        return Planned(name=name, dtype=kind, shape=shape, num_bytes=num_bytes, parts=parts)

    def _shape(self, part: str) -> tuple[int, ...]:
        if part in self._shapes:
            return self._shapes[part]
        shape = self._stored[part].shape
        is_packed = self._stored[part].dtype in ("I8", "U8") and scale_name(part) in self._stored
        return (*shape[:-1], 2 * shape[-1]) if is_packed else shape

    def _type_of(self, part: str) -> str:
        stored = self._find(part)
        if scale_name(part) in self._stored:
            return self._dtype or "BF16"
        if stored.dtype.startswith("I") or part.endswith(_EXACT):
            return stored.dtype
        return self._dtype or stored.dtype

    def _read(self, part: str, dtype: torch.dtype) -> torch.Tensor:
        if part in self._stored:
            return self._checkpoint.tensor(part, dtype)
        return read(self._find(part)).to(dtype)

    def _find(self, part: str) -> Stored:
        """Where a tensor lies; an expert of a stack is a range of its bytes."""
        if part in self._stored:
            return self._stored[part]
        _, layer, _, _, expert, leaf, _ = part.split(".")
        stack = "down_proj" if leaf == "w2" else "gate_up_proj"
        whole = self._stored[f"layers.{layer}.mlp.experts.{stack}"]
        size = whole.num_bytes // self._config.num_experts
        start = whole.start + int(expert) * size
        if leaf != "w2":
            size //= 2
            start += size if leaf == "w3" else 0
        return replace(whole, shape=self._shapes[part], start=start, end=start + size)

    def _is_scale(self, name: str) -> bool:
        return name.endswith(".scale") and f"{name.removesuffix('.scale')}.weight" in self._stored
