"""Checks a running compose stack: a chat over HTTP, a crash of services, a chat again.

    docker compose -f deploy/compose/compose.yaml up --build --wait
    python tests/stack/compose_check.py [--url http://127.0.0.1:8000] [--crash decode,router]

Standard library only. Crashes are SIGKILL from outside the container, so Docker restarts it; that needs
root. Not collected by pytest: it needs a Docker engine.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any

TIMEOUT_S = 120.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--crash", default="decode,cache,router")
    args = parser.parse_args()
    wait_ready(args.url)
    say(f"models: {', '.join(models(args.url))}")
    say(f"chat: {chat(args.url)}")
    say(f"constrained: {constrained(args.url)}")
    say(f"KV was handed over by: {', '.join(lanes())}")
    for service in filter(None, args.crash.split(",")):
        crash(service)
        say(f"{service} was killed; chat again: {retry_chat(args.url)}")
    return 0


def wait_ready(url: str) -> None:
    """Until the gateway says that it can serve."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/readyz", timeout=5) as reply:
                if reply.status == 200:
                    return
        except OSError:
            time.sleep(0.5)
    raise SystemExit(f"{url}/readyz is not 200 after {TIMEOUT_S:.0f} s")


def models(url: str) -> list[str]:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as reply:
        return [each["id"] for each in json.load(reply)["data"]]


def chat(url: str, **options: Any) -> str:
    """A streamed answer; raises unless it has text, an end and the end marker."""
    body = {
        "model": "gpt-4o",
        "messages": [{"role": "user", "content": "Name three colours."}],
        "max_tokens": 24,
        "temperature": 0,
        "stream": True,
        **options,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    text, reason, ended = "", None, False
    with urllib.request.urlopen(request, timeout=60) as reply:
        for raw in reply:
            line = raw.decode().strip()
            if line == "data: [DONE]":
                ended = True
            elif line.startswith("data: "):
                for choice in json.loads(line[6:]).get("choices", ()):
                    text += choice["delta"].get("content") or ""
                    reason = choice["finish_reason"] or reason
    if not (text.strip() and reason and ended):
        raise ValueError(f"not a whole answer: {text!r}, {reason}, end marker {ended}")
    return text.strip()


def constrained(url: str) -> str:
    options = {"structured_outputs": {"regex": "(red|green|blue), (red|green|blue)"}}
    text = chat(url, **options)
    first, _, second = text.partition(", ")
    if not {first, second} <= {"red", "green", "blue"}:
        raise ValueError(f"does not match: {text!r}")
    return text


def lanes() -> list[str]:
    """How decode got its blocks, as its span file tells; shared memory is what there should be."""
    read = [
        "docker",
        "compose",
        "exec",
        "-T",
        "decode",
        "sh",
        "-c",
        "cat /run/finback/traces/*.jsonl",
    ]
    deadline = time.monotonic() + 10
    found: set[str] = set()
    while not found and time.monotonic() < deadline:
        spans = subprocess.run(read, check=True, capture_output=True, text=True).stdout
        attributes = [json.loads(line)["attributes"] for line in spans.splitlines()]
        found = {each["finback.lane"] for each in attributes if "finback.lane" in each}
    if "shm" not in found:
        raise SystemExit(f"KV did not go through shared memory: {sorted(found)}")
    return sorted(found)


def retry_chat(url: str) -> str:
    """The stack may need some seconds to be whole again."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            return chat(url)
        except (OSError, ValueError) as error:
            if time.monotonic() > deadline:
                raise SystemExit(f"no answer after the crash: {error}") from error
            time.sleep(0.5)


def crash(service: str) -> None:
    """SIGKILL the service's first process, as its host sees it."""
    if shutil.which("rehearsal-kill"):
        subprocess.run(["rehearsal-kill", service], check=True)
        return
    listed = ["docker", "compose", "ps", "--quiet", service]
    container = subprocess.run(listed, check=True, capture_output=True, text=True).stdout.strip()
    shown = ["docker", "inspect", "--format", "{{.State.Pid}}", container]
    os.kill(int(subprocess.run(shown, check=True, capture_output=True).stdout), signal.SIGKILL)


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
