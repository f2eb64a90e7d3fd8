"""Lane `file`: bytes through a folder that both hosts see, such as a 3FS or NFS mount.

    <lane_dir>/<instance>.<epoch>/nonce     what a reader must find to use the lane
    <lane_dir>/<instance>.<epoch>/alive     touched while the writer lives
    <lane_dir>/<instance>.<epoch>/<ticket>  one block: its bytes and nothing else

Files are not synced: a block lost in a crash is a miss. Reads go around the page cache where the file
system allows it (a block is read once), and are checked as any ticket's are.
"""

import contextlib
import os
import re
import secrets
import shutil
from pathlib import Path
from typing import Final

import anyio
import xxhash
from anyio import to_thread

from finback.shared.clock import monotonic_s
from finback.shared.errors import ConfigError, Overloaded, Unavailable
from finback.shared.lanes.base import Buffer, CorruptData, destination
from finback.shared.lanes.direct_read import read_and_digest
from finback.shared.lanes.ticket import Ticket

KIND: Final = "file"
MAX_OFFERED_BYTES: Final = 4 * 1024 * 1024 * 1024
TOUCH_S: Final = 10.0
# A writer that does not touch its folder for so long is dead.
DEAD_S: Final = 60.0
_NONCE: Final = "nonce"
_ALIVE: Final = "alive"
_FOLDER: Final = re.compile(r"^[a-z0-9][a-z0-9_-]{0,127}\.[0-9]{1,20}\Z")
_LOCATION: Final = re.compile(r"^[a-z0-9][a-z0-9_-]{0,127}\.[0-9]{1,20}/[0-9a-f]{32}\Z")


class FileLane:
    """Both ends. `owner` and `owner_epoch` name this side's sub-folder; "" for one that only reads."""

    kind: Final = KIND

    def __init__(
        self,
        folder: str | Path,
        owner: str = "",
        owner_epoch: int = 0,
        *,
        max_offered_bytes: int = MAX_OFFERED_BYTES,
    ) -> None:
        self._folder = Path(folder)
        self._own = f"{owner}.{owner_epoch}" if owner else ""
        self._max_offered_bytes = max_offered_bytes
        self._offered: dict[str, int] = {}
        self._nonce = ""
        self._sweeper = Sweeper(self._folder)

    @property
    def num_offered_bytes(self) -> int:
        """Bytes of files that are not released."""
        return sum(self._offered.values())

    @property
    def address(self) -> str:
        """What a peer must be able to read to use this lane: `<sub-folder>:<nonce>`."""
        return f"{self._own}:{self._nonce}" if self._nonce else ""

    async def start(self) -> None:
        """Make this side's sub-folder. `ConfigError` if that is not possible."""
        if self._own and not self._nonce:
            await to_thread.run_sync(self._make_own)

    async def run(self) -> None:
        """Show that this writer lives, and sweep after dead ones; runs until cancelled."""
        while True:
            await anyio.sleep(TOUCH_S)
            with contextlib.suppress(OSError, ConfigError):
                await to_thread.run_sync(self._keep_house)

    async def can_read(self, address: str) -> bool:
        """The probe: whether the peer of this address writes where we can read."""
        own, _, nonce = address.partition(":")
        if not nonce or not _FOLDER.match(own):
            return False
        return await to_thread.run_sync(_holds, self._folder / own / _NONCE, nonce)

    async def put(self, data: Buffer) -> Ticket:
        """Write a file. Raises `Overloaded` above the bound, `Unavailable` when it cannot be written."""
        if not self._nonce:
            raise ValueError("a lane that only reads cannot put")
        source = memoryview(data).cast("B")
        if self.num_offered_bytes + len(source) > self._max_offered_bytes:
            raise Overloaded("too many bytes wait to be fetched", retry_after_s=1.0)
        location = f"{self._own}/{secrets.token_hex(16)}"
        self._offered[location] = len(source)
        try:
            digest = await to_thread.run_sync(_write, self._folder / location, source)
        except OSError as error:
            self._offered.pop(location, None)
            raise Unavailable(f"cannot write to lane_dir: {error.strerror}") from error
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._unlink(location)
            raise
        return Ticket(kind=KIND, location=location, length=len(source), checksum=digest)

    async def get(self, ticket: Ticket, out: memoryview | None = None) -> memoryview:
        """Read the file and verify what was read."""
        if ticket.kind != KIND or not _LOCATION.match(ticket.location):
            raise CorruptData("ticket", f"kind {ticket.kind!r} on lane {KIND!r}")
        view = destination(ticket, out)
        path = self._folder / ticket.location
        try:
            digest = await to_thread.run_sync(read_and_digest, path, view)
        except FileNotFoundError as error:
            raise CorruptData("gone", ticket.location) from error
        except OSError as error:
            raise CorruptData("unreachable", str(error.strerror)) from error
        if digest != ticket.checksum:
            raise CorruptData("checksum", ticket.location)
        return view

    async def release(self, ticket: Ticket) -> None:
        """Remove the file."""
        if ticket.location in self._offered:
            await self._unlink(ticket.location)

    async def close(self) -> None:
        """Remove everything that this side wrote."""
        self._offered.clear()
        if self._nonce:
            self._nonce = ""
            await to_thread.run_sync(_remove, self._folder / self._own)

    async def _unlink(self, location: str) -> None:
        self._offered.pop(location, None)
        with contextlib.suppress(OSError):
            await to_thread.run_sync((self._folder / location).unlink)

    def _keep_house(self) -> None:
        try:
            os.utime(self._folder / self._own / _ALIVE)
        except FileNotFoundError:  # removed by somebody: what was offered is gone
            self._make_own()
        self._sweeper.sweep(monotonic_s())

    def _make_own(self) -> None:
        nonce, own = secrets.token_hex(16), self._folder / self._own
        try:
            own.mkdir(mode=0o700, parents=True, exist_ok=True)
            for name, text in ((_ALIVE, ""), (_NONCE, nonce)):
                with open(own / name, "w", opener=_private) as file:
                    file.write(text)
        except OSError as error:
            raise ConfigError(f"lane_dir {self._folder}: {error.strerror}") from error
        self._nonce = nonce


class Sweeper:
    """Removes what dead writers left: folders whose sign of life stood still for `DEAD_S`.

    Told by change and by this process's monotonic clock: neither a clock that jumps nor hosts that
    disagree about the time can kill a living writer's files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: dict[str, tuple[float, float]] = {}

    def sweep(self, now_s: float) -> list[str]:
        """Look once; the names of the folders removed. Raises OSError when the folder is away."""
        found, removed = {}, []
        for entry in os.scandir(self._folder):
            if not _FOLDER.match(entry.name) or not entry.is_dir(follow_symlinks=False):
                continue
            sign_s = _sign_of_life(Path(entry.path))
            last = self._seen.get(entry.name)
            if last is None or last[0] != sign_s:
                found[entry.name] = (sign_s, now_s)
            elif now_s - last[1] < DEAD_S:
                found[entry.name] = last
            else:
                _remove(Path(entry.path))
                removed.append(entry.name)
        self._seen = found
        return removed


def _sign_of_life(own: Path) -> float:
    try:
        return (own / _ALIVE).stat().st_mtime
    except OSError:
        return 0.0  # half made, or half removed


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _holds(path: Path, nonce: str) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(len(nonce) + 1) == nonce.encode()
    except OSError:
        return False


def _write(path: Path, source: memoryview) -> bytes:
    """The checksum of the source, not of the file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        at = 0
        while at < len(source):
            at += os.write(descriptor, source[at:])
    except OSError:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    return xxhash.xxh3_128_digest(source)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)
