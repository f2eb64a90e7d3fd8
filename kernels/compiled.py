"""Compiling kernels with numba, and keeping the machine code between processes.

numba's own cache looks at one source file, ours at all of this room (a kernel is emitted by several),
and it must not fail on a read-only installation. The folder is named by a digest of the sources;
numba adds its own version and the processor's name and features to the key.
"""

import os
import sys
from collections.abc import Callable
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import numba
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator

from finback.kernels import cpu_features

CACHE_VARIABLE: Final = "FINBACK_KERNEL_CACHE"
_ROOM: Final = Path(__file__).parent
_SOURCES: Final = ("cpu_*.py", "compiled.py", "layout.py", "native.py", "simd.py")


@cache
def source_digest() -> str:
    """Changes with the kernel set and any source of machine code (not with those of other devices)."""
    digest = blake2b(cpu_features.chosen().name.encode(), digest_size=12)
    for path in sorted(path for name in _SOURCES for path in _ROOM.rglob(name)):
        digest.update(path.relative_to(_ROOM).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


@cache
def cache_folder() -> Path:
    """The first place that holds these kernels, or else can be written, or else the last one."""
    places = [
        Path(sys.prefix) / "share" / "finback" / "kernels",
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "finback" / "kernels",
    ]
    if os.environ.get(CACHE_VARIABLE):
        places = [Path(os.environ[CACHE_VARIABLE])]
    folders = [place / source_digest() for place in places]
    for folder in folders:
        if any(folder.glob("*.nbi")):
            return folder
    for folder in folders:
        parent = next(part for part in folder.parents if part.exists())
        if os.access(parent, os.W_OK):
            return folder
    return folders[-1]


class _Locator(_CacheLocator):  # type: ignore[misc]  # numba has no types
    """One folder for all kernels."""

    def __init__(self, name: str) -> None:
        self._name = name

    def ensure_cache_path(self) -> None:
        cache_folder().mkdir(parents=True, exist_ok=True)

    def get_cache_path(self) -> str:
        return str(cache_folder())

    def get_source_stamp(self) -> str:
        return source_digest()

    def get_disambiguator(self) -> str:
        return self._name

    @classmethod
    def from_function(cls, py_func: Callable[..., Any], py_file: str) -> "_Locator":
        return cls(py_func.__module__.replace(".", "_"))


class _CacheImpl(CompileResultCacheImpl):  # type: ignore[misc]  # numba has no types
    _locator_classes = (_Locator,)


class _Cache(FunctionCache):  # type: ignore[misc]  # numba has no types
    _impl_class = _CacheImpl

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError:
            # Read-only or full: this process has its code, the next one compiles again.
            self.disable()


def device_function(function: Callable[..., Any]) -> Any:
    """Code that other compiled code calls.

    numba compiles each such function, and all that it calls, again at every level of calls, so there
    should be few levels: use `inlined` below the first.
    """
    return numba.njit(nogil=True, error_model="numpy")(function)


def inlined(function: Callable[..., Any]) -> Any:
    """Code that becomes part of the compiled function that calls it."""
    return numba.njit(nogil=True, error_model="numpy", inline="always")(function)


def compiled(signature: str) -> Callable[[Callable[..., Any]], Any]:
    """An entry point: runs without the GIL, compiled on first use, then cached on disk."""

    def wrap(function: Callable[..., Any]) -> Any:
        return _Lazy(function, signature)

    return wrap


class _Lazy:
    """Compiles for its one signature when first called, so that importing costs nothing."""

    def __init__(self, function: Callable[..., Any], signature: str) -> None:
        self.__doc__ = function.__doc__
        self.__name__ = function.__name__
        self._function = function
        self._signature = signature
        self._call: Callable[..., Any] | None = None

    def compile(self) -> Callable[..., Any]:
        """Load or compile; returns the callable."""
        if self._call is None:
            dispatcher = numba.njit(nogil=True, error_model="numpy")(self._function)
            dispatcher._cache = _Cache(self._function)
            dispatcher.compile(self._signature)
            dispatcher.disable_compile()
            self._call = dispatcher
        return self._call

    def __call__(self, *args: Any) -> Any:
        return (self._call or self.compile())(*args)
