"""Tensors read by byte range: no mapping, so that what was read leaves no pages behind."""

import os
from typing import Final

import torch

from finback.shared.errors import ConfigError
from finback.shared.models.safetensors_header import Stored

_PIECE_BYTES: Final = 64 * 1024 * 1024
DTYPES: Final = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}


def read(stored: Stored) -> torch.Tensor:
    """The tensor, in memory of its own."""
    data = torch.empty(stored.num_bytes, dtype=torch.uint8)
    view = data.numpy().data
    descriptor = os.open(stored.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        done = 0
        while done < stored.num_bytes:
            piece = view[done : done + _PIECE_BYTES]
            num_read = os.preadv(descriptor, [piece], stored.start + done)
            if num_read <= 0:
                raise ConfigError(f"{stored.path}: cut short while it was read")
            done += num_read
        os.posix_fadvise(descriptor, stored.start, stored.num_bytes, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    return data.view(DTYPES[stored.dtype]).view(stored.shape)
