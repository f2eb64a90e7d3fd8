"""`finback status`."""

import json
import sys
from pathlib import Path
from typing import Any

from finback.services.supervisor import locate
from finback.services.supervisor.locate import Running
from finback.services.supervisor.run_dir import ServiceState, is_same_process


def status(given: Path | None, *, as_json: bool) -> int:
    """Show the stack; exit code 1 if a service does not serve."""
    found = locate.running(given)
    services = {name: _actual(found, each) for name, each in found.state.services.items()}
    if as_json:
        sys.stdout.write(json.dumps(as_dict(found, services), indent=2) + "\n")
    else:
        _show(found, services)
    return 0 if all(state == "serving" for state in services.values()) else 1


def as_dict(found: Running, services: dict[str, str]) -> dict[str, Any]:
    """The shape that scripts read; the NATS URL holds the credentials of the request API."""
    return {
        "http": found.state.http,
        "nats": found.state.nats,
        "model": found.state.model,
        "services": {
            name: {"state": services[name], "pid": each.pid, "instance": each.instance}
            for name, each in found.state.services.items()
        },
    }


def _actual(found: Running, service: ServiceState) -> str:
    """The state as last written, or what is true when nobody writes it any more."""
    if found.is_supervised:
        return service.state
    return "orphaned" if is_same_process(service.pid, service.start_time) else "stopped"


def _show(found: Running, services: dict[str, str]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    state = found.state
    if not found.is_supervised:
        console.print("[red]the supervisor is dead[/red]; clear what is left: finback down")
    console.print(f"model  {state.model}\nhttp   {state.http}/v1")
    console.print(f"nats   nats://{state.nats.rpartition('@')[2].removeprefix('nats://')}")
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("service", "state", "pid", "instance", "restarts", ""):
        table.add_column(column, justify="right" if column in ("pid", "restarts") else "left")
    for name, each in state.services.items():
        colour = "green" if services[name] == "serving" else "yellow"
        table.add_row(
            name,
            f"[{colour}]{services[name]}[/{colour}]",
            str(each.pid or ""),
            each.instance,
            str(each.restarts or ""),
            each.detail,
        )
    console.print(table)
