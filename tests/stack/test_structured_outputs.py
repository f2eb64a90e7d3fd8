"""`structured_outputs` of every kind through every API of a whole stack: official clients, and NATS.

The model babbles, so that what order there is in an answer comes from its grammar.
"""

import asyncio
import json
import re
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import anthropic
import httpx
import nats
import openai
import pytest
from nats.aio.msg import Msg

from support.babbler import NAME, OPENS, babbler_folder
from support.gateway_stack import ROOT
from support.nats_server import NatsServer
from support.stack import Stack
from support.structured import CHECKS, KINDS, TAG, islands

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

ASKED = [{"role": "user", "content": "?"}]
MAX_TOKENS = 250
# Not all of it can be enforced.
WIDE = {
    "type": "object",
    "properties": {"tags": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}},
    "required": ["tags"],
    "additionalProperties": False,
}
AT = "#/properties/tags/uniqueItems"
HEADER = "Finback-Grammar-Widened"


class Said(NamedTuple):
    """An answer: content, reasoning, and whether it came to its own end."""

    text: str
    thought: str
    is_whole: bool


@pytest.fixture(scope="module")
def babbler(
    nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Stack, str]]:
    """A stack on an outside NATS server, and the server's address."""
    folder = tmp_path_factory.mktemp("babbler")
    stack = Stack(folder / "run")
    outside = ("--set", f"nats_url={nats_server.url}", "--set", "subject_prefix=babble")
    stack.up("--model", str(babbler_folder(folder)), "--cohost", *outside)
    yield stack, nats_server.url
    stack.down()


@pytest.fixture(scope="module")
def gpt(babbler: tuple[Stack, str]) -> Iterator[openai.OpenAI]:
    url = f"{babbler[0].http}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as made:
        yield made


@pytest.fixture(scope="module")
def claude(babbler: tuple[Stack, str]) -> Iterator[anthropic.Anthropic]:
    url = babbler[0].http
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=120) as made:
        yield made


def structured(kind: str, **more: Any) -> dict[str, Any]:
    return {"structured_outputs": {kind: KINDS[kind], **more}}


def by_chat(api: Any, body: dict[str, Any], is_stream: bool, **fields: Any) -> Said:
    asked = {"model": NAME, "messages": ASKED, "max_completion_tokens": MAX_TOKENS, **fields}
    create: Any = api.chat.completions.create
    if not is_stream:
        choice = create(**asked, extra_body=body).choices[0]
        thought = getattr(choice.message, "reasoning_content", None) or ""
        return Said(choice.message.content or "", thought, choice.finish_reason == "stop")
    text, thought, finish = "", "", None
    for chunk in create(**asked, extra_body=body, stream=True):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            thought += getattr(choice.delta, "reasoning_content", None) or ""
            finish = choice.finish_reason or finish
    return Said(text, thought, finish == "stop")


def by_completion(api: Any, body: dict[str, Any], is_stream: bool) -> Said:
    asked = {"model": NAME, "prompt": "?", "max_tokens": MAX_TOKENS, "extra_body": body}
    create: Any = api.completions.create
    if not is_stream:
        choice = create(**asked).choices[0]
        return Said(choice.text, "", choice.finish_reason == "stop")
    chunks = list(create(**asked, stream=True))
    text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
    ends = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    return Said(text, "", "stop" in ends)


def by_responses(api: Any, body: dict[str, Any], is_stream: bool, **fields: Any) -> Said:
    asked = {"model": NAME, "input": "?", "max_output_tokens": MAX_TOKENS, **fields}
    made: Any
    if is_stream:
        with api.responses.create(**asked, extra_body=body, stream=True) as events:
            seen = list(events)
        made = seen[-1].response
        deltas = [e.delta for e in seen if e.type == "response.output_text.delta"]
        assert "".join(deltas) == made.output_text
    else:
        made = api.responses.create(**asked, extra_body=body)
    thoughts = [
        part.text for item in made.output if item.type == "reasoning" for part in item.content or []
    ]
    return Said(made.output_text, "".join(thoughts), made.status == "completed")


