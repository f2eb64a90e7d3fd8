"""Asks the gateway over HTTP whether it is ready, with nothing but a socket."""

import asyncio
from typing import Final
from urllib.parse import urlsplit

from finback.shared.config import StackConfig
from finback.shared.errors import ConfigError

_EVERY_S: Final = 0.05
_ATTEMPT_TIMEOUT_S: Final = 5.0


def url_of(config: StackConfig) -> str:
    """The address for a client on this machine."""
    everywhere = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}
    host = everywhere.get(config.http_host, config.http_host)
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    return f"http://{host}:{config.http_port}"


async def http_status(url: str, path: str) -> int:
    """The status of one GET; 0 if there is no answer."""
    parts = urlsplit(url)
    host, port = parts.hostname or "127.0.0.1", parts.port or 80
    try:
        async with asyncio.timeout(_ATTEMPT_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                request = (
                    f"GET {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n"
                )
                writer.write(request.encode())
                words = (await reader.readline()).split()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return 0
    return int(words[1]) if len(words) > 1 and words[1].isdigit() else 0


async def wait_http_ready(url: str, timeout_s: float) -> None:
    """Until `/readyz` answers 200. Raises `ConfigError` after `timeout_s`."""
    status = 0
    try:
        async with asyncio.timeout(timeout_s):
            # Another process turns ready; there is no event to wait for.
            while (status := await http_status(url, "/readyz")) != 200:  # noqa: ASYNC110  # see above
                await asyncio.sleep(_EVERY_S)
    except TimeoutError:
        said = f"answers {status}" if status else "does not answer"
        raise ConfigError(f"{url}/readyz {said} after {timeout_s:.0f} s") from None
