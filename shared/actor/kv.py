"""A small key-value store with TTL and compare-and-set: over JetStream's API, or in memory.

JetStream is spoken through the plain `Bus` (JSON requests on `$JS.API`), so that watches can be
made anew after a reconnect: the client library's own resume was seen to stay silent for 16 s.
"""

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from finback.shared.actor.bus import Bus, Message, Subscription
from finback.shared.errors import ServingError, Unavailable

_API: Final = "$JS.API"
_TIMEOUT_S: Final = 2.0
_NS: Final = 1_000_000_000
_OPERATION: Final = "KV-Operation"
_MARKER: Final = "Nats-Marker-Reason"
_EXPECTED: Final = "Nats-Expected-Last-Subject-Sequence"
_WRONG_SEQUENCE: Final = frozenset({10071, 10164})
_NAME_TAKEN: Final = 10058
_HEARTBEAT_MIN_S: Final = 0.1  # the server allows no less


def heartbeat_s(ttl_s: float) -> float:
    """How often a watch without news shows that it is alive."""
    return max(_HEARTBEAT_MIN_S, ttl_s / 3)


class WrongRevision(Exception):
    """Somebody else changed the key, or its lease ran out."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One change. `value` None: deleted or expired. `is_last` of the values there at the start."""

    key: str
    value: bytes | None
    revision: int


class KeyValue(Protocol):
    """The part of a bucket that the registry and locks need."""

    async def open(self) -> None:
        """Make the bucket if it is not there. Raises `Unavailable`."""

    async def put(self, key: str, value: bytes, *, expected: int | None = None) -> int:
        """Write; return the new revision.

        `expected`: the revision that must be there, 0 for none; else `WrongRevision`.
        """

    async def get(self, key: str) -> Entry | None:
        """The newest entry, a deletion included (its `value` is None)."""

    async def delete(self, key: str) -> None: ...

    async def watch(self, changed: Callable[[Entry], None], beat: Callable[[], None]) -> "Watch":
        """Call `changed` for every key now there, then for every change.

        `beat` is called at least every `heartbeat_s` while the watch is alive.
        """


class Watch(Protocol):
    """A running watch. `num_pending`: entries that the first replay will bring."""

    num_pending: int

    async def stop(self) -> None: ...


