"""Finds the stack that a command means."""

from dataclasses import dataclass
from pathlib import Path

from finback.services.supervisor.run_dir import RunDir, StackState
from finback.shared import config as settings
from finback.shared.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Running:
    """A stack that was started; `is_supervised` is False when its supervisor has died."""

    run_dir: RunDir
    state: StackState
    is_supervised: bool


def run_dir(given: Path | None) -> RunDir:
    """The folder given, else the one that the settings name (`./.finback` by default)."""
    if given is not None:
        return RunDir(given.expanduser().absolute())
    config, _ = settings.load()
    return RunDir(Path(config.run_dir))


def running(given: Path | None) -> Running:
    """The stack of that folder. Raises `ConfigError` if none runs there."""
    folder = run_dir(given)
    state = folder.read_state()
    if state is None:
        raise ConfigError(
            f"no stack runs in {folder.root}; start one with finback up, "
            "or name its folder with --run-dir"
        )
    return Running(folder, state, folder.holder_pid() is not None)
