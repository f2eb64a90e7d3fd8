"""TCP ports: a free one, and whether a wanted one is free."""

import errno
import socket

from finback.shared.errors import ConfigError


def choose(host: str, wanted: int, what: str, option: str) -> int:
    """`wanted` if it can be listened on, a free port if it is 0. Raises `ConfigError` if taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As the servers do: a port in TIME_WAIT from the last run is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, wanted))
            probe.listen(1)
        except OSError as error:
            reason = {
                errno.EADDRINUSE: "is taken",
                errno.EACCES: "may not be used by this user",
            }.get(error.errno or 0, f"cannot be used ({error.strerror or error})")
            hint = f"choose another with {option}, or leave it out for a free one"
            raise ConfigError(f"{what} port {wanted} on {host} {reason}; {hint}") from None
        return int(probe.getsockname()[1])
