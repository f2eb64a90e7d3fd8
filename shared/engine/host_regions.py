"""Host memory that the device copies by itself: mappings, registered with it on first use.

Pinning an arena's extent once lets the device write blocks straight into shared memory; a view of
anything else (or when the driver refuses) takes a pinned staging buffer instead.
"""

import mmap
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import numpy as np

MAX_REGIONS: Final = 64

# (address, bytes) -> whether the driver took it; and the way back by address.
Register = Callable[[int, int], bool]
Unregister = Callable[[int], None]


class HostRegions:
    """Which mappings are registered. For the device's thread alone."""

    def __init__(
        self, register: Register, unregister: Unregister, max_regions: int = MAX_REGIONS
    ) -> None:
        self._register = register
        self._unregister = unregister
        self._max_regions = max_regions
        # By address, the longest unused first. A view each, so that no mapping ends while registered;
        # None for one that the driver refused, which is not asked again.
        self._regions: OrderedDict[int, tuple[int, memoryview | None]] = OrderedDict()

    def holds(self, view: memoryview) -> bool:
        """Whether the device can copy from and to `view` by itself; registers its mapping at first."""
        if not isinstance(view.obj, mmap.mmap):
            return False
        whole = memoryview(view.obj)
        address = int(np.frombuffer(whole, np.uint8).ctypes.data)
        known = self._regions.get(address)
        if known is None or known[0] != len(whole):
            known = self._add(address, whole)
        self._regions.move_to_end(address)
        return known[1] is not None

    def clear(self) -> None:
        """Unregister all."""
        while self._regions:
            self._drop_oldest()

    def _add(self, address: int, whole: memoryview) -> tuple[int, memoryview | None]:
        if address in self._regions:  # a refused mapping ended, and another lies there
            del self._regions[address]
        while len(self._regions) >= self._max_regions:
            self._drop_oldest()
        is_taken = self._register(address, len(whole))
        found = self._regions[address] = (len(whole), whole if is_taken else None)
        return found

    def _drop_oldest(self) -> None:
        address, (_, whole) = self._regions.popitem(last=False)
        if whole is not None:
            self._unregister(address)
            whole.release()
