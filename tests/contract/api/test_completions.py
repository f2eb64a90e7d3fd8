"""Text Completions through the official client."""

from typing import Any

import openai
import pytest

MODEL = "SmolLM2-135M-Instruct"


def test_text(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="one two three", max_tokens=50)
    assert answer.choices[0].text == "one two three"
    assert answer.object == "text_completion"
    assert answer.choices[0].finish_reason == "stop"


def test_default_length_is_sixteen(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="a " * 40)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16
    assert answer.choices[0].finish_reason == "length"


def test_several_prompts_and_choices(client: openai.OpenAI) -> None:
    prompts = ["one two", "three four five"]
    answer = client.completions.create(model=MODEL, prompt=prompts, n=2, echo=True)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == [
        "one twoone two", "one twoone two",
        "three four fivethree four five", "three four fivethree four five",
    ]  # fmt: skip
    chunks = list(client.completions.create(model=MODEL, prompt=prompts, stream=True, echo=True))
    for index, prompt in enumerate(prompts):
        own = [c.choices[0] for c in chunks if c.choices[0].index == index]
        assert "".join(choice.text for choice in own) == prompt * 2
        assert [choice.finish_reason for choice in own if choice.finish_reason] == ["stop"]


@pytest.mark.parametrize("prompt", [[19556, 905], [[19556], [905]]])
def test_token_prompts(client: openai.OpenAI, prompt: Any) -> None:
    answer = client.completions.create(model=MODEL, prompt=prompt)
    assert "".join(choice.text for choice in answer.choices) == "Hello world"


def test_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="one two three", logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["one", " two", " three"]
    assert logprobs.text_offset == [0, 3, 7]
    assert logprobs.token_logprobs == [-0.25] * 3
    assert logprobs.top_logprobs is not None
    assert all(len(top) == 2 for top in logprobs.top_logprobs)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"prompt": [49152]}, "prompt.0"),
        ({"prompt": ""}, None),
        ({"prompt": ["a", ""]}, None),
        ({"n": 100, "prompt": ["a", "b"]}, "n"),
        ({"best_of": 3}, "best_of"),
    ],
)
def test_refused(client: openai.OpenAI, fields: dict[str, Any], param: str | None) -> None:
    body = {"model": MODEL, "prompt": "x", **fields}
    if param is None:  # an empty prompt is the beginning-of-text token
        client.completions.create(**body)
        return
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**body)
    assert caught.value.param == param


@pytest.mark.parametrize("is_stream", [False, True])
def test_token_ids_are_every_token_of_the_answer(client: openai.OpenAI, is_stream: bool) -> None:
    """Also those without text of their own; they are what the usage counts."""
    extra = {"return_token_ids": True, "ignore_eos": True}
    asked: Any = {"model": MODEL, "prompt": "one two three", "max_tokens": 12, "extra_body": extra}
    create: Any = client.completions.create
    if is_stream:
        chunks = list(create(**asked, stream=True, stream_options={"include_usage": True}))
        choices = [choice.to_dict() for chunk in chunks for choice in chunk.choices]
        ids = [token for choice in choices for token in choice.get("token_ids", ())]
        usage = chunks[-1].usage
    else:
        answer = create(**asked)
        ids = answer.choices[0].to_dict()["token_ids"]
        usage = answer.usage
    assert len(ids) == usage.completion_tokens == 12
    plain = client.completions.create(model=MODEL, prompt="one two three", max_tokens=12)
    assert "token_ids" not in plain.choices[0].to_dict()


def test_token_ids_and_stop_strings_exclude_each_other(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="return_token_ids and stop"):
        client.completions.create(
            model=MODEL, prompt="one", stop="two", extra_body={"return_token_ids": True}
        )
