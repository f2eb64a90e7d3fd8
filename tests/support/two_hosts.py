"""A second and a third host, made of namespaces: their own network, and their own /dev/shm.

    with host("a") as a, host("b") as b:
        ServiceProcess("cache", env | {"FINBACK_NATS_URL": f"nats://{a.gateway}:{port}"}, within=a.within)

Both reach this host, and through nothing else each other's services; a path of `private` is a tmpfs of
each one's own. Needs root.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """`within` goes before a command to run it there; `gateway` is this host's address from there."""

    within: tuple[str, ...]
    gateway: str


def why_not() -> str:
    """Why hosts cannot be made here; empty if they can."""
    if os.geteuid() != 0:
        return "needs root to make network namespaces"
    for tool in ("ip", "nsenter", "unshare", "mount"):
        if shutil.which(tool) is None:
            return f"needs the command {tool}"
    try:
        with _namespace("probe"):
            return ""
    except RuntimeError as error:
        return f"no network namespaces: {error}"


@contextlib.contextmanager
def host(name: str, number: int, private: Path) -> Iterator[Host]:
    """One host; `number` 1 to 60 gives its addresses."""
    private.mkdir(parents=True, exist_ok=True)
    with _namespace(name) as space:
        ours, theirs = f"fb{os.getpid()}{name}0"[-15:], f"fb{os.getpid()}{name}1"[-15:]
        net = f"10.231.{os.getpid() % 250}.{4 * number}"
        gateway, address = _plus(net, 1), _plus(net, 2)
        _run("ip", "link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", space)
        try:
            _run("ip", "addr", "add", f"{gateway}/30", "dev", ours)
            _run("ip", "link", "set", ours, "up")
            for command in (
                f"addr add {address}/30 dev {theirs}",
                f"link set {theirs} up",
                "link set lo up",
            ):
                _run("ip", "-n", space, *command.split())
            with _holder(space, private) as pid:
                within = ("nsenter", "--target", str(pid), "--mount", "--net", "--")
                yield Host(within=within, gateway=gateway)
        finally:
            subprocess.run(["ip", "link", "del", ours], check=False, capture_output=True)


@contextlib.contextmanager
def _namespace(name: str) -> Iterator[str]:
    space = f"finback-{os.getpid()}-{name}"
    _run("ip", "netns", "add", space)
    try:
        yield space
    finally:
        subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)


@contextlib.contextmanager
def _holder(space: str, private: Path) -> Iterator[int]:
    """A process that keeps the mounts while it lives."""
    script = 'mount -t tmpfs -o size=256m none "$0" && echo ready && exec sleep 600'
    unshared = ["unshare", "--mount", "sh", "-c", script, str(private)]
    process = subprocess.Popen(
        ["ip", "netns", "exec", space, *unshared], stdout=subprocess.PIPE, text=True
    )
    try:
        line = process.stdout.readline() if process.stdout else ""
        if line.strip() != "ready":
            raise RuntimeError("cannot mount a tmpfs of its own")
        yield process.pid
    finally:
        process.kill()
        process.wait(_TIMEOUT_S)
        if process.stdout:
            process.stdout.close()


def _plus(net: str, number: int) -> str:
    head, _, last = net.rpartition(".")
    return f"{head}.{int(last) + number}"


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


def in_host(host: Host, command: Sequence[str]) -> str:
    """What a command prints there."""
    done = subprocess.run(
        [*host.within, *command], check=True, capture_output=True, text=True, timeout=_TIMEOUT_S
    )
    return done.stdout
