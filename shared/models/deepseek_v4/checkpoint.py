"""A V4 folder's tensors under their published names, whatever they are called and stored as."""

from collections.abc import Callable
from pathlib import Path

import torch

from finback.shared.errors import ConfigError
from finback.shared.models.deepseek_v4 import number_formats
from finback.shared.models.deepseek_v4.config import V4Config
from finback.shared.models.deepseek_v4.inventory import take_inventory
from finback.shared.models.deepseek_v4.names import expert_names, is_draft, scale_name
from finback.shared.models.deepseek_v4.safetensors_file import read

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
        self._held: dict[str, torch.Tensor] = {}
        self.inventory = take_inventory(folder, config)
        if self.inventory.problems:
            raise ConfigError(self.inventory.problems[0])
        self._stored = self.inventory.stored
        self.fp8_block = self.inventory.fp8_block
        self.num_draft_tensors = sum(map(is_draft, self._stored))
        self.num_bytes = self.inventory.num_bytes

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

    def as_stored(self, name: str) -> torch.Tensor:
        """A tensor in the file's own type; one with scales beside it is dequantised to float32."""
        if scale_name(name) in self._stored:
            return self.tensor(name, torch.float32)
        return self._read(name)

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

    def hold(self, experts: tuple[int, ...] | None = None) -> int:
        """Read all that the model needs into memory, as it is stored; returns its bytes.

        From then on tensors are made from there. `experts`: those of this rank only; None: all.
        """
        unwanted = self._of_others(experts)
        for name in self._stored:
            if not is_draft(name) and name not in unwanted:
                self._held[name] = self._read(name)
        return sum(held.nbytes for held in self._held.values())

    def _of_others(self, experts: tuple[int, ...] | None) -> set[str]:
        if experts is None:
            return set()
        others = set(range(self._config.num_experts)).difference(experts)
        layers = range(self._config.num_layers)
        names = {name for at in layers for e in others for name in expert_names(at, e)}
        return names | {scale_name(name) for name in names}

    def formats(self) -> dict[str, int]:
        """Bytes by stored type, of the model proper."""
        return self.inventory.formats()

    def _read(self, name: str) -> torch.Tensor:
        if name in self._held:
            return self._held[name]
        stored = self._stored[name]
        found = read(stored)
        self._num_read += stored.num_bytes
        if self._on_progress is not None:
            self._on_progress(self._num_read, self.num_bytes)
        return found
