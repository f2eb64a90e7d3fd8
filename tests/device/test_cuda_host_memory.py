"""Blocks between an NVIDIA device and an arena's extent: registered memory, and staging beside it."""

import mmap
import os

import pytest
import torch

from finback.shared.engine.device import Device
from finback.shared.models.kv_pool import KVPool

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA device here"),
]

EXTENT_BYTES = 64 * 1024 * 1024
OFFSET = 12_288  # slots begin anywhere on a page


def pool() -> KVPool:
    made = KVPool(
        num_layers=4, num_blocks=6, block_size=64, num_kv_heads=4, head_dim=64, kv_dtype="bf16",
        device="cuda",
    )  # fmt: skip
    made.k.copy_(torch.randn(made.k.shape))
    made.v.copy_(torch.randn(made.v.shape))
    return made


def extent() -> mmap.mmap:
    """Shared memory as the arena's: a file on a tmpfs, mapped for writing."""
    path = f"/dev/shm/finback-test-{os.getpid()}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.unlink(path)
        os.posix_fallocate(descriptor, 0, EXTENT_BYTES)
        return mmap.mmap(descriptor, EXTENT_BYTES)
    finally:
        os.close(descriptor)


def test_an_extent_is_registered_and_written_by_the_device() -> None:
    source, device, data = pool(), Device("cuda"), extent()
    num_bytes = source.num_bytes(64)
    view = memoryview(data)[OFFSET : OFFSET + num_bytes]
    device.copy_out(source.gather_block(2, 64), view)
    assert torch.frombuffer(view, dtype=torch.uint8).is_pinned(), "the driver knows the mapping"
    expected = torch.stack((source.k[:, 2], source.v[:, 2]), dim=1).cpu()
    found = torch.frombuffer(view, dtype=torch.bfloat16).view(expected.shape)
    assert torch.equal(found, expected)
    packed = source.empty_block(64)
    device.copy_in(view, packed)
    source.scatter_block(5, 64, packed)
    assert torch.equal(source.k[:, 5], source.k[:, 2])
    assert torch.equal(source.v[:, 5], source.v[:, 2])
    device.close()
    del found
    view.release()
    data.close()


def test_other_memory_goes_through_staging() -> None:
    source, device = pool(), Device("cuda")
    for num_tokens in (64, 7):
        out = bytearray(source.num_bytes(num_tokens))
        device.copy_out(source.gather_block(1, num_tokens), memoryview(out))
        packed = source.empty_block(num_tokens)
        device.copy_in(memoryview(bytes(out)), packed)
        assert torch.equal(packed, source.gather_block(1, num_tokens))
    device.close()
