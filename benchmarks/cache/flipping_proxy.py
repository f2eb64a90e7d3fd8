"""A TCP relay to a NATS server that, when armed, flips one bit in the payload of the next piece."""

import asyncio
import random

_READ_BYTES = 64 * 1024
_MIN_BYTES = 8192
# A message line is shorter than this: further from one, all is payload.
_LINE_BYTES = 300


class FlippingProxy:
    """`arm`, then whatever large comes from the server next has one wrong bit."""

    def __init__(self, server_port: int, drawn: random.Random) -> None:
        self._server_port, self._drawn = server_port, drawn
        self.is_armed = False
        self.port = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen on a free port."""
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._listener.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Drop all connections."""
        self._listener.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def arm(self) -> None:
        """Flip once."""
        self.is_armed = True

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._server_port)
        for source, sink, is_ours in ((reader, far_writer, False), (far_reader, writer, True)):
            task = asyncio.create_task(self._relay(source, sink, is_ours))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _relay(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, from_server: bool
    ) -> None:
        try:
            while data := await source.read(_READ_BYTES):
                sink.write(self._flipped(data) if self.is_armed and from_server else data)
                await sink.drain()
        except OSError:
            pass
        finally:
            sink.close()

    def _flipped(self, data: bytes) -> bytes:
        at = self._drawn.randrange(len(data))
        around = data[max(0, at - _LINE_BYTES) : at + _LINE_BYTES]
        is_near_edge = not _LINE_BYTES <= at < len(data) - _LINE_BYTES
        if len(data) < _MIN_BYTES or is_near_edge or b"MSG " in around:
            return data
        self.is_armed = False
        changed = bytearray(data)
        changed[at] ^= 1 << self._drawn.randrange(8)
        return bytes(changed)
