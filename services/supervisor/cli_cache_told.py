"""What a `finback cache` command says: lines for people or one JSON object, and its exit code."""

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, is_dataclass
from typing import Any

from finback.services.supervisor.cache_desk import Answers


class Told:
    """Collects what instances answered. A single one that did not makes the exit code 1."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._told: dict[str, Any] = {}
        self._failed: dict[str, str] = {}
        self.code = 0

    def line(self, text: str) -> None:
        """A line for people."""
        if not self._as_json:
            sys.stdout.write(text + "\n")

    def complain(self, text: str) -> None:
        """Something is wrong: on stderr, and in the exit code."""
        self.code = 1
        sys.stderr.write(text + "\n")

    def put(self, group: str, name: str, value: Any) -> None:
        """An answer, as JSON has it."""
        self._told.setdefault(group, {})[name] = plain(value)

    def take(self, answers: Answers, group: str) -> dict[str, Any]:
        """Note all answers of a question, and who gave none; returns the answers."""
        for name, reply in answers.found.items():
            self.put(group, name, reply)
        self.failed(answers)
        return answers.found

    def failed(self, answers: Answers) -> None:
        """Note who gave no answer, and why."""
        for name, why in answers.failed.items():
            if self._failed.get(name) != why:
                self._failed[name] = why
                self.complain(f"{name}: {why}")

    def end(self) -> int:
        """The exit code, after the JSON object if that is wanted."""
        if self._as_json:
            told = {**self._told, "failed": self._failed}
            sys.stdout.write(json.dumps(told, indent=2) + "\n")
        return self.code

    @contextlib.contextmanager
    def progress(self, what: str, total: int) -> Iterator["Bar"]:
        """A bar on a terminal's stderr; nothing where nobody looks. `total` 0: not known."""
        if self._as_json or not sys.stderr.isatty():
            yield Bar(None)
            return
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
        console = Console(stderr=True)
        with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as shown:
            task = shown.add_task(what, total=total or None)
            yield Bar(lambda num_bytes: shown.update(task, completed=num_bytes))


class Bar:
    """One bar; may be shown to nobody."""

    def __init__(self, show: Any) -> None:
        self._show = show

    def at(self, num_bytes: int) -> None:
        """So many bytes are done."""
        if self._show is not None:
            self._show(num_bytes)


def plain(value: Any) -> Any:
    """What JSON can say of a message: bytes as hex digits."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value
