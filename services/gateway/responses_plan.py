"""A checked request with everything it refers to: what a response is made from, now or again."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import anyio

from finback.services.gateway.responses_conversation import conversation_of
from finback.services.gateway.responses_items import is_reference, items_of, new_id
from finback.services.gateway.responses_schema import (
    ConversationRef,
    InputRequest,
    ResponsesRequest,
)
from finback.services.gateway.responses_turns import Unseal
from finback.services.gateway.store import Store
from finback.services.gateway.store_limits import (
    MAX_VALUE_BYTES,
    Item,
    check_value,
    metadata_of,
    raw_items,
)
from finback.services.gateway.store_rows import Stored
from finback.shared.clock import unix_s
from finback.shared.codec.dialogue import Conversation
from finback.shared.errors import InvalidRequest

_SEED_BITS: Final = 63
MAX_REFERENCES: Final = 256
# The longest escape of JSON is six bytes, the longest character of UTF-8 four.
_BYTES_PER_CHAR: Final = 6
_FRAME_CHARS: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """`items`: everything the model is shown; the last of them, `own_items`, this request brought.

    `cache_salt`: of the response that it continues; empty: none.
    """

    items: tuple[Item, ...]
    own_items: tuple[Item, ...]
    conversation_id: str | None = None
    cache_salt: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A response that is to be made. It can be stored and read again (`to_json`, `of_json`)."""

    request: ResponsesRequest
    response_id: str
    created_at: int
    seed: int
    context: Context
    conversation: Conversation

    @property
    def is_stored(self) -> bool:
        return self.request.store is not False

    @property
    def cache_salt(self) -> str:
        """The request's own, else that of what it continues: else a chain would leave its blocks."""
        return self.request.cache_salt or self.context.cache_salt

    def to_json(self) -> dict[str, Any]:
        """What `of_json` needs; the context is stored beside it."""
        num_own = len(self.context.own_items)
        return {
            "request": self.request.model_dump(
                exclude_unset=True, exclude={"input"}, by_alias=True
            ),
            "created_at": self.created_at,
            "seed": self.seed,
            "num_own_items": num_own,
            "conversation_id": self.context.conversation_id,
            "cache_salt": self.context.cache_salt,
        }


def of_json(stored: Stored, unseal: Unseal) -> Plan:
    """The plan of a background response that is to be made (again)."""
    saved = stored.plan or {}
    request = ResponsesRequest.model_validate(saved["request"])
    items = stored.items
    context = Context(
        items=items,
        own_items=items[len(items) - saved["num_own_items"] :],
        conversation_id=saved["conversation_id"],
        # Not there in what an earlier release stored.
        cache_salt=saved.get("cache_salt", ""),
    )
    return Plan(
        request=request,
        response_id=stored.response_id,
        created_at=saved["created_at"],
        seed=saved["seed"],
        context=context,
        conversation=conversation_of(request, context.items, unseal),
    )


async def make_plan(request: ResponsesRequest, store: Store, tenant: str, unseal: Unseal) -> Plan:
    """Check all that can be checked before anything is encoded; raises `ServingError`."""
    if request.model is None:
        raise InvalidRequest(
            "Missing required parameter: 'model'.",
            param="model",
            reason="missing_required_parameter",
        )
    _check_modes(request)
    context = await context_of(request, store, tenant)
    return Plan(
        request=request,
        response_id=new_id("resp"),
        created_at=int(unix_s()),
        seed=secrets.randbits(_SEED_BITS) if request.seed is None else request.seed,
        context=context,
        conversation=conversation_of(request, context.items, unseal),
    )


def _check_modes(request: ResponsesRequest) -> None:
    metadata_of(request.metadata)
    if request.background and request.store is False:
        raise InvalidRequest(
            "a background response must be stored: do not send store=false with it",
            param="background",
            reason="invalid_value",
        )
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest(
            "stream_options is only allowed when stream is true", param="stream_options"
        )


async def context_of(request: InputRequest, store: Store, tenant: str) -> Context:
    """The items of the request and of what it continues: one read, however long that is."""
    if request.previous_response_id is not None and request.conversation is not None:
        raise InvalidRequest(
            "previous_response_id and conversation exclude each other",
            param="previous_response_id",
            reason="mutually_exclusive_parameters",
        )
    given = items_of(request.input if request.input is not None else [])
    earlier: list[Item] = []
    conversation_id, cache_salt = _conversation_id(request), ""
    if request.previous_response_id is not None:
        earlier, cache_salt = await _previous(store, tenant, request.previous_response_id)
    elif conversation_id is not None:
        earlier = await store.conversations.items(tenant, conversation_id)
    own = await _resolved(given, earlier, store, tenant)
    items = (*earlier, *own)
    await _check_size(items)
    return Context(
        items=items,
        own_items=tuple(own),
        conversation_id=conversation_id,
        cache_salt=cache_salt,
    )


async def _check_size(items: Sequence[Item]) -> None:
    """Refuse early what could not be stored; what is far below the limit is not measured."""
    at_most = sum(_num_chars(item) for item in items) * _BYTES_PER_CHAR
    if at_most > MAX_VALUE_BYTES:
        num_bytes = len(await anyio.to_thread.run_sync(raw_items, items))
        check_value(num_bytes, "the response with its context", "input")


def _num_chars(value: Any) -> int:
    """At least the characters of its JSON, escapes not counted."""
    if isinstance(value, str):
        return len(value) + _FRAME_CHARS
    if isinstance(value, dict):
        return sum(len(key) + _num_chars(held) for key, held in value.items())
    return sum(map(_num_chars, value)) if isinstance(value, list) else _FRAME_CHARS


def _conversation_id(request: InputRequest) -> str | None:
    given = request.conversation
    return given.id if isinstance(given, ConversationRef) else given


async def _previous(store: Store, tenant: str, response_id: str) -> tuple[list[Item], str]:
    """Its items and its salt."""
    found = await store.responses.get(tenant, response_id, with_items=True)
    if found is None:
        raise InvalidRequest(
            f"Previous response with id '{response_id}' not found.",
            param="previous_response_id",
            reason="previous_response_not_found",
        )
    if not found.is_finished:
        raise InvalidRequest(
            f"Previous response with id '{response_id}' is not finished yet.",
            param="previous_response_id",
            reason="previous_response_not_finished",
        )
    return [*found.items, *found.body["output"]], found.body.get("cache_salt", "")


async def _resolved(
    given: Sequence[Item], earlier: Sequence[Item], store: Store, tenant: str
) -> list[Item]:
    """References replaced by what they stand for; those to earlier items are there already."""
    wanted = [item["id"] for item in given if is_reference(item)]
    if len(wanted) > MAX_REFERENCES:
        raise InvalidRequest(
            f"at most {MAX_REFERENCES} item_reference items can be sent at once", param="input"
        )
    if not wanted:
        return list(given)
    known = {item["id"] for item in earlier}
    found = await store.responses.find_items(tenant, [name for name in wanted if name not in known])
    resolved = []
    for index, item in enumerate(given):
        if not is_reference(item):
            resolved.append(item)
        elif item["id"] in found:
            resolved.append(found[item["id"]])
        elif item["id"] not in known:
            raise InvalidRequest(
                f"Item with id '{item['id'][:80]}' not found.",
                param=f"input.{index}.id",
                reason="item_not_found",
            )
    return resolved
