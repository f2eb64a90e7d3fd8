"""Chat Completions through the official client, over real HTTP."""

from typing import Any

import openai
import pytest

MODEL = "SmolLM2-135M-Instruct"
TEXT = "Grüße 👍🏽 an alle: one two three"


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    """Untyped on purpose: requests here are not only those that the client's types know."""
    create: Any = client.chat.completions.create
    return create(**fields)


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


def test_whole(client: openai.OpenAI) -> None:
    answer = chat(client, model=MODEL, messages=user(TEXT))
    choice = answer.choices[0]
    assert choice.message.content == TEXT
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.system_fingerprint
    usage = answer.usage
    assert usage is not None
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 0


def test_streamed_equals_whole(client: openai.OpenAI) -> None:
    stream = chat(
        client,
        model=MODEL,
        messages=user(TEXT),
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert len({(c.id, c.created, c.model, c.object) for c in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    texts = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(texts) == TEXT
    assert all("\ufffd" not in text for text in texts)
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert reasons[-1] == "stop"
    assert set(reasons[:-1]) == {None}
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert all(c.usage is None for c in chunks[:-1])


def test_stream_without_usage(client: openai.OpenAI) -> None:
    chunks = list(chat(client, model="gpt-4o", messages=user("a b"), stream=True))
    assert all(c.choices for c in chunks)
    assert all("usage" not in c.model_fields_set for c in chunks)


def test_several_choices(client: openai.OpenAI) -> None:
    answer = chat(client, model=MODEL, messages=user("x y"), n=3, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage is not None
    alone = chat(client, model=MODEL, messages=user("x y"))
    assert alone.usage is not None
    assert answer.usage.completion_tokens == 3 * alone.usage.completion_tokens
    assert answer.usage.prompt_tokens == alone.usage.prompt_tokens
    chunks = list(chat(client, model=MODEL, messages=user("x y"), n=2, stream=True))
    for index in range(2):
        own = [c.choices[0] for c in chunks if c.choices[0].index == index]
        assert "".join(choice.delta.content or "" for choice in own) == "x y"
        assert own[0].delta.role == "assistant"
        assert [choice.finish_reason for choice in own if choice.finish_reason] == ["stop"]


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(client: openai.OpenAI, stream: bool) -> None:
    got = chat(
        client, model=MODEL, messages=user("one two three four"), stop=["ee f", "zz"], stream=stream
    )
    if stream:
        chunks = list(got)
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == "one two thr"
        assert chunks[-1].choices[0].finish_reason == "stop"
    else:
        assert got.choices[0].message.content == "one two thr"
        assert got.choices[0].finish_reason == "stop"
        assert got.choices[0].stop_reason == "ee f"
        assert got.usage.completion_tokens == 4


def test_logprobs(client: openai.OpenAI) -> None:
    answer = chat(client, model=MODEL, messages=user(TEXT), logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in content).decode() == TEXT
    assert all(len(entry.top_logprobs) == 3 and entry.logprob <= 0 for entry in content)
    assert any(entry.token.startswith("bytes:\\x") for entry in content)
    chunks = chat(client, model=MODEL, messages=user(TEXT), logprobs=True, stream=True)
    streamed = [
        entry
        for c in chunks
        if c.choices[0].logprobs
        for entry in c.choices[0].logprobs.content or []
    ]
    assert [entry.bytes for entry in streamed] == [entry.bytes for entry in content]
    assert all(entry.top_logprobs == [] for entry in streamed)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_length(client: openai.OpenAI, name: str) -> None:
    answer = chat(client, model=MODEL, messages=user("one two three"), **{name: 2})
    assert answer.choices[0].message.content == "one two"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 2


def test_extensions(client: openai.OpenAI) -> None:
    answer = chat(client, model=MODEL,
        messages=user("one two"),
        max_tokens=5,
        temperature=0,
        logit_bias={"5": -100},
        extra_body={"ignore_eos": True, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1,
                    "min_tokens": 2, "stop_token_ids": [9]},
    )  # fmt: skip
    assert answer.usage.completion_tokens == 5


def test_edges_of_ranges(client: openai.OpenAI) -> None:
    answer = chat(client, model=MODEL, messages=user("x"), top_p=0, seed=-(2**63), temperature=2)
    assert answer.choices[0].message.content == "x"


def test_long_answers_need_credit(client: openai.OpenAI) -> None:
    answer = chat(
        client,
        model=MODEL,
        messages=user("one two"),
        max_tokens=3000,
        extra_body={"ignore_eos": True},
    )
    assert answer.usage.completion_tokens == 3000
    assert answer.choices[0].message.content == "one two" * 1500


def test_the_last_message_may_be_the_assistants(client: openai.OpenAI) -> None:
    messages = [*user("x"), {"role": "assistant", "content": "Hel"}]
    answer = chat(client, model=MODEL, messages=messages)
    assert answer.choices[0].finish_reason == "stop"


def test_echoed_answer_is_accepted_back(client: openai.OpenAI) -> None:
    first = chat(client, model=MODEL, messages=user("x y"))
    messages = [*user("x y"), first.choices[0].message.model_dump(), *user("z")]
    second = chat(client, model=MODEL, messages=messages)
    assert second.choices[0].message.content == "z"


def test_stream_helper_of_the_client(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=user("x y")) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.content == "x y"


def test_models(client: openai.OpenAI) -> None:
    names = [model.id for model in client.models.list()]
    assert names[0] == MODEL
    assert "gpt-4o" in names
    assert client.models.retrieve("gpt-4o").id == "gpt-4o"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("no/such")
    assert caught.value.code == "model_not_found"
