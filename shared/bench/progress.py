"""Shows how a bench goes on: a bar on a terminal, a line now and then anywhere else."""

import time
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from finback.shared.bench.record import Line

LINE_EVERY_S: Final = 5.0


class PlainObserver:
    """Lines, for logs and pipes. See `session.Observer`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._title = ""
        self._num_tokens = 0
        self._num_requests = 0
        self._began_s = self._told_s = 0.0

    def says(self, text: str) -> None:
        self._console.print(text)

    def warns(self, text: str) -> None:
        self._console.print(f"[yellow]note:[/yellow] {text}")

    def begins(self, title: str, num_requests: int, num_tokens: int) -> None:
        self._title, self._num_requests, self._num_tokens = title, num_requests, num_tokens
        self._began_s = self._told_s = time.monotonic()

    def goes_on(self, num_done: int, num_tokens: int) -> None:
        now_s = time.monotonic()
        if now_s - self._told_s >= LINE_EVERY_S:
            self._told_s = now_s
            speed = num_tokens / (now_s - self._began_s)
            self._console.print(
                f"{self._title}: {num_done} of {self._num_requests} requests, {num_tokens} of "
                f"{self._num_tokens} tokens, {speed:,.0f} tokens/s"
            )

    def repetition(self, line: Line) -> None:
        self._console.print(f"{self._title}: {_told(line)}")

    def ends(self) -> None:
        """Nothing is left on the screen."""


class BarObserver(PlainObserver):
    """A bar for the repetition that runs; a line for each that is over."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._bar: Progress | None = None
        self._task: Any = None

    def begins(self, title: str, num_requests: int, num_tokens: int) -> None:
        super().begins(title, num_requests, num_tokens)
        self.ends()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:,.0f} of {task.total:,.0f} tokens"),
            TextColumn("{task.fields[requests]}"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )
        self._task = self._bar.add_task(title, total=num_tokens, requests="")
        self._bar.start()

    def goes_on(self, num_done: int, num_tokens: int) -> None:
        if self._bar is not None:
            requests = f"{num_done} of {self._num_requests} requests"
            self._bar.update(self._task, completed=num_tokens, requests=requests)

    def repetition(self, line: Line) -> None:
        self.ends()
        super().repetition(line)

    def ends(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def observer(console: Console) -> PlainObserver:
    """What fits where the console writes."""
    return BarObserver(console) if console.is_terminal else PlainObserver(console)


def _told(line: Line) -> str:
    found = line["figures"]
    text = f"{found['output_tokens']} tokens in {found['elapsed_s']:.2f} s"
    text += f", {found['output_tokens_per_s']:,.1f} tokens/s"
    if (ttft := found.get("ttft_s")) is not None:
        text += f", first token p50 {1e3 * ttft['p50']:,.0f} ms"
    if found["num_refusals"]:
        text += f", {found['num_refusals']} refused"
    if not line["is_complete"]:
        text += " (cut short)"
    return text
