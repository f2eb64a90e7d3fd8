"""What HTTP and NATS have in common at the door: who asks, under which id, once or again."""

import hashlib
import json
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

from opentelemetry.trace import SpanKind

from finback.services.gateway.auth import KeyRing
from finback.services.gateway.body import MAX_BODY_BYTES, parse_object
from finback.services.gateway.caller import Caller
from finback.services.gateway.endpoints import Endpoint, EndpointTable
from finback.services.gateway.exchange import Exchange
from finback.services.gateway.idempotency import Recordings
from finback.services.gateway.request_ids import RequestIds
from finback.services.gateway.sink import Sink
from finback.shared.errors import PayloadTooLarge
from finback.shared.telemetry import tracing


@dataclass(slots=True, kw_only=True)
class Front:
    """The public endpoints behind both doors."""

    exchange: Exchange
    keys: KeyRing
    recordings: Recordings
    request_ids: RequestIds
    endpoints: EndpointTable

    async def answer(
        self,
        endpoint: Endpoint,
        body: bytes,
        sink: Sink,
        *,
        request_id: str,
        authorization: str | None,
        idempotency_key: str | None,
        headers: dict[str, str] | None = None,
    ) -> None:
        """Authenticate and answer; raises `ServingError` while nothing was sent.

        `headers`: filled with what belongs into the answer's head, an error's too. An answer that
        is played again tells nothing about limits: it uses none.
        """
        grant = self.keys.grant_of(authorization)
        grant.check_endpoint(endpoint.name)
        caller = Caller(
            request_id=request_id,
            tenant=grant.tenant,
            grant=grant,
            dialect=endpoint.dialect,
            headers={} if headers is None else headers,
        )
        check_body_size(len(body))
        if idempotency_key is None:
            await endpoint.handler(body, caller, sink)
            return
        canonical = json.dumps(parse_object(body), sort_keys=True).encode()

        async def make(recording: Sink) -> None:
            await endpoint.handler(body, caller, recording)

        await self.recordings.answer(
            (caller.tenant, endpoint.name, idempotency_key),
            hashlib.sha256(canonical).digest(),
            make,
            sink,
            tick_s=self.exchange.keep_alive_s,
            headers=caller.headers,
        )


_TOO_LARGE: Final = f"the body is larger than {MAX_BODY_BYTES} bytes"


def check_body_size(num_bytes: int) -> None:
    """Refuse a body before it is read, parsed or kept."""
    if num_bytes > MAX_BODY_BYTES:
        raise PayloadTooLarge(_TOO_LARGE, reason="request_too_large")


def root_span(
    endpoint: Endpoint, request_id: str, headers: Mapping[str, str], model: str
) -> AbstractContextManager[Any]:
    """The span of a whole request, below the caller's own if it sent its context.

    A request that generates nothing is no trace.
    """
    if not endpoint.operation:
        return nullcontext()
    attributes = {
        tracing.REQUEST_ID: request_id,
        "gen_ai.operation.name": endpoint.operation,
        "gen_ai.provider.name": "finback",
        "gen_ai.response.model": model,
    }
    return tracing.span(
        f"gateway {endpoint.name}",
        attributes,
        parent=tracing.extract(headers),
        kind=SpanKind.SERVER,
    )
