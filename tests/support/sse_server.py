"""A small HTTP server that streams text completions as it is told: for clients of such services."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

Body = dict[str, Any]
# From a request's body and its number to (status, headers, the pieces of the answer).
Script = Callable[[Body, int], tuple[int, dict[str, str], list[bytes]]]


def event(**fields: Any) -> bytes:
    """One server-sent event."""
    return f"data: {json.dumps(fields)}\n\n".encode()


def answer(body: Body, *, num_tokens: int | None = None, cached: int = 0) -> list[bytes]:
    """A whole streamed answer; `num_tokens`: other than asked for."""
    count = body["max_tokens"] if num_tokens is None else num_tokens
    texts = [event(choices=[{"index": 0, "text": "a", "finish_reason": None}])] * count
    usage = {
        "prompt_tokens": len(body["prompt"]),
        "completion_tokens": count,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    return [
        *texts,
        b": keep-alive\n\n",
        event(choices=[{"index": 0, "text": "", "finish_reason": "length"}]),
        event(choices=[], usage=usage),
        b"data: [DONE]\n\n",
    ]


@asynccontextmanager
async def sse_server(script: Script, *, pause_s: float = 0.0) -> AsyncIterator["SseServer"]:
    """Serves until the block ends. A piece that is empty breaks the connection off."""
    served = SseServer(script, pause_s)
    server = await asyncio.start_server(served.serve, "127.0.0.1", 0)
    served.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield served
    finally:
        server.close()
        served.close()


class SseServer:
    """`bodies`: what was asked so far; `num_connections`: over how many connections."""

    def __init__(self, script: Script, pause_s: float) -> None:
        self.url = ""
        self.bodies: list[Body] = []
        self.num_connections = 0
        self._script = script
        self._pause_s = pause_s
        self._writers: list[asyncio.StreamWriter] = []

    def close(self) -> None:
        for writer in self._writers:
            writer.close()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self._writers.append(writer)
        try:
            while await self._exchange(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
        body = json.loads(await reader.readexactly(length))
        self.bodies.append(body)
        status, headers, pieces = self._script(body, len(self.bodies))
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        writer.write(f"HTTP/1.1 {status} X\r\n{lines}Transfer-Encoding: chunked\r\n\r\n".encode())
        for piece in pieces:
            if not piece:
                return False
            # Cut anywhere: events need not arrive whole.
            for part in (piece[:7], piece[7:]):
                if part:
                    writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            await writer.drain()
            if self._pause_s:
                await asyncio.sleep(self._pause_s)
        writer.write(b"0\r\n\r\n")
        return True