class JetStreamKV:
    """One bucket, compatible with every NATS KV client. Memory storage: it holds leases only."""

    def __init__(self, bus: Bus, bucket: str, *, ttl_s: float, replicas: int = 1) -> None:
        self._bus = bus
        self._bucket = bucket
        self._stream = f"KV_{bucket}"
        self._ttl_s = ttl_s
        self._replicas = replicas

    async def open(self) -> None:
        config = {
            "name": self._stream,
            "subjects": [f"$KV.{self._bucket}.>"],
            "storage": "memory",
            "retention": "limits",
            "discard": "new",
            "max_msgs_per_subject": 1,
            "max_age": round(self._ttl_s * _NS),
            "duplicate_window": round(min(self._ttl_s, 120) * _NS),
            "num_replicas": self._replicas,
            "allow_rollup_hdrs": True,
            "deny_delete": True,
            "allow_direct": True,
            # With these the server tells watchers of an expiry (2.11 and later).
            "allow_msg_ttl": True,
            "subject_delete_marker_ttl": round(max(1.0, self._ttl_s) * _NS),
        }
        reply = await self._ask(f"STREAM.CREATE.{self._stream}", config)
        if _code(reply) == _NAME_TAKEN:
            return  # made by another release with other options: use it as it is
        _raise(reply, f"bucket {self._bucket}")

    async def put(self, key: str, value: bytes, *, expected: int | None = None) -> int:
        headers = {} if expected is None else {_EXPECTED: str(expected)}
        return await self._write(key, value, headers)

    async def get(self, key: str) -> Entry | None:
        subject = f"$KV.{self._bucket}.{key}"
        reply = await self._ask(f"STREAM.MSG.GET.{self._stream}", {"last_by_subj": subject})
        if _code(reply) == 10037:  # no message found
            return None
        _raise(reply, f"key {key}")
        found = reply["message"]
        raw = base64.b64decode(found.get("hdrs", "")).decode()
        is_gone = _OPERATION in raw or _MARKER in raw
        value = None if is_gone else base64.b64decode(found.get("data", ""))
        return Entry(key, value, found["seq"])

    async def delete(self, key: str) -> None:
        await self._write(key, b"", {_OPERATION: "DEL"})

    async def watch(
        self, changed: Callable[[Entry], None], beat: Callable[[], None]
    ) -> "_JetStreamWatch":
        prefix = f"$KV.{self._bucket}."
        inbox = self._bus.new_inbox()

        def deliver(message: Message) -> None:
            beat()
            if message.subject.startswith(prefix):
                changed(_entry(message, prefix))

        subscription = await self._bus.subscribe(inbox, deliver)
        config = {
            "deliver_subject": inbox,
            "deliver_policy": "last_per_subject",
            "ack_policy": "none",
            "filter_subject": f"{prefix}>",
            "idle_heartbeat": round(heartbeat_s(self._ttl_s) * _NS),
            "inactive_threshold": round(10 * _NS),
            "mem_storage": True,
            "num_replicas": 1,
        }
        request = {"stream_name": self._stream, "config": config}
        try:
            reply = await self._ask(f"CONSUMER.CREATE.{self._stream}", request)
            _raise(reply, f"watch of {self._bucket}")
        except ServingError:
            await subscription.unsubscribe()
            raise
        return _JetStreamWatch(self, subscription, reply["name"], reply.get("num_pending", 0))

    async def forget_watch(self, consumer: str) -> None:
        """Delete a consumer now rather than when the server notices that nobody listens."""
        try:
            await self._ask(f"CONSUMER.DELETE.{self._stream}.{consumer}", None)
        except ServingError:
            return

    async def _write(self, key: str, value: bytes, headers: dict[str, str]) -> int:
        subject = f"$KV.{self._bucket}.{key}"
        message = await self._bus.request(subject, value, headers or None, timeout_s=_TIMEOUT_S)
        reply = json.loads(message.data)
        if _code(reply) in _WRONG_SEQUENCE:
            raise WrongRevision(key)
        _raise(reply, f"key {key}")
        return int(reply["seq"])

    async def _ask(self, verb: str, request: Mapping[str, Any] | None) -> dict[str, Any]:
        body = b"" if request is None else json.dumps(request).encode()
        message = await self._bus.request(f"{_API}.{verb}", body, timeout_s=_TIMEOUT_S)
        reply: dict[str, Any] = json.loads(message.data)
        return reply


class _JetStreamWatch:
    def __init__(
        self, kv: JetStreamKV, subscription: Subscription, consumer: str, num_pending: int
    ) -> None:
        self.num_pending = num_pending
        self._kv = kv
        self._subscription = subscription
        self._consumer = consumer

    async def stop(self) -> None:
        await self._subscription.unsubscribe()
        await self._kv.forget_watch(self._consumer)


def _entry(message: Message, prefix: str) -> Entry:
    is_gone = _OPERATION in message.headers or _MARKER in message.headers
    return Entry(
        message.subject.removeprefix(prefix),
        None if is_gone else message.data,
        _sequence(message.reply or ""),
    )


def _sequence(reply: str) -> int:
    """Stream sequence in a `$JS.ACK` subject; newer servers put domain and account before it."""
    tokens = reply.split(".")
    return int(tokens[5] if len(tokens) == 9 else tokens[7])


def _code(reply: Mapping[str, Any]) -> int:
    return int(reply.get("error", {}).get("err_code", 0))


def _raise(reply: Mapping[str, Any], what: str) -> None:
    error = reply.get("error")
    if error is not None:
        text = error.get("description", "error")
        raise Unavailable(f"JetStream refuses {what}: {text}", reason="jetstream")
