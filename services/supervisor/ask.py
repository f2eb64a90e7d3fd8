"""A small client of the public API, over HTTP and over NATS: the same JSON, two ways."""

import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import anyio
import httpx

from finback.shared.actor.bus import Message
from finback.shared.actor.nats_bus import BusSettings, connect
from finback.shared.errors import ConfigError, Unavailable
from finback.shared.wire import headers as h
from finback.shared.wire.subjects import Subjects

# Longer than any pause that keep-alives allow.
SILENCE_S: Final = 120.0

Chunk = dict[str, Any]


@dataclass(slots=True)
class Answer:
    """What came so far. Times are seconds since the request was sent."""

    text: str = ""
    finish_reason: str | None = None
    request_id: str = ""
    usage: Mapping[str, int] = field(default_factory=dict)
    first_s: float | None = None
    last_s: float = 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """Decoding speed: tokens after the first, over the time after the first."""
        count = self.usage.get("completion_tokens", 0)
        if count < 2 or self.first_s is None or self.last_s <= self.first_s:
            return None
        return (count - 1) / (self.last_s - self.first_s)

    def add(self, chunk: Chunk, at_s: float) -> str:
        """Take one chunk; the new text in it."""
        self.request_id = self.request_id or str(chunk.get("id", "")).removeprefix("chatcmpl-")
        if chunk.get("usage"):
            self.usage = chunk["usage"]
        new = ""
        for choice in chunk.get("choices") or ():
            new += (choice.get("delta") or {}).get("content") or ""
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        if new:
            self.first_s = at_s if self.first_s is None else self.first_s
            self.last_s = at_s
        self.text += new
        return new


async def over_http(url: str, body: Chunk, key: str | None = None) -> AsyncIterator[Chunk]:
    """Chunks of a streamed chat completion. Raises `Unavailable` with the service's own message."""
    sent = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        async with (
            httpx.AsyncClient(timeout=httpx.Timeout(10.0, read=SILENCE_S)) as client,
            client.stream(
                "POST", f"{url}/v1/chat/completions", json=_streamed(body), headers=sent
            ) as reply,
        ):
            if reply.status_code != 200:
                raise Unavailable(message_of(await reply.aread(), f"HTTP {reply.status_code}"))
            async for line in reply.aiter_lines():
                data = line.removeprefix("data: ")
                if data == line or not data:
                    continue
                if data == "[DONE]":
                    return
                yield _checked(json.loads(data))
    except httpx.HTTPError as error:
        raise Unavailable(f"{url}: {error or type(error).__name__}") from error
    raise Unavailable("the stream ended without its end marker")


async def over_nats(
    url: str,
    body: Chunk,
    key: str | None = None,
    *,
    prefix: str = "finback",
    headers: Mapping[str, str] | None = None,
) -> AsyncIterator[Chunk]:
    """The same through the NATS request API: one chunk a message, numbered, a final marker."""
    bus = await connect(client_settings(url))
    send, receive = anyio.create_memory_object_stream[Message](4096)
    try:
        inbox = bus.new_inbox()
        await bus.subscribe(inbox, send.send_nowait)
        sent = {**(headers or {}), **({h.AUTHORIZATION: f"Bearer {key}"} if key else {})}
        subject = Subjects(prefix).api("chat.completions")
        await bus.publish(subject, json.dumps(_streamed(body)).encode(), sent, reply=inbox)
        expected = 0
        while True:
            with anyio.fail_after(SILENCE_S):
                message = await receive.receive()
            _check_reply(message, expected)
            if message.data:
                yield _checked(json.loads(message.data))
            if h.FINAL in message.headers:
                return
            expected += 1
    except TimeoutError:
        raise Unavailable(f"no answer over NATS for {SILENCE_S:.0f} s") from None
    finally:
        receive.close()
        send.close()
        with anyio.CancelScope(shield=True):
            await bus.close()


def client_settings(url: str) -> BusSettings:
    """Credentials out of the URL that `finback status --json` gives."""
    parts = urlsplit(url)
    if parts.hostname is None:
        raise ConfigError(f"not a NATS URL: {url}")
    return BusSettings(
        url=f"{parts.scheme}://{parts.hostname}:{parts.port or 4222}",
        name="cli",
        user=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
        connect_timeout_s=5.0,
    )


def message_of(body: bytes, otherwise: str) -> str:
    """The text of an error in OpenAI's shape."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return otherwise


def now_s() -> float:
    return time.perf_counter()


def _streamed(body: Chunk) -> Chunk:
    return {**body, "stream": True, "stream_options": {"include_usage": True}}


def _checked(chunk: Chunk) -> Chunk:
    if "error" in chunk:
        raise Unavailable(str((chunk["error"] or {}).get("message", "the request failed")))
    return chunk


def _check_reply(message: Message, expected: int) -> None:
    """A reply that is an error, or out of order, ends the stream."""
    headers = message.headers
    if headers.get("Status") == "503":
        raise Unavailable("nobody answers the request API on this NATS server")
    if h.ERROR_CODE in headers:
        raise Unavailable(message_of(message.data, unquote(headers.get(h.ERROR, "error"))))
    if headers.get(h.FINAL, "end") != "end":
        raise Unavailable(message_of(message.data, f"the stream ended: {headers[h.FINAL]}"))
    if int(headers.get(h.SEQ, expected)) != expected:
        raise Unavailable(f"chunk {expected} of the stream is missing")
