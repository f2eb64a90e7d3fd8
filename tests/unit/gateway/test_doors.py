"""Keys, request ids, idempotency, error envelopes."""

import asyncio
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from finback.services.gateway.auth import KeyRing, check_bind
from finback.services.gateway.error_envelope import (
    dialect_of,
    error_document,
    error_headers,
    retry_after,
    status_of,
)
from finback.services.gateway.idempotency import KeyReused, Recordings
from finback.services.gateway.nats_api import may_reply_to
from finback.services.gateway.request_ids import RequestIds
from finback.services.gateway.sink import Outcome, Sink
from finback.shared.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    InvariantViolated,
    NotFound,
    Overloaded,
    PayloadTooLarge,
    PermissionDenied,
    ServingError,
    Unauthenticated,
    Unavailable,
)


def write_keys(path: Path, *keys: tuple[str, bool]) -> None:
    lines = [
        json.dumps({"id": f"id-{key}", "hash": hashlib.sha256(key.encode()).hexdigest(),
                    "name": key, "created": 0, "revoked": is_revoked})
        for key, is_revoked in keys
    ]  # fmt: skip
    path.write_text("\n".join(lines) + "\n")
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1_000_000))


def test_keys_take_effect_without_restart(tmp_path: Path) -> None:
    path = tmp_path / "keys.jsonl"
    ring = KeyRing(str(path))
    assert ring.tenant_of(None) == ""
    write_keys(path, ("a", False), ("b", True))
    assert ring.tenant_of("Bearer a") == "id-a"
    assert ring.tenant_of("bearer a") == "id-a"
    for wrong in (None, "", "a", "Bearer", "Bearer b", "Bearer c", "Basic a"):
        with pytest.raises(Unauthenticated):
            ring.tenant_of(wrong)
    write_keys(path, ("a", True), ("c", False))
    assert ring.tenant_of("Bearer c") == "id-c"
    with pytest.raises(Unauthenticated):
        ring.tenant_of("Bearer a")
    path.write_text("not json\n")
    with pytest.raises(Unauthenticated):
        ring.tenant_of("Bearer c")
    path.unlink()
    with pytest.raises(Unauthenticated):
        ring.tenant_of(None)


@pytest.mark.parametrize(
    ("host", "is_fine"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("127.9.9.9", True),
     ("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("example.org", False)],
)  # fmt: skip
def test_only_loopback_without_keys(tmp_path: Path, host: str, is_fine: bool) -> None:
    path = tmp_path / "keys.jsonl"
    if is_fine:
        check_bind(host, KeyRing(str(path)))
    else:
        with pytest.raises(ConfigError, match="finback keys create"):
            check_bind(host, KeyRing(str(path)))
    write_keys(path, ("a", False))
    check_bind(host, KeyRing(str(path)))


def test_request_ids_are_never_given_twice() -> None:
    ids = RequestIds()
    assert ids.choose("mine") == "mine"
    seen = {ids.choose(wanted) for wanted in ("mine", "a b", "", None, "x" * 99, "é", "mine")}
    assert len(seen) == 7
    assert "mine" not in seen


def test_envelopes() -> None:
    error = NotFound("no", param="model", reason="model_not_found")
    assert json.loads(error_document(error)) == {
        "error": {
            "message": "no",
            "type": "not_found_error",
            "param": "model",
            "code": "model_not_found",
        }
    }
    assert json.loads(error_document(Overloaded("x")))["error"]["code"] == "rate_limit_exceeded"
    assert json.loads(error_document(InvalidRequest("x")))["error"]["code"] is None
    assert json.loads(error_document(Unavailable("x")))["error"]["type"] == "server_error"
    assert retry_after(Overloaded("x")) == "1"
    assert retry_after(Overloaded("x", retry_after_s=2.2)) == "3"
    assert retry_after(InvalidRequest("x")) is None


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (InvalidRequest("x"), 400, "invalid_request_error"),
        (Unauthenticated("x"), 401, "authentication_error"),
        (PermissionDenied("x"), 403, "permission_error"),
        (NotFound("x"), 404, "not_found_error"),
        (PayloadTooLarge("x"), 413, "request_too_large"),
        (Overloaded("x"), 429, "rate_limit_error"),
        (InvariantViolated("x"), 500, "api_error"),
        (Unavailable("x"), 529, "overloaded_error"),
        (DeadlineExceeded("x"), 504, "timeout_error"),
    ],
)
def test_errors_in_anthropics_dialect(error: ServingError, status: int, kind: str) -> None:
    assert status_of(error, "anthropic") == status
    assert json.loads(error_document(error, "anthropic", request_id="r1")) == {
        "type": "error",
        "error": {"type": kind, "message": "x"},
        "request_id": "r1",
    }


