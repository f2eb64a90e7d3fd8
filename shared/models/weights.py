"""Reading tensors of a source, after checking that source and model name the same ones."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from finback.shared.errors import ConfigError
from finback.shared.models.coverage import coverage_problems


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedTensor:
    """A matrix in GGUF blocks: `data` [out, row_bytes] uint8, a view of the file where possible."""

    type_name: str
    shape: tuple[int, int]
    data: npt.NDArray[np.uint8]


class WeightReader(Protocol):
    """Tensors by our names (`weight_names`). All matrices are [out, in], heads in "neox" order."""

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The tensor, dequantised and converted; a new tensor or a view of the file."""
        ...

    def quantised(self, name: str) -> QuantisedTensor | None:
        """The tensor as GGUF blocks, or None if it is a plain one."""
        ...

    def stored(self, name: str) -> torch.Tensor:
        """A plain tensor in its own precision."""
        ...

    def optional(self, name: str, dtype: torch.dtype) -> torch.Tensor | None:
        """Like `tensor`, None if the source has no such tensor."""
        ...


def check_coverage(
    where: str,
    wanted: Mapping[str, tuple[int, ...]],
    found: Mapping[str, tuple[int, ...]],
    ignorable: Iterable[str],
) -> None:
    """Every wanted tensor is there in its shape, and nothing is left over; names as in the source."""
    for problem in coverage_problems(wanted, found, ignorable):
        raise ConfigError(f"{where}: {problem}")
