"""Kill -9 (or SIGSTOP, then SIGCONT) of the decode process under a stream: when it goes on, and with what.

    python benchmarks/cache/kill.py [--kills 200] [--rows two,one,stop,fast] [--layout cohost,separate]
                                    [--tokens 64] [--seed 1] [--minutes 0]
    python benchmarks/cache/kill.py --sum

Deterministic mode but for the last row. Each request streams `--tokens` tokens (every other one is sampled with a seed); the
process that generates it is killed when a uniformly random number of them, at least the first and not
the last, has reached the client. Rows: `two` decode processes; `one`, which is started again; `stop`:
two, and the victim is stopped instead and continued as soon as the stream goes on; `fast`: two, in fast
mode, where the ids must be those of a fresh request from the prompt and the ids received before.

Shown are the time from the kill to the first new token (the end of the longest gap after the kill, so
that tokens still on their way from the victim do not count), whether all ids are those of the
undisturbed run, and slots of the arena that nobody holds legitimately once all leases have ended.
Appends a JSON line a row to `benchmarks/results/cache_kill.jsonl`.

A row may be run in slices: `--minutes` ends one early, each has a `--seed` of its own, which draws other prompts and
moments, and `--sum` adds up all slices of a row that are of the same commit and token count.
"""

import argparse
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx

sys.path[:0] = [str(Path(__file__).parents[1])]

from stack_under_test import cpu_s, run_stack

from finback.shared.bench.environment import environment
from finback.shared.bench.stats import percentile
from finback.shared.lanes.arena_format import PAGE, SlotState, parse_extent, read_slot

TIMEOUT_S: Final = 60.0
RESTORE_S: Final = 60.0
# Leases end after 10 s; the cache looks every second, and for dead writers every five.
SETTLE_S: Final = 20.0
RESULTS: Final = Path(__file__).parents[1] / "results" / "cache_kill.jsonl"


@dataclass(slots=True)
class Kill:
    """What one disturbed request brought."""

    at: int
    received: int
    victim: str
    first_new_s: float
    is_equal: bool
    is_hit: bool


@dataclass(slots=True)
class Stack:
    """A running stack, by its state file."""

    folder: Path
    names: tuple[str, ...]
    pids: dict[str, int] = field(default_factory=dict)

    def state(self) -> dict[str, Any]:
        told: dict[str, Any] = json.loads((self.folder / "stack.json").read_text())
        return told

    def wait_whole(self, lost: int = 0) -> None:
        """Until every decode process serves, none of them being `lost`."""
        end_s = time.monotonic() + RESTORE_S
        while time.monotonic() < end_s:
            services = self.state()["services"]
            self.pids = {name: int(services[name]["pid"]) for name in self.names}
            serving = all(services[name]["state"] == "serving" for name in self.names)
            if serving and lost not in self.pids.values():
                return
            time.sleep(0.05)
        raise TimeoutError(f"not whole again: {self.state()['services']}")

    def num_retries(self) -> int:
        """Requests that were lost by an instance so far, as the gateway logs them."""
        return (self.folder / "logs" / "gateway.log").read_text().count('"event": "retry"')

    def num_known(self) -> int:
        """With how many tokens the last request that was lost went on."""
        log = (self.folder / "logs" / "gateway.log").read_text().splitlines()
        lost = [json.loads(line) for line in log if '"event": "retry"' in line]
        return int(lost[-1]["num_tokens"])

    def leaked_slots(self) -> dict[str, int]:
        """Slots that somebody would have to hold, by state, when nobody can."""
        state = self.state()
        found: dict[str, int] = {}
        folder = Path(state["shm_dir"]) / state["stack_id"]
        for path in sorted(folder.glob("extent-*")):
            data = path.read_bytes()
            header = parse_extent(data[:PAGE], len(data))
            for index in range(header.num_slots):
                slot = read_slot(data, index).state
                if slot not in (SlotState.FREE, SlotState.KEPT):
                    found[slot.name] = found.get(slot.name, 0) + 1
        return found


