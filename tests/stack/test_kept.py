"""What processes computed outlives them: prompts are found in the cache after kill -9 of the workers."""

import json
import time

import pytest

from support.stack import Stack

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

TEXT = " ".join(f"Line {number} of a report that is asked about twice." for number in range(60))
BLOCK = 64


def cached_tokens(stack: Stack, text: str) -> tuple[int, int]:
    """(prompt tokens, those that needed no computation)."""
    usage = stack.whole(text, max_tokens=4, temperature=0)["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def kept(stack: Stack) -> int:
    done = stack.command("cache", "stats", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)["caches"].values()
    usages = [usage for cache in told for usage in cache["usage"]]
    return sum(u["num_blocks"] for u in usages if (u["tier"], u["kind"]) == ("host", "block"))


def test_a_prompt_is_found_after_its_workers_died(stack: Stack) -> None:
    before = kept(stack)
    num_prompt, _ = cached_tokens(stack, TEXT)
    assert num_prompt > 8 * BLOCK
    told = stack.trace_with("cache lookup", "cache store")
    assert "cache lookup" in told and "cache store" in told
    deadline = time.monotonic() + 60
    while kept(stack) < before + (num_prompt - 1) // BLOCK:
        assert time.monotonic() < deadline
        time.sleep(0.3)  # blocks are written behind the answer
    for service in ("prefill", "decode"):
        stack.wait_restored(service, stack.kill(service))
    _, cached = cached_tokens(stack, TEXT)
    assert cached == (num_prompt - 1) // BLOCK * BLOCK
    assert "cache fetch" in stack.trace_with("cache fetch")
