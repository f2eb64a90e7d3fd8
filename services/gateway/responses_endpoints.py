"""What the Responses and Conversations APIs add to the table of public endpoints."""

from collections.abc import Iterable

from finback.services.gateway.conversations_api import ConversationsApi
from finback.services.gateway.endpoints import Endpoint
from finback.services.gateway.responses_api import ResponsesApi

_RESPONSE = "/v1/responses/{response_id}"
_CONVERSATION = "/v1/conversations/{conversation_id}"


def responses_endpoints(
    responses: ResponsesApi, conversations: ConversationsApi
) -> Iterable[Endpoint]:
    """The endpoints; those of one path differ in their method."""
    yield Endpoint(
        name="responses",
        path="/v1/responses",
        handler=responses.create,
        names_events=True,
        operation="chat",
    )
    yield Endpoint(
        name="responses.input_tokens",
        path="/v1/responses/input_tokens",
        handler=responses.count,
    )
    yield Endpoint(
        name="responses.get",
        path=_RESPONSE,
        handler=responses.retrieve,
        method="GET",
        names_events=True,
    )
    yield Endpoint(
        name="responses.delete", path=_RESPONSE, handler=responses.delete, method="DELETE"
    )
    yield Endpoint(name="responses.cancel", path=f"{_RESPONSE}/cancel", handler=responses.cancel)
    yield Endpoint(
        name="responses.input_items",
        path=f"{_RESPONSE}/input_items",
        handler=responses.input_items,
        method="GET",
    )
    yield from _conversations(conversations)


def _conversations(api: ConversationsApi) -> Iterable[Endpoint]:
    items = f"{_CONVERSATION}/items"
    for name, path, method, handler in (
        ("conversations", "/v1/conversations", "POST", api.create),
        ("conversations.get", _CONVERSATION, "GET", api.retrieve),
        ("conversations.update", _CONVERSATION, "POST", api.update),
        ("conversations.delete", _CONVERSATION, "DELETE", api.delete),
        ("conversations.items", items, "GET", api.list_items),
        ("conversations.items.create", items, "POST", api.create_items),
        ("conversations.items.get", f"{items}/{{item_id}}", "GET", api.retrieve_item),
        ("conversations.items.delete", f"{items}/{{item_id}}", "DELETE", api.delete_item),
    ):
        yield Endpoint(name=name, path=path, handler=handler, method=method)