def by_messages(api: Any, body: dict[str, Any], is_stream: bool, **fields: Any) -> Said:
    asked = {"model": NAME, "messages": ASKED, "max_tokens": MAX_TOKENS, **fields}
    made: Any
    if is_stream:
        with api.messages.stream(**asked, extra_body=body) as events:
            made = events.get_final_message()
    else:
        made = api.messages.create(**asked, extra_body=body)
    texts = [block.text for block in made.content if block.type == "text"]
    thoughts = [block.thinking for block in made.content if block.type == "thinking"]
    return Said("".join(texts), "".join(thoughts), made.stop_reason == "end_turn")


def checked(kind: str, answers: list[Said]) -> list[str]:
    """Every answer is right, or was cut; the whole ones."""
    whole = [answer.text for answer in answers if answer.is_whole]
    for text in whole:
        CHECKS[kind](text)
    assert whole or kind == "json_object"  # which may go on for long
    return whole


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_on_every_api(
    gpt: openai.OpenAI, claude: anthropic.Anthropic, kind: str, is_stream: bool
) -> None:
    body = structured(kind)
    answers = [
        by_chat(gpt, body, is_stream, reasoning_effort="none"),
        by_completion(gpt, body, is_stream),
        by_responses(gpt, body, is_stream, reasoning={"effort": "none"}),
        by_messages(claude, body, is_stream),
    ]
    assert not any(answer.thought for answer in answers)
    checked(kind, answers)


@pytest.mark.parametrize("kind", KINDS)
def test_thinking_is_free_and_the_answer_is_not(
    gpt: openai.OpenAI, claude: anthropic.Anthropic, kind: str
) -> None:
    body, is_stream = structured(kind), kind in ("regex", "structural_tag")
    budget = {"type": "enabled", "budget_tokens": 1024}
    answers = [
        by_chat(gpt, body, is_stream, reasoning_effort="high"),
        by_responses(gpt, body, is_stream, reasoning={"effort": "high"}),
        by_messages(claude, body, is_stream, thinking=budget, max_tokens=1200),
    ]
    thought = "".join(answer.thought for answer in answers)
    assert thought
    checked(kind, answers)
    if kind == "choice":
        # Nothing but the choice could have been said, had thoughts been kept to it.
        assert any(answer.is_whole and answer.thought for answer in answers)


def test_islands_come_where_they_may(gpt: openai.OpenAI) -> None:
    bias = {"logit_bias": {str(OPENS): 1}}
    body = {**structured("structural_tag"), **bias}
    answers = [by_chat(gpt, body, True, reasoning_effort="none") for _ in range(4)]
    texts = checked("structural_tag", answers)
    assert any(islands(text) for text in texts)
    assert any(text.split("<f=")[0] for text in texts)


async def over_nats(url: str, endpoint: str, body: dict[str, Any]) -> list[Msg]:
    """The messages of an answer; one if it is not streamed."""
    connection = await nats.connect(url)
    got: list[Msg] = []
    is_over = asyncio.Event()

    async def take(message: Msg) -> None:
        got.append(message)
        if not body.get("stream") or (message.headers or {}).get("Finback-Final"):
            is_over.set()

    try:
        inbox = connection.new_inbox()
        await connection.subscribe(inbox, cb=take)
        await connection.publish(
            f"babble.v1.api.{endpoint}", json.dumps({"model": NAME, **body}).encode(), reply=inbox
        )
        async with asyncio.timeout(120):
            await is_over.wait()
    finally:
        await connection.close()
    return got


def _texts(endpoint: str, documents: list[Any]) -> str:
    """The content of streamed documents."""
    if endpoint == "responses":
        return "".join(d["delta"] for d in documents if d["type"] == "response.output_text.delta")
    if endpoint == "messages":
        deltas = [d["delta"] for d in documents if d["type"] == "content_block_delta"]
        return "".join(d.get("text", "") for d in deltas)
    choices = [choice for d in documents for choice in d["choices"]]
    if endpoint == "completions":
        return "".join(choice["text"] for choice in choices)
    return "".join(choice["delta"].get("content") or "" for choice in choices)


