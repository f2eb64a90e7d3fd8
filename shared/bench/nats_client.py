"""The same requests through the NATS request API: one JSON chunk a message, numbered, a final marker."""

import asyncio
import time
from typing import Any, Final
from urllib.parse import unquote

from finback.shared.actor.bus import Message
from finback.shared.actor.nats_bus import BusSettings, NatsBus, connect
from finback.shared.bench.http_client import completion_body
from finback.shared.bench.load import Job, Sampling
from finback.shared.bench.track import RequestFailed, RequestRefused, Track
from finback.shared.errors import ServingError
from finback.shared.wire import headers as h
from finback.shared.wire.subjects import Subjects

_TOO_MANY: Final = ("429", "503", "resource_exhausted")
_NO_RESPONDERS: Final = "503"


class NatsClient:
    """A `Client` over one connection. Made by `open`."""

    def __init__(self, bus: NatsBus, *, model: str, key: str, prefix: str) -> None:
        self._bus = bus
        self._model = model
        self._headers = {h.AUTHORIZATION: f"Bearer {key}"} if key else {}
        self._subject = Subjects(prefix).api("completions")

    @classmethod
    async def open(
        cls, settings: BusSettings, *, model: str, key: str = "", prefix: str = "finback"
    ) -> "NatsClient":
        return cls(await connect(settings), model=model, key=key, prefix=prefix)

    async def ask(self, job: Job, sampling: Sampling, track: Track) -> None:
        """See `Client`."""
        stream = _Stream(track)
        inbox = self._bus.new_inbox()
        body = completion_body(job, sampling, self._model, has_ids=True)
        try:
            subscription = await self._bus.subscribe(inbox, stream.take)
            try:
                await self._bus.publish(self._subject, body, self._headers, reply=inbox)
                await stream.over
            finally:
                await subscription.unsubscribe()
        except ServingError as error:
            raise RequestFailed(str(error)) from error

    async def reset(self) -> None:
        """There is no request for it; the prompts' marks see to it."""

    def stats(self) -> dict[str, Any]:
        return {}

    async def close(self) -> None:
        await self._bus.close()


class _Stream:
    """The messages of one answer, in order."""

    def __init__(self, track: Track) -> None:
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._track = track
        self._expected = 0

    def take(self, message: Message) -> None:
        """The bus's callback: nothing here waits."""
        at_s = time.monotonic()
        if self.over.done():
            return
        try:
            self._take(message, at_s)
        except RequestFailed as error:
            self.over.set_exception(error)

    def _take(self, message: Message, at_s: float) -> None:
        headers = message.headers
        _check(headers)
        if int(headers.get(h.SEQ, self._expected)) != self._expected:
            raise RequestFailed(f"chunk {self._expected} of the stream is missing")
        self._expected += 1
        if message.data:
            self._track.take(message.data, at_s)
        if h.FINAL not in headers:
            return
        if headers[h.FINAL] != "end" or not self._track.is_ended:
            raise RequestFailed(f"the stream ended before the answer did: {headers[h.FINAL]}")
        self.over.set_result(None)


def _check(headers: Any) -> None:
    if headers.get("Status") == _NO_RESPONDERS:
        raise RequestFailed("nobody answers the request API on this NATS server")
    if h.ERROR_CODE in headers:
        told = unquote(headers.get(h.ERROR, "error"))
        if headers[h.ERROR_CODE] in _TOO_MANY:
            advice = headers.get(h.RETRY_AFTER_S, "")
            raise RequestRefused(told, float(advice) if advice else 0.0)
        raise RequestFailed(told)
