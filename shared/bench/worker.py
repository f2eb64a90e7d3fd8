"""A process that makes load, or that is the offline engine: `python -m finback.shared.bench.worker`.

It is spoken to in JSON lines over its standard input and output (`crew` is the other end):

- `open` (how to reach the service) is answered by `ready`;
- `arm` (requests and how to send them) by `armed`; `go` (a time on the shared monotonic clock) starts
  them, `progress` comes twice a second, `done` at the end;
- `stop` cuts a run short: `done` then holds what came; `reset` forgets cached prefixes: `reset`;
- the end of its input ends it.

What goes wrong is said as `failed`, with one line.
"""

import asyncio
import json
import os
import resource
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

from finback.shared.bench.load import Client, Job, Load, Pace, Sampling
from finback.shared.errors import ConfigError, ServingError

PROGRESS_S: Final = 0.5
Line = dict[str, Any]


class Worker:
    """One conversation with the crew."""

    def __init__(self, say: Callable[[Line], None]) -> None:
        self._say = say
        self._client: Client | None = None
        self._load: Load | None = None
        self._run: asyncio.Task[None] | None = None

    async def take(self, line: Line) -> None:
        """One line from the crew."""
        kind = line.pop("kind")
        if kind == "open":
            self._client = await open_client(line)
            about: Line = getattr(self._client, "about", dict)()
            self._say({"kind": "ready", "pid": os.getpid(), "about": about})
        elif kind == "arm":
            self._arm(line)
            self._say({"kind": "armed"})
        elif kind == "go":
            self._run = asyncio.create_task(self._go(line["start_at_s"]))
        elif kind == "stop" and self._run is not None:
            self._run.cancel()
        elif kind == "reset" and self._client is not None:
            await self._client.reset()
            self._say({"kind": "reset"})

    async def close(self) -> None:
        """End what runs and let go of the service."""
        if self._run is not None:
            self._run.cancel()
            await asyncio.wait([self._run])
        if self._client is not None:
            await self._client.close()

    def _arm(self, line: Line) -> None:
        if self._client is None:
            raise ConfigError("a worker must be opened before it is armed")
        jobs = [Job.from_json(raw) for raw in line["jobs"]]
        self._load = Load(self._client, jobs, Sampling(**line["sampling"]), Pace(**line["pace"]))

    async def _go(self, start_at_s: float) -> None:
        load, client = self._load, self._client
        if load is None or client is None:
            return
        telling = asyncio.create_task(self._tell(load))
        cpu_s, before, is_cut = time.process_time(), client.stats(), False
        try:
            await asyncio.sleep(max(0.0, start_at_s - time.monotonic()))
            await load.run(start_at_s)
        except asyncio.CancelledError:
            is_cut = True
        except Exception as error:  # noqa: BLE001 -- the edge of the process: the crew is told
            self._say({"kind": "failed", "message": _text(error)})
            return
        finally:
            telling.cancel()
        ended_at_s = time.monotonic()
        self._say(
            {
                "kind": "done",
                "is_cut": is_cut,
                "ended_s": ended_at_s - start_at_s,
                "outcomes": [track.outcome(start_at_s).to_json() for track in load.tracks],
                "token_counts": _token_counts(load),
                "surprisals_bits": [b for track in load.tracks for b in track.surprisals_bits],
                "cpu_s": time.process_time() - cpu_s,
                "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                "stats": {"before": before, "after": client.stats()},
            }
        )

    async def _tell(self, load: Load) -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            self._say(
                {
                    "kind": "progress",
                    "num_done": sum(track.is_ended for track in load.tracks),
                    "num_tokens": sum(track.num_arrived for track in load.tracks),
                }
            )


def _token_counts(load: Load) -> dict[str, int]:
    total: Counter[int | str] = Counter()
    for track in load.tracks:
        total.update(track.token_counts)
    return {str(token): count for token, count in total.items()}


async def open_client(line: Line) -> Client:
    """The client that an `open` line asks for."""
    mode = line["mode"]
    if mode == "http":
        from finback.shared.bench.http_client import HttpClient

        return HttpClient(
            url=line["url"], model=line["model"], key=line["key"], has_ids=line["has_ids"]
        )
    if mode == "nats":
        from finback.shared.actor.nats_bus import BusSettings
        from finback.shared.bench.nats_client import NatsClient

        return await NatsClient.open(
            BusSettings(**line["bus"]), model=line["model"], key=line["key"], prefix=line["prefix"]
        )
    from finback.shared.bench.offline_client import OfflineClient

    return OfflineClient(model=line["model"], is_whole=line["is_whole"], options=line["options"])


def _text(error: BaseException) -> str:
    """One line: the public ones' own words, others with their type."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    told = " ".join(str(error).split())
    if isinstance(error, ConfigError | ServingError):
        return told
    return f"{type(error).__name__}: {told}"


async def _serve(say: Callable[[Line], None]) -> None:
    loop, lines = asyncio.get_running_loop(), asyncio.Queue[bytes]()

    def read() -> None:
        for line in sys.stdin.buffer:
            loop.call_soon_threadsafe(lines.put_nowait, line)
        loop.call_soon_threadsafe(lines.put_nowait, b"")

    threading.Thread(target=read, daemon=True).start()
    worker = Worker(say)
    try:
        while line := await lines.get():
            try:
                await worker.take(json.loads(line))
            except Exception as error:  # noqa: BLE001 -- the edge of the process: the crew is told
                say({"kind": "failed", "message": _text(error)})
    finally:
        await worker.close()


def main() -> None:
    """Take the real standard output for lines; what libraries print goes to standard error."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def say(line: Line) -> None:
        out.write(json.dumps(line).encode() + b"\n")
        out.flush()

    import uvloop

    uvloop.run(_serve(say))


if __name__ == "__main__":
    main()
