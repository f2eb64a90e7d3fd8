"""`finback chat`."""

import json
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx

from finback.services.supervisor import ask, locate
from finback.services.supervisor.locate import Running
from finback.shared.errors import Unavailable

Messages = list[dict[str, str]]


def chat(
    given: Path | None,
    text: str | None,
    options: dict[str, Any],
    *,
    system: str | None,
    key: str | None,
    over_nats: bool,
    as_json: bool,
) -> int:
    """Answer one question, or talk until the end of input."""
    found = locate.running(given)
    options.setdefault("model", found.state.model)
    messages: Messages = [{"role": "system", "content": system}] if system else []
    if text is None and not sys.stdin.isatty():
        text = sys.stdin.read()
    if text is None:
        return _converse(found, messages, options, key, over_nats)
    messages.append({"role": "user", "content": text})
    if as_json:
        return anyio.run(_whole, found, {**options, "messages": messages}, key)
    answer = anyio.run(partial(_stream, found, messages, options, key, over_nats))
    _summary(answer)
    return 0


def _converse(
    found: Running, messages: Messages, options: dict[str, Any], key: str | None, over_nats: bool
) -> int:
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    console.print(f"[dim]{found.state.model}; Ctrl-C ends an answer, Ctrl-D the conversation[/dim]")
    while True:
        try:
            said = console.input("[bold cyan]you[/bold cyan] ")
        except EOFError:
            sys.stdout.write("\n")
            return 0
        if not said.strip():
            continue
        messages.append({"role": "user", "content": said})
        console.print(f"[bold green]{found.state.model}[/bold green]")
        try:
            answer = anyio.run(partial(_stream, found, messages, options, key, over_nats))
        except KeyboardInterrupt:
            console.print("[dim](cut short)[/dim]")
            messages.pop()
            continue
        except Unavailable as error:
            console.print(f"[red]{error}[/red]")
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": answer.text})
        _summary(answer)


async def _stream(
    found: Running, messages: Messages, options: dict[str, Any], key: str | None, over_nats: bool
) -> ask.Answer:
    """Print an answer as it comes."""
    body = {**options, "messages": messages}
    answer, began_s = ask.Answer(), ask.now_s()
    state = found.state
    chunks: AsyncIterator[ask.Chunk]
    chunks = (
        ask.over_nats(state.nats, body, key) if over_nats else ask.over_http(state.http, body, key)
    )
    async for chunk in chunks:
        sys.stdout.write(answer.add(chunk, ask.now_s() - began_s))
        sys.stdout.flush()
    sys.stdout.write("\n")
    return answer


async def _whole(found: Running, body: dict[str, Any], key: str | None) -> int:
    """The answer as one JSON object, as the service gives it."""
    sent = {"Authorization": f"Bearer {key}"} if key else {}
    url = f"{found.state.http}/v1/chat/completions"
    try:
        async with httpx.AsyncClient(timeout=httpx.Timeout(10.0, read=600.0)) as client:
            reply = await client.post(url, json=body, headers=sent)
    except httpx.HTTPError as error:
        raise Unavailable(f"{url}: {error or type(error).__name__}") from error
    if reply.status_code != 200:
        raise Unavailable(ask.message_of(reply.content, f"HTTP {reply.status_code}"))
    sys.stdout.write(json.dumps(reply.json()) + "\n")
    return 0


def _summary(answer: ask.Answer) -> None:
    """On stderr, so that the answer alone can be piped on."""
    if not sys.stderr.isatty():
        return
    words = [f"{answer.usage.get('completion_tokens', 0)} tokens"]
    if answer.first_s is not None:
        words.append(f"first after {answer.first_s * 1000:.0f} ms")
    if answer.tokens_per_s is not None:
        words.append(f"{answer.tokens_per_s:.1f} tokens/s")
    words.append(answer.request_id)
    sys.stderr.write(f"\x1b[2m{', '.join(words)}\x1b[0m\n")
