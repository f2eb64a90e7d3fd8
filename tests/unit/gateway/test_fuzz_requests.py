"""Whatever a body holds, checking it ends with a request or with an error that names a field."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from finback.services.gateway.body import parse_object
from finback.services.gateway.chat_schema import ChatRequest
from finback.services.gateway.chat_work import _check as check_chat
from finback.services.gateway.chat_work import conversation_of as chat_conversation
from finback.services.gateway.messages_schema import RULES, MessagesRequest
from finback.services.gateway.messages_work import _check as check_messages
from finback.services.gateway.messages_work import conversation_of as messages_conversation
from finback.services.gateway.validation import check
from finback.shared.errors import InvalidRequest
from support.request_bodies import CHAT, MESSAGES, bodies


def read_chat(body: bytes) -> None:
    request = check(parse_object(body), ChatRequest)
    check_chat(request)
    assert chat_conversation(request).turns


def read_messages(body: bytes) -> None:
    request = check(parse_object(body), MessagesRequest, RULES)
    check_messages(request)
    messages_conversation(request)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(body=bodies(CHAT))
def test_chat_bodies(body: Any) -> None:
    try:
        read_chat(json.dumps(body).encode())
    except InvalidRequest as error:
        assert error.public_message


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(body=bodies(MESSAGES))
def test_messages_bodies(body: Any) -> None:
    try:
        read_messages(json.dumps(body).encode())
    except InvalidRequest as error:
        assert error.public_message


@settings(max_examples=200, deadline=None)
@given(body=st.binary(max_size=200))
def test_bytes(body: bytes) -> None:
    for read in (read_chat, read_messages):
        with pytest.raises(InvalidRequest):
            read(body)


def test_the_unchanged_bodies_are_good() -> None:
    read_chat(json.dumps(CHAT).encode())
    read_messages(json.dumps(MESSAGES).encode())


@pytest.mark.parametrize("kind", ["calls", "results", "texts", "allowed", "schema"])
def test_large_bodies_take_linear_time(kind: str) -> None:
    """Each would take minutes if every item were compared with every other."""
    count = 20_000
    body = json.loads(json.dumps(MESSAGES))
    calls = [
        {"type": "tool_use", "id": f"c{at}", "name": "add", "input": {}} for at in range(count)
    ]
    results = [{"type": "tool_result", "tool_use_id": f"c{at}"} for at in range(count)]
    if kind in ("calls", "results", "texts"):
        split = [{"role": "user", "content": [result]} for result in results]
        texts = [{"role": "user", "content": "x"}] * count
        follow: dict[str, list[Any]] = {"results": split, "texts": [*split, *texts]}
        body["messages"] = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": calls},
            *follow.get(kind, []),
        ]
    elif kind == "schema":
        properties = {f"p{at}": {"type": "string"} for at in range(count)}
        body["tools"][0]["input_schema"]["properties"] = properties
    else:
        chat = json.loads(json.dumps(CHAT))
        chat["tool_choice"]["allowed_tools"]["tools"] *= count
        with pytest.raises(InvalidRequest):
            read_chat(json.dumps(chat).encode())
        return
    if kind == "calls":
        with pytest.raises(InvalidRequest):
            read_messages(json.dumps(body).encode())
        return
    read_messages(json.dumps(body).encode())
