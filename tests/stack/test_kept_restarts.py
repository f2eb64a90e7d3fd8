"""What survives the restart of what: the table of docs/cache.md, row by row, over one stack."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.stack import Stack

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

TEXT = " ".join(f"Line {number} of a report that outlives processes." for number in range(40))
BLOCK = 64


def cached(stack: Stack) -> tuple[int, int]:
    """(full blocks of the prompt but for its last token, those that needed no computation)."""
    usage = stack.whole(TEXT, max_tokens=4, temperature=0)["usage"]
    found = usage["prompt_tokens_details"]["cached_tokens"]
    return (usage["prompt_tokens"] - 1) // BLOCK, found // BLOCK


def stats(stack: Stack) -> dict[str, Any]:
    deadline = time.monotonic() + 120
    while True:
        done = stack.command("cache", "stats", "--json")
        if done.returncode == 0:
            (told,) = json.loads(done.stdout)["caches"].values()
            found: dict[str, Any] = told
            return found
        assert time.monotonic() < deadline, done.stderr
        time.sleep(0.5)


def blocks(stack: Stack, tier: str) -> int:
    return sum(u["num_blocks"] for u in stats(stack)["usage"] if u["tier"] == tier)


def until(found: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.3)


def test_the_table_of_restarts(tmp_path: Path, run_dir: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(TEXT)
    stack = Stack(run_dir)
    options = ("--set", f"cache_dir={tmp_path / 'files'}")
    stack.up(*options)
    try:
        num_blocks, found = cached(stack)
        assert num_blocks >= 6 and found == 0
        until(lambda: blocks(stack, "file") >= num_blocks)
        assert stack.command("cache", "pin", "report", str(prompt)).returncode == 0
        # The cache: memory, files, pins and what pools hold stay.
        stack.wait_restored("cache", stack.kill("cache"))
        until(lambda: blocks(stack, "host") >= num_blocks)
        assert [pin["name"] for pin in stats(stack)["pins"]] == ["report"]
        assert cached(stack) == (num_blocks, num_blocks), "from the pools"
        # A gateway, router or sampler holds nothing of it.
        for service in ("gateway", "router", "sampler"):
            stack.wait_restored(service, stack.kill(service))
        assert cached(stack) == (num_blocks, num_blocks)
        # Workers: from memory, through the cache that was restarted itself.
        for service in ("prefill", "decode"):
            stack.wait_restored(service, stack.kill(service))
        assert cached(stack) == (num_blocks, num_blocks)
    finally:
        stack.down()
    stack.up(*options)
    try:
        until(lambda: stats(stack)["file_state"] == "on" and blocks(stack, "file") >= num_blocks)
        assert blocks(stack, "host") == 0
        assert [pin["name"] for pin in stats(stack)["pins"]] == ["report"]
        assert cached(stack) == (num_blocks, num_blocks), "from files"
    finally:
        stack.down()
