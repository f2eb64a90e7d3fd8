"""A whole stack, started and asked as a user would: through the command line and over HTTP."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

COMMAND = [sys.executable, "-m", "finback.services.supervisor"]
# Room for compiling kernels, should none be kept yet.
START_TIMEOUT_S = 300
RESTORE_TIMEOUT_S = 180.0
TRACE_TIMEOUT_S = 90.0


def finback(
    *arguments: str, timeout_s: float = 120, cwd: Path | None = None, stdin: str | None = None
) -> "subprocess.CompletedProcess[str]":
    """One command, with no settings but its own."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("FINBACK_")}
    return subprocess.run(
        [*COMMAND, *arguments],
        cwd=cwd,
        env=clean,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@dataclass(slots=True)
class Stack:
    """One run directory and what runs in it."""

    run_dir: Path

    def up(self, *options: str) -> "subprocess.CompletedProcess[str]":
        done = self.command("up", "--detach", *options, timeout_s=START_TIMEOUT_S)
        if done.returncode:
            logs = "\n".join(
                f"== {path.name}\n{path.read_text()[-1500:]}"
                for path in sorted((self.run_dir / "logs").glob("*.log"))
            )
            raise RuntimeError(f"up failed: {done.stderr}\n{logs}")
        return done

    def command(
        self, name: str, *arguments: str, timeout_s: float = 120, stdin: str | None = None
    ) -> "subprocess.CompletedProcess[str]":
        return finback(
            name, *arguments, "--run-dir", str(self.run_dir), timeout_s=timeout_s, stdin=stdin
        )

    def trace_with(self, *names: str) -> str:
        """The last trace as drawn, once spans of these names are in it: processes write theirs by and by."""
        end_s = time.monotonic() + TRACE_TIMEOUT_S
        while True:
            drawn = self.command("trace", "last").stdout
            if all(name in drawn for name in names) or time.monotonic() > end_s:
                return drawn
            time.sleep(0.3)

    def down(self) -> None:
        self.command("down", timeout_s=240)

    def status(self) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(self.command("status", "--json").stdout)
        return told

    def pid(self, service: str) -> int:
        return int(self.status()["services"][service]["pid"])

    @property
    def http(self) -> str:
        return str(self._state()["http"])

    @property
    def supervisor_pid(self) -> int:
        return int(self._state()["supervisor_pid"])

    def pids(self) -> list[int]:
        """Every process of the stack, the supervisor and its NATS server among them."""
        state = self._state()
        found = {int(service["pid"]) for service in state["services"].values()}
        return sorted((found | {int(state["supervisor_pid"]), int(state["nats_pid"])}) - {0})

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads((self.run_dir / "stack.json").read_text())
        return state

    def kill(self, service: str) -> str:
        """As `kill -9` from a shell; the instance that died."""
        told = self.status()["services"][service]
        os.kill(int(told["pid"]), signal.SIGKILL)
        return str(told["instance"])

    def kill_nats(self) -> None:
        """As `kill -9` of the private server."""
        os.kill(int(self._state()["nats_pid"]), signal.SIGKILL)

    def whole(
        self,
        text: str,
        *,
        meanwhile: tuple[float, Callable[[], None]] | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """An answer that is not streamed; `meanwhile`: (seconds, what to do then)."""
        body = {"model": "gpt-4o", "messages": [{"role": "user", "content": text}], **options}
        timer = threading.Timer(*meanwhile) if meanwhile else threading.Timer(0, lambda: None)
        timer.start()
        reply = httpx.post(f"{self.http}/v1/chat/completions", json=body, timeout=120.0)
        timer.join()
        if reply.status_code != 200:
            raise StreamFailed(f"{reply.status_code}: {reply.text}")
        told: dict[str, Any] = reply.json()
        return told

    def wait_restored(self, service: str, lost: str) -> None:
        """Until another instance of the service serves."""
        deadline = time.monotonic() + RESTORE_TIMEOUT_S
        while time.monotonic() < deadline:
            told = self.status()["services"][service]
            if told["state"] == "serving" and told["instance"] != lost:
                return
            time.sleep(0.2)
        raise AssertionError(f"{service} is not back: {self.status()['services'][service]}")

    def stream(self, text: str, **options: Any) -> Iterator[dict[str, Any]]:
        """Chunks of a streamed chat answer; an error in the stream or before it raises."""
        body = {
            "model": "gpt-4o",
            "messages": [{"role": "user", "content": text}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
            **options,
        }
        url = f"{self.http}/v1/chat/completions"
        with httpx.stream("POST", url, json=body, timeout=httpx.Timeout(120.0)) as reply:
            if reply.status_code != 200:
                raise StreamFailed(f"{reply.status_code}: {reply.read().decode()}")
            for line in reply.iter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    return
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise StreamFailed(chunk["error"]["message"])
                yield chunk
        raise AssertionError("the stream broke off without an end or an error")

    def ask(self, text: str, **options: Any) -> "Answer":
        """A whole streamed answer."""
        answer = Answer()
        for chunk in self.stream(text, **options):
            answer.add(chunk)
        return answer


class StreamFailed(Exception):
    """The service said that the request failed."""


@dataclass(slots=True)
class Answer:
    """What came of an answer."""

    text: str = ""
    finish_reason: str | None = None
    completion_tokens: int = 0

    def add(self, chunk: dict[str, Any]) -> None:
        if chunk.get("usage"):
            self.completion_tokens = chunk["usage"]["completion_tokens"]
        for choice in chunk["choices"]:
            self.text += choice["delta"].get("content") or ""
            self.finish_reason = choice["finish_reason"] or self.finish_reason


def alive(pids: list[int]) -> list[int]:
    """Those that still run."""
    found = []
    for pid in pids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
        except psutil.NoSuchProcess:
            continue
    return found


def wait_gone(pids: list[int], timeout_s: float) -> list[int]:
    """Those that still run after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    return alive(pids)
