"""Whatever a parser finds, the events follow the rules and the body is what they add up to."""

import json
from typing import Any

import openai
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import ResponseStreamEvent

from finback.services.gateway.admissions import NeverFits
from finback.services.gateway.answer_events import ChoiceEvent, Usage
from finback.services.gateway.responses_object import skeleton
from finback.services.gateway.responses_plan import Context, Plan
from finback.services.gateway.responses_protocol import FRESH, ResponsesProtocol
from finback.services.gateway.responses_schema import ResponsesRequest
from finback.shared.codec.dialogue import Conversation
from finback.shared.codec.output import (
    CallArguments,
    CallBegin,
    CallEnd,
    OutputEvent,
    ReasoningPart,
    TextPart,
)
from finback.shared.errors import InvalidRequest, Overloaded, Unavailable
from support.response_events import Checker, check_stream

SKELETON: dict[str, Any] = {
    "id": "resp_1", "object": "response", "status": "queued", "error": None,
    "incomplete_details": None, "output": [], "usage": None, "completed_at": None,
}  # fmt: skip
USAGE = Usage(num_prompt_tokens=7, num_completion_tokens=5, num_cached_tokens=3)
Script = list[OutputEvent]
TOOLS: list[Any] = [
    {"type": "function", "name": "f", "parameters": {"type": "object"}},
    {"type": "custom", "name": "c"},
]
# The newest client's own types, checked strictly: it builds them without checks itself.
_TYPED: Any = pydantic.TypeAdapter(ResponseStreamEvent)

texts = st.text(min_size=1, max_size=12)


@st.composite
def scripts(draw: st.DrawFn) -> Script:
    """What parsers may say: thoughts, texts and calls in any order, calls numbered from 0."""
    script: Script = []
    num_calls = 0
    for kind in draw(st.lists(st.sampled_from(["text", "think", "call", "custom"]), max_size=8)):
        if kind == "text":
            script.append(TextPart(draw(texts)))
        elif kind == "think":
            script.append(ReasoningPart(draw(texts)))
        else:
            is_custom = kind == "custom"
            name, call_id = draw(texts), f"call_{num_calls}"
            begin = CallBegin(num_calls, call_id, name, "custom" if is_custom else "function")
            script.append(begin)
            script.extend(CallArguments(num_calls, text) for text in draw(st.lists(texts)))
            script.append(CallEnd(num_calls))
            num_calls += 1
    return script


def _events(script: Script, cuts: list[int], reason: str) -> list[ChoiceEvent]:
    """The script dealt out over events of the given sizes; the last one ends the choice."""
    events, rest = [], list(script)
    for cut in cuts:
        events.append(ChoiceEvent(0, "", parts=rest[:cut]))
        rest = rest[cut:]
    return [*events, ChoiceEvent(0, "", finish_reason=reason, parts=rest)]


def _protocol(**more: Any) -> ResponsesProtocol:
    options = {"spelling": None, "with_logprobs": False, "seal": None, **more}
    return ResponsesProtocol(options.pop("skeleton", dict(SKELETON)), **options)


def _streamed(protocol: ResponsesProtocol, events: list[ChoiceEvent]) -> list[dict[str, Any]]:
    documents = protocol.opening()
    for event in events:
        documents.extend(protocol.chunks([event]))
    documents.extend(protocol.last_chunks(USAGE))
    for document in documents:
        assert document.startswith(b'{"type":"')
    return [json.loads(document) for document in documents]


def _plain(response: dict[str, Any]) -> Any:
    """A response without the ids that are drawn at random."""
    items = [{**item, "id": ""} for item in response["output"]]
    return {**response, "output": items, "completed_at": None}


@given(scripts(), st.lists(st.integers(0, 3), max_size=6), st.sampled_from(["stop", "length"]))
def test_streams_follow_the_rules(script: Script, cuts: list[int], reason: str) -> None:
    events = _events(script, cuts, reason)
    final = check_stream(_streamed(_protocol(), events))
    assert final["status"] == ("incomplete" if reason == "length" else "completed")
    whole = _protocol()
    whole.add(events)
    assert _plain(json.loads(json.dumps(whole.body(USAGE)))) == _plain(final)


@settings(max_examples=40, deadline=None)
@given(scripts(), st.sampled_from(["stop", "length"]))
def test_the_official_helper_takes_every_stream(script: Script, reason: str) -> None:
    """It raises on ids that change, items out of order, and content before its item."""
    request = ResponsesRequest(model="m", instructions="x", tools=TOOLS, metadata={"k": "v"})
    plan = Plan(
        request=request,
        response_id="resp_1",
        created_at=1,
        seed=1,
        context=Context(items=(), own_items=()),
        conversation=Conversation(turns=()),
    )
    protocol = _protocol(skeleton=skeleton(plan, "m"))
    state: Any = ResponseStreamState(text_format=openai.omit, input_tools=openai.omit)
    events = _streamed(protocol, _events(script, [], reason))
    told = [_TYPED.validate_python(event) for event in events]
    for event in told:
        state.handle_event(event)
    if reason == "stop":
        final = state._completed_response
        assert [item.id for item in final.output] == [i.id for i in told[-1].response.output]