ENDPOINTS: dict[str, dict[str, Any]] = {
    "chat.completions": {"messages": ASKED, "max_tokens": 60, "reasoning_effort": "none"},
    "completions": {"prompt": "?", "max_tokens": 60},
    "responses": {"input": "?", "max_output_tokens": 60, "reasoning": {"effort": "none"}},
    "messages": {"messages": ASKED, "max_tokens": 60},
}


@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_over_nats(babbler: tuple[Stack, str], endpoint: str) -> None:
    for kind in ("regex", "choice", "grammar"):
        body = {**ENDPOINTS[endpoint], **structured(kind), "stream": True}
        got = await over_nats(babbler[1], endpoint, body)
        text = _texts(endpoint, [json.loads(message.data) for message in got if message.data])
        CHECKS[kind](text)
    lenient = {"structured_outputs": {"json": WIDE, "strictness": "lenient"}}
    for is_stream in (False, True):
        body = {**ENDPOINTS[endpoint], **lenient, "stream": is_stream}
        first = (await over_nats(babbler[1], endpoint, body))[0]
        assert (first.headers or {})[HEADER] == AT
    strict = {**ENDPOINTS[endpoint], "structured_outputs": {"json": WIDE}}
    refused = json.loads((await over_nats(babbler[1], endpoint, strict))[0].data)["error"]
    assert AT in refused["message"]


PATHS: dict[str, dict[str, Any]] = {
    "chat/completions": ENDPOINTS["chat.completions"],
    "completions": ENDPOINTS["completions"],
    "responses": ENDPOINTS["responses"],
    "messages": ENDPOINTS["messages"],
}


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", PATHS)
def test_what_is_let_go_is_told(babbler: tuple[Stack, str], path: str, is_stream: bool) -> None:
    url = f"{babbler[0].http}/v1/{path}"
    body = {"model": NAME, **PATHS[path], "stream": is_stream}
    lenient = {"structured_outputs": {"json": WIDE, "strictness": "lenient"}}
    reply = httpx.post(url, json={**body, **lenient}, timeout=120)
    assert reply.status_code == 200
    assert reply.headers[HEADER] == AT
    key = {"Idempotency-Key": f"once {path} {is_stream}"}
    twice = [httpx.post(url, json={**body, **lenient}, headers=key, timeout=120) for _ in range(2)]
    assert [again.headers[HEADER] for again in twice] == [AT, AT]
    assert twice[0].content == twice[1].content
    exact = httpx.post(url, json={**body, **structured("json")}, timeout=120)
    assert HEADER not in exact.headers


def test_formats_that_are_not_strict_are_told_too(babbler: tuple[Stack, str]) -> None:
    url, named = f"{babbler[0].http}/v1", {"name": "n", "schema": WIDE, "strict": False}
    formats: dict[str, dict[str, Any]] = {
        "chat/completions": {"response_format": {"type": "json_schema", "json_schema": named}},
        "responses": {"text": {"format": {"type": "json_schema", **named}}},
    }
    for path, fields in formats.items():
        reply = httpx.post(
            f"{url}/{path}", json={"model": NAME, **PATHS[path], **fields}, timeout=60
        )
        assert reply.headers[HEADER] == AT, reply.text
    tool = {"name": "f", "parameters": WIDE}
    calls = {"tools": [{"type": "function", "function": tool}], "tool_choice": "required"}
    body = {"model": NAME, **PATHS["chat/completions"], **calls}
    reply = httpx.post(f"{url}/chat/completions", json=body, timeout=120)
    assert reply.headers[HEADER] == f"tools.0.function.parameters{AT}"