def test_whose_dialect_a_request_speaks() -> None:
    assert dialect_of("/v1/messages", {}) == "anthropic"
    assert dialect_of("/v1/messages/count_tokens", {}) == "anthropic"
    assert dialect_of("/v1/models", {"anthropic-version": "2023-06-01"}) == "anthropic"
    assert dialect_of("/v1/chat/completions", {}) == "openai"


def test_headers_of_errors() -> None:
    assert error_headers(Unauthenticated("x")) == {"www-authenticate": "Bearer"}
    wait = error_headers(Overloaded("x", retry_after_s=0.25))
    assert wait == {"retry-after": "1", "retry-after-ms": "250"}
    assert error_headers(NotFound("x")) == {}


class ListSink:
    """Keeps what it gets."""

    def __init__(self) -> None:
        self.got: list[object] = []

    async def reply(
        self, status: int, body: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        self.got.append((status, body))

    async def open_stream(self) -> None:
        self.got.append("open")

    async def send(self, documents: Sequence[bytes]) -> None:
        self.got.extend(documents)

    async def keep_alive(self) -> None:
        self.got.append("alive")

    async def close_stream(self, final: Outcome) -> None:
        self.got.append(final)


KEY = ("tenant", "chat.completions", "key")


async def ask(recordings: Recordings, make: object, digest: bytes = b"d") -> list[object]:
    sink = ListSink()
    await recordings.answer(KEY, digest, make, sink, tick_s=5)  # type: ignore[arg-type]  # test makers
    return sink.got


async def test_concurrent_duplicates_share_one_answer() -> None:
    recordings, go, made = Recordings(), asyncio.Event(), []

    async def make(sink: Sink) -> None:
        made.append(1)
        await sink.open_stream()
        await sink.send([b"a"])
        await go.wait()
        await sink.send([b"b"])
        await sink.close_stream("end")

    tasks = [asyncio.create_task(ask(recordings, make)) for _ in range(3)]
    await asyncio.sleep(0.01)
    go.set()
    expected = ["open", b"a", b"b", "end"]
    assert await asyncio.gather(*tasks) == [expected] * 3
    assert await ask(recordings, make) == expected
    assert made == [1]
    with pytest.raises(KeyReused):
        await ask(recordings, make, b"other")


async def test_failures_are_not_kept() -> None:
    recordings, made = Recordings(), []

    async def fail(sink: Sink) -> None:
        made.append(1)
        raise Unavailable("no")

    async def reply(sink: Sink) -> None:
        await sink.reply(200, b"ok")

    for _ in range(2):
        with pytest.raises(Unavailable):
            await ask(recordings, fail)
    assert made == [1, 1]
    assert await ask(recordings, reply) == [(200, b"ok")]
    assert await ask(recordings, fail) == [(200, b"ok")]


async def test_a_request_that_all_have_left_is_cancelled() -> None:
    recordings, events = Recordings(), []

    async def hang(sink: Sink) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            events.append("cancelled")

    first = asyncio.create_task(ask(recordings, hang))
    second = asyncio.create_task(ask(recordings, hang))
    await asyncio.sleep(0.01)
    first.cancel()
    await asyncio.sleep(0.01)
    assert not events
    second.cancel()
    await asyncio.sleep(0.01)
    assert events == ["cancelled"]


async def test_empty_and_huge_keys_are_refused() -> None:
    async def reply(sink: Sink) -> None:
        await sink.reply(200, b"ok")

    for key in ("", "x" * 256):
        with pytest.raises(InvalidRequest):
            await Recordings().answer(("", "e", key), b"d", reply, ListSink(), tick_s=5)


@pytest.mark.parametrize(
    ("reply", "is_fine"),
    [
        ("_INBOX.abc.1", True),
        ("app.answers.7", True),
        (None, False),
        ("", False),
        ("_INBOX.gateway.abc.1", False),
        ("_INBOX.supervisor.x", False),
        ("finback.v1.decode.decode-1.cancel", False),
        ("finback.v1.api.chat.completions", False),
        ("$JS.API.STREAM.DELETE.KV_x", False),
        ("$KV.x.y", False),
        ("_INBOX.>", False),
        ("a.*", False),
        ("a..b", False),
        ("a b", False),
    ],
)
def test_answers_go_to_clients_only(reply: str | None, is_fine: bool) -> None:
    """A client must not have the gateway publish for it where it may not."""
    assert may_reply_to(reply, "finback") == is_fine
