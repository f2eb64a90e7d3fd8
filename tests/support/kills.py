"""Streams that are disturbed on their way, and what came of them, to be compared with undisturbed ones."""

import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

from support.stack import Stack


@dataclass(slots=True)
class Told:
    """One choice as a client puts it together from chunks."""

    text: str = ""
    finish_reason: str | None = None
    num_finishes: int = 0
    logprobs: list[Any] = field(default_factory=list)
    calls: dict[int, list[str]] = field(default_factory=dict)

    def add(self, choice: dict[str, Any]) -> None:
        delta = choice["delta"]
        self.text += delta.get("content") or ""
        for call in delta.get("tool_calls") or ():
            parts = self.calls.setdefault(call["index"], ["", ""])
            parts[0] += call["function"].get("name") or ""
            parts[1] += call["function"].get("arguments") or ""
        self.logprobs += (choice.get("logprobs") or {}).get("content") or ()
        if choice["finish_reason"] is not None:
            self.finish_reason = choice["finish_reason"]
            self.num_finishes += 1


@dataclass(slots=True)
class Whole:
    """A whole streamed answer. `usage` without the counts of drafts, which a restart may change."""

    choices: dict[int, Told] = field(default_factory=dict)
    usage: dict[str, int] = field(default_factory=dict)

    def add(self, chunk: dict[str, Any]) -> None:
        for choice in chunk["choices"]:
            self.choices.setdefault(choice["index"], Told()).add(choice)
        if chunk.get("usage"):
            names = ("prompt_tokens", "completion_tokens", "total_tokens")
            self.usage = {name: chunk["usage"][name] for name in names}


@dataclass(slots=True)
class Engines:
    """The decode processes of a stack, by name, and which of them works."""

    stack: Stack
    names: Sequence[str]
    pids: dict[str, int] = field(default_factory=dict)
    used_s: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        services = self.stack.status()["services"]
        self.pids = {name: int(services[name]["pid"]) for name in self.names}
        self.mark()

    def mark(self) -> None:
        """From now on processor time counts."""
        self.used_s = {name: _cpu_s(pid) for name, pid in self.pids.items()}

    def busiest(self) -> str:
        """The one that worked most since the mark."""
        return max(self.pids, key=lambda name: _cpu_s(self.pids[name]) - self.used_s[name])

    def send(self, name: str, number: signal.Signals) -> None:
        os.kill(self.pids[name], number)

    def wait_whole(self, timeout_s: float = 60.0) -> None:
        """Until all of them serve again; the new processes are noted."""
        end_s = time.monotonic() + timeout_s
        while time.monotonic() < end_s:
            services = self.stack.status()["services"]
            if all(services[name]["state"] == "serving" for name in self.names):
                now = {name: int(services[name]["pid"]) for name in self.names}
                if all(psutil.pid_exists(pid) for pid in now.values()):
                    self.pids = now
                    return
            time.sleep(0.1)
        raise AssertionError(f"not whole: {self.stack.status()['services']}")


def _cpu_s(pid: int) -> float:
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def disturbed(
    chunks: Iterable[dict[str, Any]], at: Sequence[int], disturb: Callable[[int], None]
) -> Whole:
    """Read a stream; call `disturb(i)` when `at[i]` chunks have come."""
    whole, done = Whole(), 0
    for number, chunk in enumerate(chunks):
        whole.add(chunk)
        if done < len(at) and number >= at[done]:
            disturb(done)
            done += 1
    assert done == len(at), f"it ended before it could be disturbed {len(at)} times"
    return whole