def body(number: int, num_tokens: int) -> dict[str, Any]:
    """One request; prompts differ from the first token on, and in length."""
    drawn = random.Random(number)
    return {
        "model": "gpt-4o",
        "prompt": [1000 + number, *drawn.choices(range(1000, 40_000), k=drawn.randint(20, 200))],
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
        "seed": number,
        "temperature": 0.0 if number % 2 else 0.9,
    }


def tokens(client: httpx.Client, asked: dict[str, Any]) -> Iterator[list[int]]:
    """The ids of each chunk as it comes; raises what the stream ends with."""
    with client.stream("POST", "/v1/completions", json=asked, timeout=TIMEOUT_S) as reply:
        if reply.status_code != 200:
            raise RuntimeError(f"{reply.status_code}: {reply.read().decode()}")
        for line in reply.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise RuntimeError(chunk["error"]["message"])
            yield [i for choice in chunk["choices"] for i in choice.get("token_ids") or ()]


def one_kill(
    stack: Stack,
    client: httpx.Client,
    asked: dict[str, Any],
    at: int,
    sends: signal.Signals,
    *,
    is_fast: bool = False,
) -> Kill:
    """Disturb one stream after `at` tokens; wait until the stack is whole again."""
    expected = [] if is_fast else [i for ids in tokens(client, asked) for i in ids]
    used = {name: cpu_s(pid) for name, pid in stack.pids.items()}
    retries = stack.num_retries()
    got: list[int] = []
    victim, pid, received, killed_s, last_s, longest = "", 0, 0, 0.0, 0.0, (0.0, 0.0)
    for ids in tokens(client, asked):
        now_s = time.monotonic()
        if killed_s and ids:
            longest = max(longest, (now_s - last_s, now_s))
            last_s = now_s
        got += ids
        if not killed_s and len(got) >= at:
            victim = max(stack.pids, key=lambda name: cpu_s(stack.pids[name]) - used[name])
            pid, received = stack.pids[victim], len(got)
            os.kill(pid, sends)
            killed_s = last_s = time.monotonic()
        elif sends == signal.SIGSTOP and pid and longest[0] > 0.2:
            os.kill(pid, signal.SIGCONT)  # the stream goes on: now the zombie may speak
    if sends == signal.SIGSTOP:
        os.kill(pid, signal.SIGCONT)
    stack.wait_whole(lost=pid if sends == signal.SIGKILL else 0)
    if is_fast and stack.num_retries() > retries:
        expected = fresh(client, asked, got[: stack.num_known()])
    return Kill(
        at=at,
        received=received,
        victim=victim,
        first_new_s=longest[1] - killed_s,
        is_equal=got == expected,
        # All of it may have left the victim before it was disturbed.
        is_hit=stack.num_retries() > retries,
    )


def fresh(client: httpx.Client, asked: dict[str, Any], known: list[int]) -> list[int]:
    """`known`, and what a new request from there on brings."""
    rest = asked["max_tokens"] - len(known)
    from_there = {**asked, "prompt": [*asked["prompt"], *known], "max_tokens": rest}
    return [*known, *(i for ids in tokens(client, from_there) for i in ids)]


@contextmanager
def running(
    layout: str, num_decodes: int, *, is_fast: bool
) -> Iterator[tuple[Stack, httpx.Client]]:
    """A stack of its own, deterministic if it is not fast."""
    arguments = [f"--{layout}", "--set", f"decode_processes={num_decodes}"]
    if not is_fast:
        arguments.append("--deterministic")
    with run_stack(*arguments, "--set", "max_model_len=2048") as (made, folder):
        names = tuple(f"decode{at}" if at > 1 else "decode" for at in range(1, num_decodes + 1))
        stack = Stack(Path(folder), names)
        stack.wait_whole()
        with httpx.Client(base_url=made.url) as client:
            for _ in tokens(client, body(0, 8)):  # what is compiled or opened once
                pass
            yield stack, client


