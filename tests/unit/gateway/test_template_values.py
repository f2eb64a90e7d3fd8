"""Values for the chat template: names that the service sets itself are refused by path."""

from typing import Any

import pytest

from finback.services.gateway.chat_schema import ChatRequest
from finback.services.gateway.chat_work import conversation_of as chat_conversation
from finback.services.gateway.responses_conversation import conversation_of
from finback.services.gateway.responses_items import items_of
from finback.services.gateway.responses_schema import ResponsesRequest
from finback.services.gateway.validation import check
from finback.shared.codec.dialogue import Conversation
from finback.shared.errors import InvalidRequest


def _chat(values: dict[str, Any]) -> Conversation:
    messages = [{"role": "user", "content": "x"}]
    body = {"model": "m", "messages": messages, "chat_template_kwargs": values}
    return chat_conversation(check(body, ChatRequest))


def _response(values: dict[str, Any]) -> Conversation:
    request = check({"model": "m", "chat_template_kwargs": values}, ResponsesRequest)
    return conversation_of(request, items_of("x"), str)


@pytest.mark.parametrize("make", [_chat, _response])
@pytest.mark.parametrize(
    "name",
    ["messages", "tools", "documents", "add_generation_prompt", "chat_template", "bos_token"],
)
def test_reserved_names_are_refused(make: Any, name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        make({"enable_thinking": True, name: []})
    assert caught.value.param == f"chat_template_kwargs.{name}"


@pytest.mark.parametrize("make", [_chat, _response])
def test_others_reach_the_template(make: Any) -> None:
    conversation = make({"enable_thinking": False, "note": None, "tools": None})
    assert conversation.variables == {"enable_thinking": False, "note": None}
