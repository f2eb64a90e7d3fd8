"""Tensors of a GGUF file."""

from typing import Final

import gguf.quants
import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGMLQuantizationType

from finback.shared.errors import ConfigError
from finback.shared.models.config import ModelConfig
from finback.shared.models.gguf_metadata import GgufHeader, TensorInfo
from finback.shared.models.weight_names import ROPE_FACTORS, gguf_name, shapes
from finback.shared.models.weights import QuantisedTensor, check_coverage

_PLAIN: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GgufWeights:
    """A `WeightReader` over the mapped file."""

    def __init__(self, header: GgufHeader, config: ModelConfig) -> None:
        self._header = header
        self._config = config
        check_coverage(
            str(header.path),
            {gguf_name(name): shape for name, shape in shapes(config).items()},
            {name: info.shape for name, info in header.tensors.items()},
            (gguf_name(ROPE_FACTORS),),
        )

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """See `WeightReader`."""
        info = self._header.tensors[gguf_name(name)]
        raw = self._header.raw(info)
        if info.type_name in _PLAIN:
            # Copied, since torch refuses to wrap read-only memory without a warning.
            found = torch.from_numpy(raw.copy()).view(_PLAIN[info.type_name]).to(dtype)
        else:
            kind = GGMLQuantizationType[info.type_name]
            rows = raw.reshape(-1, info.num_bytes // _num_rows(info))
            try:
                values = gguf.quants.dequantize(rows, kind)
            except NotImplementedError:
                raise ConfigError(
                    f"{self._header.path}: tensor {info.name} has the unsupported type "
                    f"{info.type_name}; use a file of Q4_0, Q4_1, Q4_K, Q6_K, Q8_0 or F16"
                ) from None
            found = torch.from_numpy(np.ascontiguousarray(values)).to(dtype)
        return self._reorder(name, found.view(info.shape))

    def quantised(self, name: str) -> QuantisedTensor | None:
        """See `WeightReader`."""
        info = self._header.tensors[gguf_name(name)]
        if info.type_name in _PLAIN or len(info.shape) != 2:
            return None
        rows = self._header.raw(info).reshape(info.shape[0], -1)
        order = self._row_order(name, info.shape[0])
        return QuantisedTensor(
            type_name=info.type_name,
            shape=(info.shape[0], info.shape[1]),
            data=rows if order is None else rows[order],
        )

    def stored(self, name: str) -> torch.Tensor:
        """See `WeightReader`."""
        type_name = self._header.tensors[gguf_name(name)].type_name
        return self.tensor(name, _PLAIN.get(type_name, torch.float32))

    def optional(self, name: str, dtype: torch.dtype) -> torch.Tensor | None:
        """See `WeightReader`."""
        return self.tensor(name, dtype) if gguf_name(name) in self._header.tensors else None

    def _reorder(self, name: str, found: torch.Tensor) -> torch.Tensor:
        order = self._row_order(name, found.shape[0])
        return found if order is None else found[torch.from_numpy(order)]

    def _row_order(self, name: str, num_rows: int) -> npt.NDArray[np.int64] | None:
        """Llama files keep q and k rows for rotation of neighbours; ours rotates halves."""
        if self._config.architecture != "llama" or name.partition(".")[2] not in _PERMUTED:
            return None
        head_dim = self._config.head_dim
        rows = np.arange(num_rows).reshape(-1, head_dim // 2, 2)
        return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(-1)


_PERMUTED: Final = ("q", "k", "q.bias", "k.bias")


def _num_rows(info: TensorInfo) -> int:
    return info.shape[0] if len(info.shape) > 1 else 1
