"""Has pages of memory made ready before they are needed, without changing what they hold.

The first write to a page stops for the kernel to find and clear it; on a virtual machine that can take
longer than to copy a KV block there.
"""

import ctypes
import mmap
import sys
from typing import Final

import numpy as np
import numpy.typing as npt

# <asm-generic/mman-common.h>, since Linux 5.14.
_MADV_POPULATE_WRITE: Final = 23


def touch(array: npt.NDArray[np.generic]) -> bool:
    """Make all pages of a contiguous array ready; False where the system cannot.

    Safe beside others' reads and writes. Blocks, and releases the interpreter lock meanwhile.
    """
    if sys.platform != "linux" or not array.nbytes:
        return False
    page = mmap.PAGESIZE
    start = array.ctypes.data // page * page
    num_bytes = array.ctypes.data + array.nbytes - start
    libc = ctypes.CDLL(None, use_errno=True)
    advice = ctypes.c_int(_MADV_POPULATE_WRITE)
    return bool(libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(num_bytes), advice) == 0)
