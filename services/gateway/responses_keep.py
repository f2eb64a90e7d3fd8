"""A finished response is stored before its client is told the end: whoever sees it can go on."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from finback.services.gateway.openai_format import to_json
from finback.services.gateway.responses_plan import Plan
from finback.services.gateway.responses_protocol import ResponsesProtocol
from finback.services.gateway.sink import Outcome, Sink
from finback.services.gateway.store_rows import Kept

Keep = Callable[[dict[str, Any]], Awaitable[bool]]


def kept_of(plan: Plan, body: dict[str, Any], tenant: str) -> Kept:
    """What the store is given of a response."""
    return Kept(
        response_id=plan.response_id,
        tenant=tenant,
        body=body,
        items=plan.context.items,
        own_items=plan.context.own_items,
        conversation_id=plan.context.conversation_id,
        is_stored=plan.is_stored,
    )


class KeepingSink:
    """Calls `keep` once with the final response. If it cannot be kept, the answer says so.

    An answer is worth more than its copy: a full disk does not take it from the client, but the
    response then has `store: false`.
    """

    def __init__(self, sink: Sink, protocol: ResponsesProtocol, keep: Keep) -> None:
        self._sink = sink
        self._protocol = protocol
        self._keep = keep
        self._is_kept = False

    async def reply(
        self, status: int, body: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        if not await self._kept():
            body = to_json(self._protocol.final)
        await self._sink.reply(status, body, headers)

    async def open_stream(self) -> None:
        await self._sink.open_stream()

    async def send(self, documents: Sequence[bytes]) -> None:
        if not await self._kept():
            documents = [*documents[:-1], *self._protocol.rewritten()]
        await self._sink.send(documents)

    async def keep_alive(self) -> None:
        await self._sink.keep_alive()

    async def close_stream(self, final: Outcome) -> None:
        await self._sink.close_stream(final)

    async def _kept(self) -> bool:
        """False, once: the final response is there and could not be stored."""
        final = self._protocol.final
        if final is None or self._is_kept:
            return True
        self._is_kept = True
        if await self._keep(final):
            return True
        final["store"] = False
        return False
