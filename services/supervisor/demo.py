"""`make demo`: a whole stack, three requests, one trace, and everything stopped again.

Exit code 0 only if every answer came whole.
"""

import asyncio
import re
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from finback.services.supervisor import ask, cli_down, cli_up, launch, trace_tree, waterfall
from finback.services.supervisor.run_dir import StackState
from finback.shared import config as settings
from finback.shared.errors import ConfigError, ServingError
from finback.shared.wire import headers as h

QUESTION: Final = "Why is the sky blue? Answer in two sentences."
ORDER: Final = "Where was the 2012 Summer Olympics held, and in which year?"
REGEX: Final = r"(London|Paris|Rome|Tokyo), (19|20)[0-9]{2}"
MAX_TOKENS: Final = 96
# Spans are written in batches; the last ones come shortly after the answer.
TRACE_WAIT_S: Final = 5.0
ALL_SERVICES: Final = frozenset(
    {"gateway", "router", "cache", "sampler", "drafter", "prefill", "decode"}
)


def main() -> int:
    console = Console(highlight=False)
    folder = Path(tempfile.mkdtemp(prefix="finback-demo-"))
    overrides: dict[str, Any] = {
        "run_dir": str(folder),
        "roles_layout": "separate",
        "drafting": True,
    }
    is_whole = False
    try:
        console.rule("starting the stack")
        config = launch.check(settings.load(overrides=overrides)[0])
        state = cli_up.start_detached(
            config, None, overrides, nats_port=0, console=Console(stderr=True, highlight=False)
        )
        is_whole = asyncio.run(_demonstrate(state, console))
    except (ConfigError, ServingError) as error:
        console.print(f"[red]failed:[/red] {error}")
    except KeyboardInterrupt:
        console.print("interrupted")
    finally:
        console.rule("stopping")
        cli_down.down(folder, force=False)
    if is_whole:
        shutil.rmtree(folder, ignore_errors=True)
        return 0
    console.print(f"[red]the demo failed[/red]; logs are in {folder / 'logs'}")
    return 1


async def _demonstrate(state: StackState, console: Console) -> bool:
    """All three answers whole, and the trace drawn."""
    # One trace for all: the free answers are drafted, the constrained one uses the grammar service.
    trace_id = secrets.token_hex(16)
    console.rule("a question over HTTP, with the openai client")
    first = await _over_http(state, QUESTION, trace_id)
    console.rule("the same through the NATS request API")
    second = await _over_nats(state, QUESTION, trace_id)
    console.rule(f"an answer that must match {REGEX}")
    third = await _over_http(state, ORDER, trace_id, regex=REGEX)
    matches = re.fullmatch(REGEX, third.text) is not None
    if not matches:
        console.print(f"[red]does not match:[/red] {third.text!r}")
    console.rule("one trace through every service")
    seen = await _draw(Path(state.trace_dir), trace_id, console)
    if ALL_SERVICES - seen:
        console.print(f"[red]not in the trace:[/red] {', '.join(sorted(ALL_SERVICES - seen))}")
    console.rule("how long it took")
    for name, answer in (("HTTP", first), ("NATS", second), ("constrained", third)):
        console.print(_timing(name, answer))
    whole = [_is_whole(answer) for answer in (first, second, third)]
    return all(whole) and matches and seen >= ALL_SERVICES


async def _over_http(
    state: StackState, question: str, trace_id: str, *, regex: str | None = None
) -> ask.Answer:
    """Streamed by the official client, printed as it comes."""
    import openai

    extra: dict[str, Any] = {"structured_outputs": {"regex": regex}} if regex else {}
    client = openai.AsyncOpenAI(base_url=f"{state.http}/v1", api_key="none", max_retries=0)
    began_s = ask.now_s()
    try:
        stream = await client.chat.completions.create(
            model=state.model,
            messages=[{"role": "user", "content": question}],
            max_tokens=MAX_TOKENS,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_headers={h.TRACEPARENT: _traceparent(trace_id)},
            extra_body=extra,
        )

        async def chunks() -> AsyncIterator[ask.Chunk]:
            async for chunk in stream:
                yield chunk.model_dump(exclude_none=True)

        return await _print(chunks(), began_s)
    except openai.OpenAIError as error:
        raise ConfigError(f"the openai client: {error}") from error
    finally:
        await client.close()


async def _over_nats(state: StackState, question: str, trace_id: str) -> ask.Answer:
    body = {
        "model": state.model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
    }
    began_s = ask.now_s()
    context = {h.TRACEPARENT: _traceparent(trace_id)}
    return await _print(ask.over_nats(state.nats, body, headers=context), began_s)


async def _print(chunks: AsyncIterator[ask.Chunk], began_s: float) -> ask.Answer:
    answer = ask.Answer()
    async for chunk in chunks:
        sys.stdout.write(answer.add(chunk, ask.now_s() - began_s))
        sys.stdout.flush()
    sys.stdout.write("\n")
    return answer


async def _draw(folder: Path, trace_id: str, console: Console) -> set[str]:
    """Draw the trace once all services have written to it; the services that it shows."""
    deadline = time.monotonic() + TRACE_WAIT_S
    spans: list[trace_tree.Span] = []
    while time.monotonic() < deadline:
        spans = trace_tree.find(trace_tree.read(folder), trace_id)
        if {span.service for span in spans} >= ALL_SERVICES:
            break
        await asyncio.sleep(0.2)
    await asyncio.sleep(0.5)
    spans = trace_tree.find(trace_tree.read(folder), trace_id)
    if spans:
        waterfall.draw(spans, console)
    return {span.service for span in spans}


def _is_whole(answer: ask.Answer) -> bool:
    """It has text, an end that was told, and a count that the service vouches for."""
    told = answer.finish_reason in ("stop", "length")
    return bool(answer.text.strip()) and told and answer.usage.get("completion_tokens", 0) > 0


def _timing(name: str, answer: ask.Answer) -> str:
    first = f"{(answer.first_s or 0) * 1000:.0f} ms" if answer.first_s else "never"
    speed = f"{answer.tokens_per_s:.1f} tokens/s" if answer.tokens_per_s else "too short to tell"
    count = answer.usage.get("completion_tokens", 0)
    return f"{name:<12} first token after {first}, {count} tokens, {speed}"


def _traceparent(trace_id: str) -> str:
    return f"00-{trace_id}-{secrets.token_hex(8)}-01"


if __name__ == "__main__":
    sys.exit(main())
