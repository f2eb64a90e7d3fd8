"""The seam to a device: the only module that may name `torch.cuda` or `torch.npu`.

It holds what is used, no more: copies in and out, free memory, threads. What a step needs beyond
that (streams, events, graphs) joins it here when a device needs it.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from finback.shared.engine.memory import free_memory_bytes
from finback.shared.errors import BackendUnavailable

DeviceName = Literal["cpu", "cuda"]
_T = TypeVar("_T")
_CGROUP_CPU: Final = Path("/sys/fs/cgroup/cpu.max")


def choose_device(wanted: str) -> DeviceName:
    """`auto` takes CUDA where there is one. Raises `BackendUnavailable` for what cannot run here."""
    has_cuda = torch.cuda.is_available()
    if wanted == "auto":
        return "cuda" if has_cuda else "cpu"
    if wanted == "cpu":
        return "cpu"
    if wanted == "cuda" and has_cuda:
        return "cuda"
    if wanted == "cuda":
        raise BackendUnavailable("device=cuda: this torch sees no CUDA device; use device=cpu")
    raise BackendUnavailable(f"device={wanted}: not supported yet; use device=cpu")


def num_cores() -> int:
    """Cores that this process may use: its affinity and its control group's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cores = cores or 1
    try:
        quota, period = _CGROUP_CPU.read_text().split()
        if quota != "max":
            cores = min(cores, max(1, -(-int(quota) // int(period))))
    except (OSError, ValueError):
        pass  # no control group, or an older kind: the affinity stands
    return cores


def set_num_threads(num_threads: int) -> None:
    """How many threads torch's CPU kernels use, for the whole process."""
    torch.set_num_threads(num_threads)


def record_graph(launch: Callable[[], _T]) -> tuple[Callable[[], None], _T]:
    """Record what `launch` launches: (replay, the tensors that each replay writes).

    It is called twice, first to compile kernels and make handles; both times it must launch only,
    over tensors that stay where they are.
    """
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        launch()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = launch()
    return graph.replay, found


class Device:
    """One device, used by one thread."""

    def __init__(self, name: DeviceName, num_threads: int = 0) -> None:
        self.name = name
        self._num_threads = num_threads or num_cores()
        self._torch_device = torch.device(name)

    def prepare_thread(self) -> None:
        """Set up the calling thread to compute; call it there once."""
        set_num_threads(self._num_threads)
        if self.name == "cuda":
            torch.cuda.set_device(torch.cuda.current_device())

    def tensor(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        """A host array on the device. On the CPU both share their memory."""
        host = torch.from_numpy(array)
        if self.name == "cpu":
            return host
        return host.pin_memory().to(self._torch_device, non_blocking=True)

    def free_bytes(self) -> int:
        """Device memory that can be taken now."""
        if self.name == "cuda":
            return int(torch.cuda.mem_get_info()[0])
        return free_memory_bytes()
