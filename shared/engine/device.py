"""The seam to a device: the only module that may name `torch.cuda` or `torch.npu`.

It holds what is used, no more: copies in and out, free memory, threads, graphs, events, and the guard
that lets no launch wait for the device.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from finback.shared.cores import num_cores
from finback.shared.engine.host_regions import HostRegions
from finback.shared.engine.memory import free_memory_bytes
from finback.shared.errors import BackendUnavailable

DeviceName = Literal["cpu", "cuda"]
_T = TypeVar("_T")
_PORTABLE = 1  # cudaHostRegisterPortable


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


def set_num_threads(num_threads: int) -> None:
    """How many threads torch's CPU kernels use, for the whole process."""
    torch.set_num_threads(num_threads)


def record_graph(
    launch: Callable[[], _T], pool: tuple[int, int] | None = None
) -> tuple[Callable[[], None], _T]:
    """Record what `launch` launches: (replay, the tensors that each replay writes).

    It is called twice, first to compile kernels and make handles; both times it must launch only,
    over tensors that stay where they are. Graphs of one `pool` share the memory in between: they must
    not run at the same time, and what is to outlast a replay must lie outside.
    """
    stream = _recording_stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        launch()
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")  # type: ignore[arg-type]  # torch names no type that one may import
        try:
            found = launch()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph.replay, found


def _replay(replay: Callable[[], None], _launch: Callable[[], object]) -> None:
    """What a graph was recorded over must outlive it, hence `_launch`."""
    replay()


def _drop(launch: Callable[[], object]) -> None:
    launch()


@cache
def _recording_stream() -> torch.cuda.Stream:
    """One for all graphs: what a library keeps for a stream is then kept once."""
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch leaves it untyped


@cache
def _say_once_that_the_guard_is_a_prototype() -> None:
    """Torch warns of its first use, once a process: here, where nobody is bothered."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("warn")
        torch.cuda.set_sync_debug_mode("default")


def _register(address: int, num_bytes: int) -> bool:
    """Pin host memory for every context; False if the driver will not (limits, kind of memory)."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return int(runtime.cudaHostRegister(address, num_bytes, _PORTABLE)) == 0


def _unregister(address: int) -> None:
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    runtime.cudaHostUnregister(address)


class Device:
    """One device, used by one thread."""

    def __init__(self, name: DeviceName, num_threads: int = 0) -> None:
        self.name = name
        self._num_threads = num_threads or num_cores()
        self._torch_device = torch.device(name)
        self._pool: tuple[int, int] | None = None
        self._regions = HostRegions(_register, _unregister)
        self._staging = torch.empty(0, dtype=torch.uint8)

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

    # -- blocks to and from host memory

    def copy_out(self, source: torch.Tensor, out: memoryview) -> None:
        """The bytes of a contiguous tensor of this device into host memory; returns when they are there.

        Straight into a mapping (an arena's extent), through pinned staging into anything else.
        """
        flat = source.view(torch.uint8).flatten()
        if self.name == "cpu":
            np.copyto(np.frombuffer(out, np.uint8), flat.numpy())
            return
        is_direct = self._regions.holds(out)
        host = torch.frombuffer(out, dtype=torch.uint8) if is_direct else self._staged(len(out))
        host.copy_(flat, non_blocking=True)
        self.mark()()
        if not is_direct:
            np.copyto(np.frombuffer(out, np.uint8), host.numpy())

    def copy_in(self, data: memoryview, target: torch.Tensor) -> None:
        """Host memory into a contiguous tensor of this device; `data` may be reused afterwards."""
        flat = target.view(torch.uint8).flatten()
        if self.name == "cpu":
            np.copyto(flat.numpy(), np.frombuffer(data, np.uint8))
            return
        if not data.readonly and self._regions.holds(data):
            host = torch.frombuffer(data, dtype=torch.uint8)
        else:
            host = self._staged(len(data))
            np.copyto(host.numpy(), np.frombuffer(data, np.uint8))
        flat.copy_(host, non_blocking=True)
        self.mark()()

    def close(self) -> None:
        """Give registered memory back; no copy may follow."""
        self._regions.clear()

    def _staged(self, num_bytes: int) -> torch.Tensor:
        if self._staging.numel() < num_bytes:
            self._staging = self.pinned(num_bytes, dtype=torch.uint8)
        return self._staging[:num_bytes]

    # -- steps that nobody waits for

    def pinned(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeros on the host that the device can copy from and to by itself."""
        return torch.zeros(shape, dtype=dtype, pin_memory=self.name == "cuda")

    def record(self, launch: Callable[[], object]) -> Callable[[], None]:
        """`launch` as something that can be launched again and again (a graph where there are any)."""
        if self.name == "cpu":
            return partial(_drop, launch)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        replay = record_graph(launch, self._pool)[0]
        return partial(_replay, replay, launch)

    def mark(self) -> Callable[[], None]:
        """What was launched so far: the returned call waits until it is done."""
        if self.name == "cpu":
            return lambda: None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        event.record()
        return event.synchronize

    @contextmanager
    def no_waiting(self) -> Iterator[None]:
        """Inside, whatever makes the host wait for the device raises instead.

        torch sees what goes through torch: reading a tensor's values, copies to and from memory
        that is not pinned, results whose shape depends on values.
        """
        if self.name == "cpu":
            yield
            return
        _say_once_that_the_guard_is_a_prototype()
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)

    def wait(self) -> None:
        """Wait for all that was launched."""
        if self.name == "cuda":
            torch.cuda.synchronize()
