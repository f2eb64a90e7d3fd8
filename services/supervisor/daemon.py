"""The background half of `finback up --detach`: a supervisor that tells its progress on a pipe."""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from finback.services.supervisor import launch
from finback.services.supervisor.run_dir import StackState
from finback.shared import config as settings
from finback.shared.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What the command line asked for."""

    config_file: str | None
    overrides: Mapping[str, Any]
    nats_port: int


def command(order: Order, fd: int) -> list[str]:
    """The command that carries it out; `fd` is inherited."""
    text = json.dumps(asdict(order))
    return [sys.executable, "-m", "finback.services.supervisor.daemon", str(fd), text]


class Pipe:
    """One JSON object a line: `progress` many times, then `ready` or `error` once."""

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)
        self._fd: int | None = fd

    def tell(self, **word: Any) -> None:
        """Say it, if the other side still listens."""
        if self._fd is None:
            return
        try:
            os.write(self._fd, (json.dumps(word) + "\n").encode())
        except OSError:  # the command was interrupted; the signal that follows ends us
            self.close()

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def main() -> int:
    pipe = Pipe(int(sys.argv[1]))
    order = Order(**json.loads(sys.argv[2]))
    file = Path(order.config_file) if order.config_file else None

    def ready(state: StackState) -> None:
        pipe.tell(ready=json.loads(state.to_json()))
        pipe.close()

    try:
        config, _ = settings.load(file, None, order.overrides)
        return launch.serve(
            launch.check(config, nats_port=order.nats_port),
            nats_port=order.nats_port,
            report=lambda text: pipe.tell(progress=text),
            on_ready=ready,
        )
    except ConfigError as error:
        pipe.tell(error=str(error))
        return 2


if __name__ == "__main__":
    sys.exit(main())
