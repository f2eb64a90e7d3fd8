"""The Conversations API: items in order, to which responses add what they were given and said."""

from typing import Any

from finback.services.gateway.body import parse_object
from finback.services.gateway.caller import Caller
from finback.services.gateway.openai_format import to_json
from finback.services.gateway.query_values import typed
from finback.services.gateway.responses_api import DEFAULT_LIMIT, page_json
from finback.services.gateway.responses_items import is_reference, items_of, new_id
from finback.services.gateway.responses_schema import (
    ConversationCreate,
    ConversationGet,
    ConversationUpdate,
    ItemRef,
    ItemsCreate,
    ItemsPage,
)
from finback.services.gateway.sink import Sink
from finback.services.gateway.store import Store
from finback.services.gateway.store_append import StoredConversation
from finback.services.gateway.store_limits import Item, metadata_of
from finback.services.gateway.validation import check
from finback.shared.errors import InvalidRequest


class ConversationsApi:
    """The handlers."""

    def __init__(self, store: Store) -> None:
        self._conversations = store.conversations

    async def create(self, body: bytes, caller: Caller, sink: Sink) -> None:
        """`POST /v1/conversations`."""
        request = check(parse_object(body), ConversationCreate)
        metadata, items = metadata_of(request.metadata), _new_items(request.items or [])
        made = await self._conversations.create(caller.tenant, new_id("conv"), metadata, items)
        await sink.reply(200, to_json(conversation_json(made)))

    async def retrieve(self, body: bytes, caller: Caller, sink: Sink) -> None:
        """`GET /v1/conversations/{conversation_id}`."""
        name = check(parse_object(body), ConversationGet).conversation_id
        found = await self._conversations.get(caller.tenant, name)
        await sink.reply(200, to_json(conversation_json(found)))

    async def update(self, body: bytes, caller: Caller, sink: Sink) -> None:
        """`POST /v1/conversations/{conversation_id}`: its metadata."""
        request = check(parse_object(body), ConversationUpdate)
        metadata = metadata_of(request.metadata)
        name = request.conversation_id
        changed = await self._conversations.update(caller.tenant, name, metadata)
        await sink.reply(200, to_json(conversation_json(changed)))

    async def delete(self, body: bytes, caller: Caller, sink: Sink) -> None:
        """`DELETE /v1/conversations/{conversation_id}`, items included."""
        name = check(parse_object(body), ConversationGet).conversation_id
        await self._conversations.delete(caller.tenant, name)
        gone = {"id": name, "object": "conversation.deleted", "deleted": True}
        await sink.reply(200, to_json(gone))

    async def list_items(self, body: bytes, caller: Caller, sink: Sink) -> None:
        """`GET /v1/conversations/{conversation_id}/items`."""
        fields = typed(parse_object(body), numbers=("limit",), lists=("include",))
        request = check(fields, ItemsPage)
        limit = request.limit or DEFAULT_LIMIT
        items = await self._conversations.page(
            caller.tenant,
            request.conversation_id,
            after=request.after,
            limit=limit + 1,
            is_desc=request.order != "asc",
        )
        await sink.reply(200, to_json(page_json(items, limit)))

    async def create_items(self, body: bytes, caller: Caller, sink: Sink) -> None:
        """`POST /v1/conversations/{conversation_id}/items`."""
        request = check(parse_object(body), ItemsCreate)
        items = _new_items(request.items)
        await self._conversations.append(caller.tenant, request.conversation_id, items)
        await sink.reply(200, to_json(page_json(items, len(items))))

    async def retrieve_item(self, body: bytes, caller: Caller, sink: Sink) -> None:
        """`GET /v1/conversations/{conversation_id}/items/{item_id}`."""
        request = check(typed(parse_object(body), lists=("include",)), ItemRef)
        item = await self._conversations.item(
            caller.tenant, request.conversation_id, request.item_id
        )
        await sink.reply(200, to_json(item))

    async def delete_item(self, body: bytes, caller: Caller, sink: Sink) -> None:
        """`DELETE /v1/conversations/{conversation_id}/items/{item_id}`."""
        request = check(parse_object(body), ItemRef)
        left = await self._conversations.delete_item(
            caller.tenant, request.conversation_id, request.item_id
        )
        await sink.reply(200, to_json(conversation_json(left)))


def conversation_json(conversation: StoredConversation) -> dict[str, Any]:
    """A conversation as clients see it."""
    return {
        "id": conversation.conversation_id,
        "object": "conversation",
        "created_at": int(conversation.created_s),
        "metadata": conversation.metadata,
    }


def _new_items(given: list[Any]) -> list[Item]:
    items = items_of(given, "items")
    for index, item in enumerate(items):
        if is_reference(item):
            raise InvalidRequest(
                "a conversation holds items, not references to them",
                param=f"items.{index}.type",
                reason="unsupported_value",
            )
    return items
