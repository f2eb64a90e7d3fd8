"""A V4 folder's tensors by their published names, held against what its config wants. Torch-free."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from finback.shared.errors import ConfigError
from finback.shared.models.deepseek_v4.config import V4Config
from finback.shared.models.deepseek_v4.names import (
    STACKED,
    Shape,
    expert_names,
    is_draft,
    published,
    scale_name,
    shapes,
    without,
)
from finback.shared.models.hf_source import read_json
from finback.shared.models.safetensors_header import Stored, headers_of

FP8_BLOCK: Final = 128
FP4_GROUP: Final = 32
_PACKED: Final = ("I8", "U8")
_NUM_NAMED: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """`stored` by published name. `fp8_block`: the edge of a block of fp8 scales.

    `problems`: why the model cannot be read, in order; empty: every tensor is used, none is missing.
    """

    stored: Mapping[str, Stored]
    fp8_block: int
    problems: tuple[str, ...]
    wanted: Mapping[str, Shape] = field(repr=False)

    @property
    def num_bytes(self) -> int:
        """Of all tensors, those of draft stages too."""
        return sum(stored.num_bytes for stored in self.stored.values())

    @property
    def draft_stages(self) -> dict[str, int]:
        """Bytes of every draft stage that is there: `mtp.0` and so on."""
        found: dict[str, int] = {}
        for name, stored in self.stored.items():
            if is_draft(name):
                stage = ".".join(name.split(".")[:2])
                found[stage] = found.get(stage, 0) + stored.num_bytes
        return dict(sorted(found.items()))

    def formats(self) -> dict[str, int]:
        """Bytes by stored type, of the model proper."""
        found: dict[str, int] = {}
        for name, stored in self.stored.items():
            if not is_draft(name):
                found[stored.dtype] = found.get(stored.dtype, 0) + stored.num_bytes
        return found

    def num_elements(self) -> tuple[int, int]:
        """(elements that dequantising stretches or that are weights anyway, elements of tables)."""
        weights = tables = 0
        for name, shape in self.wanted.items():
            count = 1
            for extent in shape:
                count *= extent
            if name.endswith("tid2eid"):
                tables += count
            else:
                weights += count
        return weights, tables


def take_inventory(folder: Path, config: V4Config) -> Inventory:
    """Read the headers. Raises `ConfigError` for files that cannot be read; the rest are problems."""
    stored = _find(folder)
    block = _fp8_block(folder)
    wanted = _wanted(config, stored)
    return Inventory(
        stored=stored,
        fp8_block=block,
        wanted=wanted,
        problems=tuple(f"{folder}: {text}" for text in _problems(stored, wanted, block)),
    )


def _find(folder: Path) -> dict[str, Stored]:
    """Every tensor by its published name; two spellings of one are a contradiction."""
    found: dict[str, Stored] = {}
    for name, stored in headers_of(folder):
        ours = published(name)
        if ours in found:
            raise ConfigError(f"{folder}: tensor {ours} is there twice")
        found[ours] = stored
    return found


def _wanted(config: V4Config, stored: Mapping[str, Stored]) -> dict[str, Shape]:
    """Shapes of all tensors; where a file stacks a layer's experts, of the stacks instead."""
    wanted = shapes(config)
    count, d, size = config.num_experts, config.hidden_size, config.expert_size
    for layer in range(config.num_layers):
        if f"layers.{layer}.mlp.experts.gate_up_proj" not in stored:
            continue
        for expert in range(count):
            for name in expert_names(layer, expert):
                del wanted[name]
        for leaf, parts in STACKED.items():
            shape = (count, 2 * size, d) if len(parts) == 2 else (count, d, size)
            wanted[f"layers.{layer}.{leaf}"] = shape
    return wanted


def _problems(
    stored: Mapping[str, Stored], wanted: Mapping[str, Shape], block: int
) -> Iterator[str]:
    missing = [name for name in wanted if name not in stored]
    if len(missing) == 1:
        yield f"tensor {missing[0]} is missing; the model is incomplete"
    elif missing:
        yield (
            f"tensor {missing[0]} is missing, and {len(missing) - 1} others; the model is incomplete"
        )
    used = set(wanted)
    for name, shape in wanted.items():
        if name in stored:
            scale, problem = _check_one(name, stored, shape, block)
            used |= scale
            if problem:
                yield problem
    left = without(stored, used)
    if left:
        yield f"{len(left)} tensors are not known, such as {', '.join(left[:_NUM_NAMED])}"


def _check_one(
    name: str, stored: Mapping[str, Stored], shape: Shape, block: int
) -> tuple[set[str], str]:
    """(the names of its scales, what is wrong with its shape or its scales)."""
    own, scale = stored[name], stored.get(scale_name(name))
    is_packed = own.dtype in _PACKED
    expected = (*shape[:-1], shape[-1] // 2) if is_packed else shape
    if own.shape != expected:
        return set(), (
            f"tensor {name} is {list(own.shape)}, expected {list(expected)}; "
            "config and weights do not fit each other"
        )
    if not is_packed and own.dtype != "F8_E4M3":
        return set(), ""
    if is_packed:
        blocks = (shape[0], -(-shape[1] // FP4_GROUP))
    else:
        blocks = (-(-shape[0] // block), -(-shape[1] // block))
    problem = ""
    if scale is None or scale.dtype != "F8_E8M0" or scale.shape != blocks:
        problem = f"tensor {name} needs {scale_name(name)}, F8_E8M0 {list(blocks)}"
    return {scale_name(name)}, problem


def _fp8_block(folder: Path) -> int:
    """The edge of a block of scales; `quantization_config` tells it, else the published 128."""
    told = read_json(folder / "config.json", required=True).get("quantization_config") or {}
    block = told.get("weight_block_size") or [FP8_BLOCK] * 2
    if len(block) != 2 or block[0] != block[1] or not isinstance(block[0], int) or block[0] < 1:
        raise ConfigError(f"{folder}/config.json: weight_block_size {block} is not supported")
    return block[0]