@pytest.mark.parametrize("kind", ["json", "structural_tag"])
def test_in_the_background_it_is_read_again(gpt: openai.OpenAI, kind: str) -> None:
    asked = {"model": NAME, **PATHS["responses"], "max_output_tokens": MAX_TOKENS}
    create: Any = gpt.responses.create
    made = create(**asked, extra_body=structured(kind, strictness="strict"), background=True)
    deadline = time.monotonic() + 120
    while (found := gpt.responses.retrieve(made.id)).status in ("queued", "in_progress"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert found.status in ("completed", "incomplete"), found
    if found.status == "completed":
        CHECKS[kind](found.output_text)


@pytest.mark.parametrize(
    ("given", "param", "told"),
    [
        ({"json": WIDE}, "json", AT),
        ({"json": {"properties": {"a": {"type": "nonsense"}}}}, "json", "#/properties/a/type"),
        ({"regex": "[a-z"}, "regex", "position 0"),
        ({"regex": "x(?=y)"}, "regex", "position 1"),
        ({"regex": r"ab[z-a]"}, "regex", "position 3"),
        ({"grammar": "start: a\na: other"}, "grammar", "line 2, column 4"),
        ({"choice": []}, "choice", "at least 1"),
        ({"structural_tag": {**TAG, "triggers": ["<g="]}}, "structural_tag.structures.0.begin",
         "triggers"),
        ({"structural_tag": {**TAG, "structures": [{**TAG["structures"][0], "schema": WIDE}],
                             "triggers": ["<f="]}},
         "structural_tag", "#/structures/0/schema/properties/tags/uniqueItems"),
        ({"regex": "a", "choice": ["b"]}, "", "regex and choice"),
    ],
)  # fmt: skip
def test_refusals_in_each_protocol(
    gpt: openai.OpenAI, claude: anthropic.Anthropic, given: Any, param: str, told: str
) -> None:
    field = f"structured_outputs.{param}".rstrip(".")
    body = {"structured_outputs": given}
    for ask in (by_chat, by_completion, by_responses):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(gpt, body, True)
        assert caught.value.param == field
        assert told in str(caught.value)
    with pytest.raises(anthropic.BadRequestError) as refused:
        by_messages(claude, body, False)
    error = refused.value.body["error"]  # type: ignore[index]  # the body is an object
    assert error["type"] == "invalid_request_error"
    assert field in error["message"] and told in error["message"]


def test_structural_tags_as_a_tree(gpt: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    number = {"type": "regex", "pattern": "[0-9]{1,3}"}
    places = {"type": "tag", "begin": "<f=foo>", "end": "</f>",
              "content": {"type": "json_schema", "json_schema": KINDS["json"]}}  # fmt: skip
    tree = {
        "type": "sequence",
        "elements": [
            {"type": "const_string", "value": "About "},
            {"type": "any_text"},
            {"type": "const_string", "value": "</f>"},
            {"type": "tag", "begin": "[", "content": number, "end": [")", "]"]},
            {"type": "tags_with_separator", "tags": [places], "separator": "\n"},
        ],
    }
    tag = {"type": "structural_tag", "format": tree}
    answers = [
        by_chat(
            gpt, {"structured_outputs": {"structural_tag": tag}}, True, reasoning_effort="none"
        ),
        by_chat(gpt, {"response_format": tag}, False, reasoning_effort="high"),
        by_responses(gpt, {"structured_outputs": {"structural_tag": tag}}, True),
        by_messages(claude, {"structured_outputs": {"structural_tag": tag}}, False),
    ]
    whole = [answer.text for answer in answers if answer.is_whole]
    assert whole
    for text in whole:
        found = re.fullmatch(r"About (.*?)</f>\[[0-9]{1,3}[)\]](.*)", text, re.DOTALL)
        assert found, text
        assert (
            islands(found[2], {"structures": TAG["structures"][:1], "triggers": ["<f="]})
            or not found[2]
        )
    wrong = {"structural_tag": {"format": {**tree, "elements": [{"type": "dispatch"}]}}}
    with pytest.raises(openai.BadRequestError) as caught:
        by_chat(gpt, {"structured_outputs": wrong}, False)
    assert caught.value.param == "structured_outputs.structural_tag.format.elements.0.type"


def test_tools_beside_it(gpt: openai.OpenAI) -> None:
    tool = {"type": "function", "function": {"name": "now", "strict": True}}
    create: Any = gpt.chat.completions.create
    fields = {"model": NAME, "messages": ASKED, "tools": [tool], "reasoning_effort": "none"}
    finishes = set()
    for seed in range(30):
        choice = create(
            **fields, seed=seed, max_tokens=120, extra_body=structured("choice")
        ).choices[0]
        finishes.add(choice.finish_reason)
        if choice.finish_reason == "stop":
            CHECKS["choice"](choice.message.content)
        elif choice.finish_reason == "tool_calls":
            assert [call.function.name for call in choice.message.tool_calls][:1] == ["now"]
        if finishes >= {"stop", "tool_calls"}:
            break
    assert finishes >= {"stop", "tool_calls"}
    with pytest.raises(openai.BadRequestError, match="'tools'") as caught:
        create(**fields, extra_body=structured("structural_tag"))
    assert caught.value.param == "structured_outputs.structural_tag"
    free = create(**fields, tool_choice="none", extra_body=structured("structural_tag")).choices[0]
    assert free.finish_reason in ("stop", "length")
    again = {"response_format": TAG}
    assert by_chat(gpt, again, True, reasoning_effort="none").text is not None


def test_the_examples_of_the_documentation(babbler: tuple[Stack, str]) -> None:
    text = (ROOT / "docs" / "structured-output.md").read_text()
    found = re.findall(
        r"curl http://127\.0\.0\.1:8000(/v1/\S+) [^\n]*-d '(.*?)'\n", text, re.DOTALL
    )
    told = {kind for _, body in found for kind in json.loads(body)["structured_outputs"]}
    assert told == set(KINDS)
    for path, body in found:
        reply = httpx.post(f"{babbler[0].http}{path}", json=json.loads(body), timeout=120)
        assert reply.status_code == 200, (body, reply.text)


def test_counting_refuses_the_same(gpt: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    good: dict[str, Any] = structured("regex")
    bad: dict[str, Any] = {"structured_outputs": {"choice": []}}
    count: Any = claude.messages.count_tokens
    tokens = count(model=NAME, messages=ASKED, extra_body=good).input_tokens
    assert tokens == count(model=NAME, messages=ASKED).input_tokens
    with pytest.raises(anthropic.BadRequestError, match=r"structured_outputs\.choice"):
        count(model=NAME, messages=ASKED, extra_body=bad)
    other: Any = gpt.responses.input_tokens.count
    assert other(model=NAME, input="?", extra_body=good).input_tokens
    with pytest.raises(openai.BadRequestError, match=r"structured_outputs\.choice"):
        other(model=NAME, input="?", extra_body=bad)


def test_what_is_let_go_is_in_the_trace(babbler: tuple[Stack, str]) -> None:
    trace_id = "7" * 32
    lenient = {"structured_outputs": {"json": WIDE, "strictness": "lenient"}}
    httpx.post(
        f"{babbler[0].http}/v1/chat/completions",
        json={"model": NAME, **PATHS["chat/completions"], **lenient},
        headers={"traceparent": f"00-{trace_id}-00f067aa0ba902b7-01"},
        timeout=120,
    )
    deadline = time.monotonic() + 60
    while AT not in (shown := babbler[0].command("trace", trace_id, "--json")).stdout:
        if time.monotonic() > deadline:
            break
        time.sleep(0.3)  # spans are written by and by
    assert AT in shown.stdout, shown.stdout + shown.stderr


def test_the_openapi_document_tells_the_field_and_the_header(babbler: tuple[Stack, str]) -> None:
    told = httpx.get(f"{babbler[0].http}/openapi.json").json()
    schema = told["components"]["schemas"]["StructuredOutputs"]["properties"]
    assert set(KINDS) | {"strictness"} == set(schema)
    for path in PATHS:
        operation = told["paths"][f"/v1/{path}"]["post"]
        assert HEADER in operation["responses"]["200"]["headers"]
        name = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        fields = told["components"]["schemas"][name.rsplit("/", 1)[1]]["properties"]
        assert "structured_outputs" in fields