def row(
    kind: str, layout: str, args: argparse.Namespace, note: Callable[[Kill], None]
) -> dict[str, Any]:
    """All kills of one row, on a stack of its own."""
    drawn = random.Random(args.seed)
    sends = signal.SIGSTOP if kind == "stop" else signal.SIGKILL
    kills: list[Kill] = []
    num_missed = 0
    is_fast = kind == "fast"
    end_s = time.monotonic() + 60 * args.minutes if args.minutes else float("inf")
    with running(layout, 1 if kind == "one" else 2, is_fast=is_fast) as (stack, client):
        while len(kills) < args.kills and (not kills or time.monotonic() < end_s):
            number = 1000 * (args.seed - 1) + len(kills) + num_missed + 1
            at = drawn.randint(1, args.tokens - 1)
            asked = body(number, args.tokens)
            made = one_kill(stack, client, asked, at, sends, is_fast=is_fast)
            note(made)
            if made.is_hit or not (made.is_equal or is_fast):
                kills.append(made)
            else:
                num_missed += 1  # it had computed everything already
        time.sleep(SETTLE_S)
        leaked = stack.leaked_slots()
    return {
        "row": kind,
        "layout": layout,
        "seed": args.seed,
        "kills": len(kills),
        "missed": num_missed,
        "tokens": args.tokens,
        **times_of([kill.first_new_s for kill in kills]),
        "equal": sum(kill.is_equal for kill in kills),
        "leaked_slots": leaked,
        "at": [kill.at for kill in kills],
        "received": [kill.received for kill in kills],
        "first_new_s": [round(kill.first_new_s, 4) for kill in kills],
    }


def times_of(first_new_s: list[float]) -> dict[str, float]:
    """How long clients waited."""
    times = sorted(first_new_s)
    return {
        "first_new_p50_s": round(percentile(times, 50), 4),
        "first_new_p99_s": round(percentile(times, 99), 4),
        "first_new_max_s": round(max(times), 4),
    }


def add_up() -> None:
    """All slices of each row, by commit and tokens; the newest of each seed counts."""
    slices: dict[tuple[Any, ...], dict[int, dict[str, Any]]] = {}
    if not RESULTS.exists():
        raise SystemExit(f"there is no {RESULTS} yet")
    for line in RESULTS.read_text().splitlines():
        made = json.loads(line)
        if "seed" in made:
            commit = made["environment"].get("commit")
            key = (commit, made["row"], made["layout"], made["tokens"])
            slices.setdefault(key, {})[made["seed"]] = made
    for (commit, kind, layout, num_tokens), by_seed in slices.items():
        parts = list(by_seed.values())
        summed: dict[str, Any] = {
            "row": kind,
            "layout": layout,
            "commit": commit,
            "tokens": num_tokens,
            "slices": len(parts),
            "kills": sum(part["kills"] for part in parts),
            "equal": sum(part["equal"] for part in parts),
            "leaked_slots": sum(sum(part["leaked_slots"].values()) for part in parts),
            **times_of([s for part in parts for s in part["first_new_s"]]),
        }
        print(json.dumps(summed))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--rows", default="two,one,stop,fast")
    parser.add_argument("--layout", default="cohost,separate")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1, help="from 1 on")
    parser.add_argument("--minutes", type=float, default=0, help="0: until all kills are done")
    parser.add_argument("--sum", action="store_true", help="add up the slices so far")
    args = parser.parse_args()
    if args.sum:
        add_up()
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the stack goes with us
    is_good = True
    for layout in args.layout.split(","):
        for kind in args.rows.split(","):
            made = row(kind, layout, args, lambda kill: print(kill, flush=True))
            shown = {k: v for k, v in made.items() if not isinstance(v, list)}
            print(json.dumps(shown), flush=True)
            is_good = is_good and made["equal"] == made["kills"] and not made["leaked_slots"]
            head = {
                "benchmark": "cache_kill",
                "unix_s": int(time.time()),
                "environment": environment(),
            }
            with RESULTS.open("a") as out:
                out.write(json.dumps({**head, **made}) + "\n")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