@given(scripts(), st.sampled_from(["stop", "length"]))
def test_nothing_that_the_parser_found_is_lost(script: Script, reason: str) -> None:
    final = check_stream(_streamed(_protocol(), _events(script, [], reason)))
    told = {"message": "", "reasoning": "", "function_call": "", "custom_tool_call": ""}
    for item in final["output"]:
        text = item.get("arguments", item.get("input"))
        told[item["type"]] += item["content"][0]["text"] if text is None else text
    calls = {part.index: part.kind for part in script if isinstance(part, CallBegin)}
    said = dict.fromkeys(told, "")
    for part in script:
        if isinstance(part, TextPart):
            said["message"] += part.text
        elif isinstance(part, ReasoningPart):
            said["reasoning"] += part.text
        elif isinstance(part, CallArguments):
            is_custom = calls[part.index] == "custom"
            said["custom_tool_call" if is_custom else "function_call"] += part.text
    assert told == said


@given(scripts(), st.integers(0, 20))
def test_a_failure_ends_a_stream_wherever_it_comes(script: Script, at: int) -> None:
    protocol = _protocol()
    documents = protocol.opening()
    documents += protocol.chunks([ChoiceEvent(0, "", parts=script[:at])])
    documents += protocol.failure(Unavailable("no instance"))
    checker = Checker()
    for document in documents:
        checker.take(json.loads(document))
    assert protocol.final is not None and protocol.final["status"] == "failed"
    assert protocol.final["error"] == {"code": "server_error", "message": "no instance"}


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Overloaded("x"), "rate_limit_exceeded"),
        (NeverFits("x"), "rate_limit_exceeded"),
        (InvalidRequest("x"), "invalid_prompt"),
    ],
)
def test_errors_in_the_words_of_the_api(error: Any, code: str) -> None:
    protocol = _protocol()
    protocol.failure(error)
    assert protocol.final is not None and protocol.final["error"]["code"] == code


def test_an_empty_answer_is_an_empty_message() -> None:
    final = check_stream(_streamed(_protocol(), _events([], [], "stop")))
    (item,) = final["output"]
    assert (item["type"], item["content"][0]["text"]) == ("message", "")


def test_what_is_cut_is_incomplete() -> None:
    begin = CallBegin(0, "call_0", "f")
    half: Script = [begin, CallArguments(0, '{"a": '), CallEnd(0, is_complete=False)]
    final = check_stream(_streamed(_protocol(), _events(half, [], "length")))
    assert final["output"][0]["status"] == "incomplete"
    assert final["incomplete_details"] == {"reason": "max_output_tokens"}
    whole: Script = [begin, CallArguments(0, '{"a": 1}'), CallEnd(0)]
    final = check_stream(_streamed(_protocol(), _events(whole, [], "length")))
    assert final["output"][0]["status"] == "completed"


@pytest.mark.parametrize("kind", ["function", "custom"])
def test_a_call_that_is_not_whole_is_so_in_the_stream_and_in_the_body(kind: Any) -> None:
    half: Script = [
        CallBegin(0, "call_0", "c", kind),
        CallArguments(0, '{"a"'),
        CallEnd(0, is_complete=False),
    ]
    documents = _streamed(_protocol(), _events(half, [], "length"))
    final = check_stream(documents)
    (done,) = [d for d in documents if d["type"] == "response.output_item.done"]
    assert done["item"] == final["output"][0]
    assert final["output"][0]["status"] == "incomplete"


def test_a_queued_stream_goes_on_where_its_queueing_ended() -> None:
    protocol = _protocol(opening=FRESH[1:], first_number=2)
    documents = _streamed(protocol, _events([TextPart("x")], [], "stop"))
    assert [event["sequence_number"] for event in documents] == list(range(2, 2 + len(documents)))
    assert documents[0]["type"] == "response.in_progress"


def test_thoughts_are_sealed_when_asked_for() -> None:
    protocol = _protocol(seal=lambda text: f"sealed {text}")
    script: Script = [ReasoningPart("hm"), TextPart("yes")]
    final = check_stream(_streamed(protocol, _events(script, [], "stop")))
    thought, message = final["output"]
    assert thought["encrypted_content"] == "sealed hm"
    assert "encrypted_content" not in message


def test_the_last_document_can_be_written_again() -> None:
    protocol = _protocol()
    protocol.opening()
    (last,) = protocol.last_chunks(USAGE)
    assert protocol.final is not None
    protocol.final["store"] = False
    (again,) = protocol.rewritten()
    assert json.loads(again) == {**json.loads(last), "response": protocol.final}
