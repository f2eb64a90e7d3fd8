"""The record of a bench: JSON lines, each whole by itself, written as soon as it is known."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Final, Self

from finback.shared.bench.stats import Spread
from finback.shared.errors import ConfigError

VERSION: Final = 1
Line = dict[str, Any]


class Recorder:
    """Appends lines to a file, or keeps them only (`path` None). A context manager."""

    def __init__(self, path: Path | None) -> None:
        """Opens the file at once: a path that cannot be written is no news after an hour's run."""
        self.lines: list[Line] = []
        self._file: IO[str] | None = None
        if path is None:
            return
        try:
            self._file = path.expanduser().open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"output: cannot write {path}: {error.strerror}") from None

    def add(self, line: Line) -> None:
        self.lines.append(line)
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()


def summary_line(head: Line, spreads: Mapping[str, Spread], **more: Any) -> Line:
    """The last line of a run. `head`: run id, workload, target, environment, ceilings."""
    figures = {
        name: {"median": s.median, "low": s.low, "high": s.high, "num": s.num}
        for name, s in spreads.items()
    }
    return {"kind": "summary", "version": VERSION, **head, **more, "figures": figures}


def spread_of(summary: Line, name: str) -> Spread | None:
    """A figure of a summary line."""
    found = summary["figures"].get(name)
    return None if found is None else Spread(**found)


def read_summaries(path: Path) -> list[Line]:
    """The summaries in a file, in order. Raises `ConfigError` for a file that is no record."""
    found = []
    try:
        with path.expanduser().open(encoding="utf-8") as file:
            for number, text in enumerate(file, 1):
                if not text.strip():
                    continue
                line = _line(text, path, number)
                if line.get("kind") == "summary":
                    found.append(line)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    if not found:
        raise ConfigError(f"{path}: no summary of a bench in it")
    return found


def _line(text: str, path: Path, number: int) -> Line:
    try:
        line = json.loads(text)
    except ValueError:
        raise ConfigError(f"{path}, line {number}: not JSON; was it written by bench?") from None
    if not isinstance(line, dict):
        raise ConfigError(f"{path}, line {number}: not an object; was it written by bench?")
    if line.get("kind") == "summary" and line.get("version") != VERSION:
        raise ConfigError(f"{path}, line {number}: version {line.get('version')}, not {VERSION}")
    return line
