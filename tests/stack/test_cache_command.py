"""`finback cache` over a running stack: what is kept is told, pinned, checked and forgotten."""

import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.stack import Stack, finback

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

PROMPT = "A block is sixty-four tokens, and here are quite a few of them. " * 20


def ask(stack: Stack) -> tuple[str, int]:
    body = {"model": "gpt-4o", "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    reply = httpx.post(f"{stack.http}/v1/completions", json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    told = reply.json()
    return told["choices"][0]["text"], told["usage"]["prompt_tokens_details"]["cached_tokens"]


def stats(stack: Stack) -> dict[str, Any]:
    done = stack.command("cache", "stats", "--json")
    assert done.returncode == 0, done.stderr
    (told,) = json.loads(done.stdout)["caches"].values()
    found: dict[str, Any] = told
    return found


def kept(stack: Stack, tier: str | None = None) -> int:
    usages = [u for u in stats(stack)["usage"] if u["kind"] == "block"]
    return sum(u["num_blocks"] for u in usages if tier in (None, u["tier"]))


def wait_kept(stack: Stack, tier: str | None = None) -> None:
    """Blocks are written behind the answer."""
    deadline = time.monotonic() + 90
    while kept(stack, tier) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.2)


def command(stack: Stack, *arguments: str) -> str:
    done = stack.command("cache", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def flip_in_files(folder: Path) -> None:
    """A byte in the middle of a block's payload."""
    (path,) = folder.rglob("seg-*")
    data = bytearray(path.read_bytes())
    data[3 * 4096] ^= 1
    path.write_bytes(data)


def test_keeping_and_forgetting(tmp_path: Path, run_dir: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(PROMPT)
    stack = Stack(run_dir)
    stack.up()
    try:
        text, num_cached = ask(stack)
        assert num_cached == 0
        again, num_cached = ask(stack)
        assert again == text
        assert num_cached > 256
        wait_kept(stack)
        assert "blocks, " in command(stack, "pin", "manual", str(prompt))
        assert [pin["name"] for pin in stats(stack)["pins"]] == ["manual"]
        held = stats(stack)["pins"][0]["num_held"]
        assert held >= 4
        assert json.loads(command(stack, "evict", "--older-than", "9d", "--json"))["caches"]
        command(stack, "evict")
        assert stats(stack)["pins"][0]["num_held"] == held
        assert command(stack, "pins").count("manual") == 1
        (top,) = json.loads(command(stack, "top", "--json"))["caches"].values()
        assert top == {"prefixes": []}, "a pool has served the second one"
        (rate,) = [r for r in stats(stack)["hit_rates"] if r["what"] == "lookup"]
        assert rate["traffic_class"] == "chat" and 0 <= rate["hit_rate"] <= 1
        assert "host: " in command(stack, "verify")
        said = command(stack, "forget", "--conversation", str(prompt))
        assert "blocks in memory" in said and "its pool" in said
        assert "1 encoded prompts" in said
        assert stats(stack)["pins"][0]["num_held"] == 0
        assert ask(stack) == (text, 0)
        command(stack, "unpin", "manual")
        wait_kept(stack)
        command(stack, "forget", "--tenant", "")
        assert kept(stack) == 0
        assert ask(stack) == (text, 0)
        assert "arena" in command(stack, "stats")
        refused = stack.command("cache", "forget")
        assert refused.returncode != 0
        assert "give --tenant, --conversation (of a --tenant), or --all" in refused.stderr
        refused = stack.command("cache", "unpin", "nothing")
        assert refused.returncode == 1
        assert "nothing" in refused.stderr
    finally:
        stack.down()


def test_a_prefix_goes_to_another_cluster(tmp_path: Path, run_dir: Path) -> None:
    """Another stack with another key hits what this one has computed."""
    prompt, exchange = tmp_path / "prompt.txt", tmp_path / "exchange"
    taken = exchange / "prefix.kv"
    prompt.write_text(PROMPT)
    stack, other = Stack(run_dir), Stack(tmp_path / "other")
    shared = ("--set", f"cache_exchange_dir={exchange}")
    stack.up("--set", f"cache_dir={tmp_path / 'files'}", *shared)
    try:
        text, _ = ask(stack)
        deadline = time.monotonic() + 90
        done = stack.command("cache", "export", str(prompt), "prefix.kv")
        while done.returncode and time.monotonic() < deadline:  # written behind
            time.sleep(0.5)
            done = stack.command("cache", "export", str(prompt), "prefix.kv")
        assert done.returncode == 0, done.stderr
        assert taken.stat().st_mode & 0o777 == 0o600
        refused = stack.command("cache", "export", str(prompt), "prefix.kv")
        assert refused.returncode == 1
        assert "File exists" in refused.stderr
        refused = stack.command("cache", "export", str(prompt), str(tmp_path / "other.kv"))
        assert refused.returncode == 1
        assert str(exchange) in refused.stderr
        wait_kept(stack, tier="file")
        flip_in_files(tmp_path / "files")
        found = stack.command("cache", "verify", "--json")
        assert found.returncode == 1, "a damaged block is said to be so"
        (tiers,) = json.loads(found.stdout)["caches"].values()
        assert tiers["file"]["num_bad"] == 1
        assert tiers["host"]["num_bad"] == 0
        assert stack.command("cache", "verify").returncode == 0, "it is dropped"
    finally:
        stack.down()
    other.up("--set", f"cache_dir={tmp_path / 'others'}", *shared)
    try:
        (exchange / "bad.kv").write_text(PROMPT)
        refused = other.command("cache", "import", "bad.kv")
        assert refused.returncode == 1
        assert "not an exported prefix" in refused.stderr
        assert "blocks" in command(other, "import", str(taken))
        again, num_cached = ask(other)
        assert again == text
        assert num_cached >= 192
    finally:
        other.down()


def test_without_a_stack(tmp_path: Path) -> None:
    done = finback("cache", "stats", "--run-dir", str(tmp_path / "none"))
    assert done.returncode != 0
    assert "no stack runs in" in done.stderr
