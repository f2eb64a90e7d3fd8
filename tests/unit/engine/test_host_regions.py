"""Which mappings a device has registered: each once, a bounded number, none that could end."""

import mmap

import numpy as np
import pytest
import torch

from finback.shared.engine.device import Device
from finback.shared.engine.host_regions import HostRegions
from finback.shared.models.kv_pool import KVPool

BYTES = 8192


class Driver:
    """Stands for the driver: what is registered now."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.now: dict[int, int] = {}
        self.num_asked = 0
        self.refuses = refuses

    def register(self, address: int, num_bytes: int) -> bool:
        self.num_asked += 1
        assert address not in self.now
        if not self.refuses:
            self.now[address] = num_bytes
        return not self.refuses

    def unregister(self, address: int) -> None:
        del self.now[address]


def test_a_mapping_is_registered_once_and_whole() -> None:
    driver = Driver()
    regions = HostRegions(driver.register, driver.unregister)
    data = mmap.mmap(-1, BYTES)
    assert regions.holds(memoryview(data)[100:200])
    assert regions.holds(memoryview(data)[5000:])
    assert list(driver.now.values()) == [BYTES]
    with pytest.raises(BufferError):
        data.close()  # the device still knows it
    regions.clear()
    assert driver.now == {}
    data.close()


def test_other_memory_and_refused_mappings_take_another_way() -> None:
    driver = Driver(refuses=True)
    regions = HostRegions(driver.register, driver.unregister)
    assert not regions.holds(memoryview(bytearray(10)))
    assert driver.num_asked == 0
    data = mmap.mmap(-1, BYTES)
    assert not regions.holds(memoryview(data))
    assert not regions.holds(memoryview(data))
    assert driver.num_asked == 1, "not asked again"
    data.close()


def test_the_longest_unused_is_given_back() -> None:
    driver = Driver()
    regions = HostRegions(driver.register, driver.unregister, max_regions=2)
    first, second, third = (mmap.mmap(-1, BYTES) for _ in range(3))
    for data in (first, second, first, third):
        assert regions.holds(memoryview(data))
    assert len(driver.now) == 2
    second.close()
    for data in (first, third):
        with pytest.raises(BufferError):
            data.close()
    regions.clear()


@pytest.mark.parametrize("layout", ["token_major", "head_major"])
def test_the_ways_of_a_device_equal_those_of_the_pool(layout: str) -> None:
    pool = KVPool(
        num_layers=2, num_blocks=3, block_size=8, num_kv_heads=2, head_dim=4, kv_dtype="f32",
        device="cpu", layout=layout,  # type: ignore[arg-type]  # a row of names
    )  # fmt: skip
    pool.k.copy_(torch.randn(pool.k.shape))
    pool.v.copy_(torch.randn(pool.v.shape))
    device = Device("cpu")
    for num_tokens in (1, 8):
        plain, other = (bytearray(pool.num_bytes(num_tokens)) for _ in range(2))
        pool.pack_block(1, num_tokens, plain)
        device.copy_out(pool.gather_block(1, num_tokens), memoryview(other))
        assert other == plain
        packed = pool.empty_block(num_tokens)
        device.copy_in(memoryview(bytes(plain)), packed)
        pool.scatter_block(2, num_tokens, packed)
        again = bytearray(len(plain))
        pool.pack_block(2, num_tokens, again)
        assert np.array_equal(np.frombuffer(again, np.uint8), np.frombuffer(plain, np.uint8))
