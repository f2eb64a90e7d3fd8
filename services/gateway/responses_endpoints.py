"""What the Responses and Conversations APIs add to the table of public endpoints."""

from collections.abc import Iterable

from finback.services.gateway.conversations_api import ConversationsApi
from finback.services.gateway.endpoints import Endpoint
from finback.services.gateway.responses_api import ResponsesApi
from finback.services.gateway.responses_schema import (
    ConversationCreate,
    ConversationGet,
    ConversationUpdate,
    CountRequest,
    InputItemsRequest,
    ItemRef,
    ItemsCreate,
    ItemsPage,
    ResponseRef,
    ResponsesRequest,
    RetrieveRequest,
)

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
        summary="Answer a conversation, and keep the answer",
        request=ResponsesRequest,
    )
    yield Endpoint(
        name="responses.input_tokens",
        path="/v1/responses/input_tokens",
        handler=responses.count,
        summary="What a response's prompt will cost",
        request=CountRequest,
    )
    yield Endpoint(
        name="responses.get",
        path=_RESPONSE,
        handler=responses.retrieve,
        method="GET",
        names_events=True,
        summary="A kept response, or its stream again",
        request=RetrieveRequest,
    )
    yield Endpoint(
        name="responses.delete",
        path=_RESPONSE,
        handler=responses.delete,
        method="DELETE",
        summary="Forget a response",
        request=ResponseRef,
    )
    yield Endpoint(
        name="responses.cancel",
        path=f"{_RESPONSE}/cancel",
        handler=responses.cancel,
        summary="Stop a background response",
        request=ResponseRef,
    )
    yield Endpoint(
        name="responses.input_items",
        path=f"{_RESPONSE}/input_items",
        handler=responses.input_items,
        method="GET",
        summary="What a response was asked",
        request=InputItemsRequest,
    )
    yield from _conversations(conversations)


def _conversations(api: ConversationsApi) -> Iterable[Endpoint]:
    items = f"{_CONVERSATION}/items"
    for name, path, method, handler, summary, request in (
        ("", "/v1/conversations", "POST", api.create, "Begin a conversation", ConversationCreate),
        (".get", _CONVERSATION, "GET", api.retrieve, "A conversation", ConversationGet),
        (".update", _CONVERSATION, "POST", api.update, "Change its metadata", ConversationUpdate),
        (".delete", _CONVERSATION, "DELETE", api.delete, "Forget it", ConversationGet),
        (".items", items, "GET", api.list_items, "What was said in it", ItemsPage),
        (".items.create", items, "POST", api.create_items, "Add to it", ItemsCreate),
        (".items.get", f"{items}/{{item_id}}", "GET", api.retrieve_item, "One item", ItemRef),
        (".items.delete", f"{items}/{{item_id}}", "DELETE", api.delete_item, "Drop one", ItemRef),
    ):
        yield Endpoint(
            name=f"conversations{name}",
            path=path,
            handler=handler,
            method=method,
            summary=summary,
            request=request,
        )
