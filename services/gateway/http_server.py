"""uvicorn inside the actor's own event loop: our socket, our signals, our drain."""

import contextlib
import errno
import socket
from collections.abc import Iterator
from typing import Any, Final

import uvicorn

from finback.services.gateway.http_protocol import BoundedHttpProtocol
from finback.shared.errors import ConfigError

BACKLOG: Final = 2048
KEEP_ALIVE_S: Final = 75


def listen(host: str, port: int) -> socket.socket:
    """A bound, listening socket; a taken port is a `ConfigError`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}: {error.strerror or error}") from error
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind(address)
        made.listen(BACKLOG)
    except OSError as error:
        made.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {host} is taken; choose another one with http_port, or 0 for any"
            ) from error
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    made.setblocking(False)
    return made


class HttpServer(uvicorn.Server):
    """Leaves signals to the actor. `serve_on` returns after `close` once requests are through."""

    def __init__(self, app: Any, *, drain_timeout_s: float) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=BoundedHttpProtocol,
                ws="none",
                lifespan="off",
                loop="none",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=max(1, int(drain_timeout_s)),
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The actor has its own handlers."""
        yield

    async def serve_on(self, listening: socket.socket) -> None:
        """Serve until `close`."""
        await self.serve(sockets=[listening])

    def close(self, *, at_once: bool = False) -> None:
        """Take no more connections; finish the open requests (or not)."""
        self.should_exit = True
        self.force_exit = at_once
