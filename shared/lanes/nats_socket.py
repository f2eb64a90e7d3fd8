"""The NATS client protocol on a plain blocking socket, for large payloads.

nats-py copies a payload six times between socket and callback, on the event loop. Here the reader's
thread receives into memory that is used again, and the writer's sends from where the bytes lie. Only
what lane `nats` needs: plain TCP, one inbox, at most one subject served. The protocol is described at
docs.nats.io/reference/reference-protocols/nats-protocol.
"""

import contextlib
import json
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from finback.shared.actor.nats_bus import BusSettings
from finback.shared.errors import Unavailable

Part = bytes | bytearray | memoryview

_DEFAULT_PORT: Final = 4222
_CONNECT_TIMEOUT_S: Final = 5.0
_MAX_LINE_BYTES: Final = 64 * 1024
_SOCKET_BYTES: Final = 4 * 1024 * 1024
_CRLF: Final = b"\r\n"
_MAX_PINGS: Final = 2


@dataclass(frozen=True, slots=True)
class Frame:
    """One message. `payload` and `headers` are only good until the next `receive`."""

    subject: str
    reply: str
    headers: bytes
    payload: memoryview


class NatsSocket:
    """One connection: `receive` for one thread, `send` for any. Errors are `OSError`s."""

    def __init__(self, url: str, settings: BusSettings) -> None:
        """Connect and log in. Raises `OSError`, `Unavailable` if the server wants what we cannot."""
        address = urlsplit(url if "://" in url else f"nats://{url}")
        where = (address.hostname or "127.0.0.1", address.port or _DEFAULT_PORT)
        self._socket = socket.create_connection(where, timeout=_CONNECT_TIMEOUT_S)
        try:
            self._tune(settings.ping_interval_s)
            self._sending = threading.Lock()
            self._buffer = memoryview(bytearray(_MAX_LINE_BYTES))
            self._begin = self._end = 0
            self._body = bytearray(1 << 20)
            self._num_pings = 0
            info = self._greeting()
            self.max_payload = int(info.get("max_payload", 1 << 20))
            self.send(_login(settings, address.username, address.password))
        except BaseException:
            self._socket.close()
            raise

    def subscribe(self, subject: str, sid: int) -> None:
        """Ask for a subject's messages."""
        self.send([f"SUB {subject} {sid}\r\n".encode()])

    def ping(self) -> None:
        """Ask for a sign of life; `receive` returns None when it comes."""
        self.send([b"PING\r\n"])

    def send(self, parts: Sequence[Part]) -> None:
        """Write all parts, one message at a time. OSError when the server takes nothing any more."""
        left = [memoryview(part) for part in parts if len(part)]
        with self._sending:
            while left:
                sent = self._socket.sendmsg(left)
                while left and sent >= len(left[0]):
                    sent -= len(left.pop(0))
                if sent:
                    left[0] = left[0][sent:]

    def receive(self) -> Frame | None:
        """Wait for the next message; None for a PONG. OSError when the connection is lost."""
        while True:
            words = self._line().split()
            operation = words[0].upper() if words else b""
            if operation == b"MSG":
                return self._message(words, b"0")
            if operation == b"HMSG":
                return self._message([*words[:-2], words[-1]], words[-2])
            if operation == b"PING":
                self.send([b"PONG\r\n"])
            elif operation == b"PONG":
                return None
            elif operation == b"-ERR":
                raise ConnectionError(b" ".join(words).decode(errors="replace"))
            elif operation not in (b"+OK", b"INFO"):
                raise ConnectionError("not the NATS protocol")

    def close(self) -> None:
        """End it; a thread that waits in `receive` or `send` gets an OSError."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    # -- inside

    def _tune(self, silence_s: float) -> None:
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            self._socket.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BYTES)
        self._socket.settimeout(silence_s)

    def _greeting(self) -> dict[str, Any]:
        word, _, text = self._line().partition(b" ")
        if word.upper() != b"INFO":
            raise ConnectionError("not a NATS server")
        info: dict[str, Any] = json.loads(text)
        if info.get("tls_required") or info.get("nonce"):
            raise Unavailable("the server wants TLS or a signature", reason="tls")
        return info

    def _message(self, words: list[bytes], headers: bytes) -> Frame:
        if not 4 <= len(words) <= 5:
            raise ConnectionError("a malformed message line")
        num_headers, num_bytes = int(headers), int(words[-1])
        if not 0 <= num_headers <= num_bytes <= self.max_payload + _MAX_LINE_BYTES:
            raise ConnectionError("a message of impossible length")
        if len(self._body) < num_bytes + 2:
            self._body = bytearray(num_bytes + 2)
        whole = memoryview(self._body)[: num_bytes + 2]
        self._fill(whole)
        if bytes(whole[num_bytes:]) != _CRLF:
            raise ConnectionError("a message without an end")
        reply = words[3].decode() if len(words) == 5 else ""
        head = bytes(whole[:num_headers])
        return Frame(words[1].decode(), reply, head, whole[num_headers:num_bytes])

    def _line(self) -> bytes:
        while True:
            held = bytes(self._buffer[self._begin : self._end])
            line, found, _ = held.partition(_CRLF)
            if found:
                self._begin += len(line) + 2
                return line
            if len(held) == len(self._buffer):
                raise ConnectionError("a line without an end")
            self._buffer[: len(held)] = held
            self._begin, self._end = 0, len(held)
            self._end += self._more(self._buffer[self._end :])

    def _fill(self, out: memoryview) -> None:
        """Fill `out`, first from what came along with the line."""
        num = min(len(out), self._end - self._begin)
        out[:num] = self._buffer[self._begin : self._begin + num]
        self._begin += num
        while num < len(out):
            num += self._more(out[num:])

    def _more(self, out: memoryview) -> int:
        """Receive something; a silent server is asked for a sign of life, twice."""
        while True:
            try:
                num = self._socket.recv_into(out)
            except TimeoutError:
                self._num_pings += 1
                if self._num_pings > _MAX_PINGS:
                    raise
                self.ping()
                continue
            if num == 0:
                raise ConnectionError("the server closed the connection")
            self._num_pings = 0
            return num


def is_plain(settings: BusSettings) -> bool:
    """Whether the server can be spoken to in plain TCP, as far as the settings tell."""
    urls = [url.strip() for url in settings.url.split(",")]
    return not settings.ca_file and all("://" not in u or u.startswith("nats://") for u in urls)


def _login(settings: BusSettings, url_user: str | None, url_password: str | None) -> list[Part]:
    user, password = settings.user or url_user, settings.password or url_password
    options: dict[str, Any] = {
        "verbose": False,
        "pedantic": False,
        "lang": "python-finback",
        "version": "1",
        "protocol": 1,
        "name": f"{settings.name}-data",
        "headers": True,
        "no_responders": True,
    }
    if user and password:
        options |= {"user": user, "pass": password}
    elif user:
        options["auth_token"] = user
    return [b"CONNECT ", json.dumps(options).encode(), _CRLF]


def publication(
    subject: str, payload: Part, *, reply: str = "", headers: Mapping[str, str] | None = None
) -> list[Part]:
    """The parts of a PUB (or HPUB); the payload is not copied."""
    names = f"{subject} {reply}" if reply else subject
    if headers is None:
        return [f"PUB {names} {len(payload)}\r\n".encode(), payload, _CRLF]
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = f"NATS/1.0\r\n{lines}\r\n".encode()
    line = f"HPUB {names} {len(head)} {len(head) + len(payload)}\r\n".encode()
    return [line, head, payload, _CRLF]


def parse_headers(raw: bytes) -> tuple[str, dict[str, str]]:
    """(status, headers) of a header block; the status is empty or for example `503`."""
    first, _, rest = raw.decode(errors="replace").partition("\r\n")
    pairs = (line.partition(":") for line in rest.split("\r\n") if ":" in line)
    _, _, status = first.partition(" ")
    return status.strip().split(" ")[0], {name: value.strip() for name, _, value in pairs}
