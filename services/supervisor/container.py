"""Starts one service in a container: `python -m finback.services.supervisor.container NAME [ARGS]`.

There is no supervisor there; the container engine restarts. This only names the instance, writes the
name down for the healthcheck, and becomes the service.
"""

import os
import secrets
import sys
from pathlib import Path

from finback.shared import config as settings

INSTANCE_FILE = "instance"


def main(arguments: list[str]) -> int:
    if not arguments:
        sys.stderr.write("finback: name a service\n")
        return 2
    name, rest = arguments[0], arguments[1:]
    instance = f"{name}-{secrets.token_hex(3)}"
    folder = run_dir()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / INSTANCE_FILE).write_text(instance)
    os.environ["FINBACK_INSTANCE"] = instance
    module = f"finback.services.{name}"
    os.execv(sys.executable, [sys.executable, "-m", module, *rest])


def run_dir() -> Path:
    """The container's own folder, as its settings name it."""
    config, _ = settings.load()
    return Path(config.run_dir)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
