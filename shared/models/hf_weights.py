"""Tensors of a Hugging Face folder: safetensors, one file or several, mapped."""

from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open

from finback.shared.errors import ConfigError
from finback.shared.models.config import ModelConfig
from finback.shared.models.hf_source import read_json
from finback.shared.models.weight_names import HEAD, ROPE_FACTORS, hf_name, shapes
from finback.shared.models.weights import QuantisedTensor, check_coverage

_INDEX: Final = "model.safetensors.index.json"
_DTYPES: Final = ("F32", "F16", "BF16")


class HfWeights:
    """A `WeightReader` over the folder's safetensors."""

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        self._folder = folder
        self._files: dict[str, Any] = {}
        self._place: dict[str, str] = _places(folder)
        found = {}
        for name, file in self._place.items():
            found[name] = self._shape(file, name)
        wanted = {hf_name(name): shape for name, shape in shapes(config).items()}
        # A tied head may be stored all the same; older exports hold the frequencies too.
        ignorable = [name for name in found if name.endswith("rotary_emb.inv_freq")]
        if config.tie_word_embeddings:
            ignorable.append(hf_name(HEAD))
        check_coverage(str(folder), wanted, found, ignorable)

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """See `WeightReader`."""
        key = hf_name(name)
        found: torch.Tensor = self._open(self._place[key]).get_tensor(key)
        return found.to(dtype)

    def quantised(self, name: str) -> QuantisedTensor | None:
        """Safetensors hold plain tensors here."""
        return None

    def stored(self, name: str) -> torch.Tensor:
        """See `WeightReader`."""
        key = hf_name(name)
        found: torch.Tensor = self._open(self._place[key]).get_tensor(key)
        return found

    def optional(self, name: str, dtype: torch.dtype) -> torch.Tensor | None:
        """See `WeightReader`."""
        if name == ROPE_FACTORS or hf_name(name) not in self._place:
            return None
        return self.tensor(name, dtype)

    def _open(self, file: str) -> Any:
        if file not in self._files:
            path = self._folder / file
            try:
                self._files[file] = safe_open(path, framework="pt")
            except FileNotFoundError:
                raise ConfigError(f"{path}: missing; the index names it") from None
            except (OSError, SafetensorError) as error:
                raise ConfigError(
                    f"{path}: corrupt or truncated ({error}); download it again"
                ) from None
        return self._files[file]

    def _shape(self, file: str, name: str) -> tuple[int, ...]:
        try:
            part = self._open(file).get_slice(name)
        except SafetensorError:
            raise ConfigError(f"{self._folder / file}: tensor {name} is missing in it") from None
        if part.get_dtype() not in _DTYPES:
            raise ConfigError(
                f"{self._folder / file}: tensor {name} has the unsupported type {part.get_dtype()}; "
                f"use {', '.join(_DTYPES)}"
            )
        return tuple(part.get_shape())


def _places(folder: Path) -> dict[str, str]:
    """Tensor name -> file name, from the index or from the files themselves."""
    if (folder / _INDEX).is_file():
        weight_map = read_json(folder / _INDEX, required=True).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ConfigError(f"{folder / _INDEX}: holds no weight_map; download it again")
        return {str(name): str(file) for name, file in weight_map.items()}
    places = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as opened:
                places.update(dict.fromkeys(opened.keys(), path.name))
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"{path}: corrupt or truncated ({error}); download it again"
            ) from None
    return places
