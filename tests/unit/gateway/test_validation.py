"""Every fault is a 400 that names its field; nothing is silently ignored."""

from typing import Any

import pytest

from finback.services.gateway.chat_schema import ChatRequest
from finback.services.gateway.sampling import choice_seed
from finback.services.gateway.schema import CompletionRequest
from finback.services.gateway.validation import check
from finback.shared.errors import InvalidRequest

USER = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> ChatRequest:
    return check({"model": "m", "messages": USER, **fields}, ChatRequest)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": 5}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": "x"}, "messages"),
        ({"messages": [5]}, "messages.0"),
        ({"messages": [{"content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]},
         "messages.0.content.0.type"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages.0.tool_calls.0.id"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**40}, "max_tokens"),
        ({"max_tokens": "7"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_completion_tokens": True}, "max_completion_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_p": float("inf")}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"seed": -(2**63) - 1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop.1"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"stream_options": {"x": 1}}, "stream_options.x"),
        ({"stream": "yes"}, "stream"),
        ({"stop_token_ids": [-1]}, "stop_token_ids.0"),
        ({"tools": [{}]}, "tools.0.type"),
        ({"tools": [{"type": "function", "function": {"name": "n"}}] * 129}, "tools"),
        ({"tools": {}}, "tools"),
        ({"tool_choice": 5}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"service_tier": "gold"}, "service_tier"),
        ({"metadata": "x"}, "metadata"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"no_such_field": 1}, "no_such_field"),
    ],
)  # fmt: skip
def test_faults_are_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields)
    assert caught.value.param == param
    assert caught.value.http_status == 400


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [], "tool_choice": "none", "parallel_tool_calls": True, "functions": None},
        {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"},
        {"prompt_cache_key": "k", "safety_identifier": "s", "reasoning_effort": None},
        {"max_tokens": None, "stop": None, "n": None, "no_such_field": None},
        {"top_p": 0, "seed": -(2**63)},
        {"temperature": 0, "top_p": 1, "seed": 2**63 - 1, "stop": ["a"] * 16},
        {"top_k": -1, "min_p": 0.5, "repetition_penalty": 1.1, "ignore_eos": True},
        {"messages": [{"role": "assistant", "content": None, "refusal": None, "audio": None,
                       "annotations": [], "tool_calls": None, "function_call": None}]},
        {"reasoning_effort": "minimal", "thinking": {"type": "adaptive"}},
    ],
)  # fmt: skip
def test_accepted(fields: dict[str, Any]) -> None:
    chat(**fields)


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("text", None),
        (["a", "b"], None),
        ([1, 2], None),
        ([[1], [2, 3]], None),
        (None, "prompt"),
        ([], "prompt"),
        ([[]], "prompt.0"),
        (5, "prompt"),
        ({}, "prompt"),
        ([-1], "prompt.0"),
        ([1, "a"], "prompt.1"),
        (["a", 1], "prompt.1"),
        ([1] * 1_000_000 + ["a"], "prompt.0"),
        (["a"] * 200, "prompt"),
    ],
)
def test_prompts(prompt: Any, param: str | None) -> None:
    body = {"model": "m", "prompt": prompt}
    if param is None:
        assert check(body, CompletionRequest).prompt == prompt
        return
    with pytest.raises(InvalidRequest) as caught:
        check(body, CompletionRequest)
    assert (caught.value.param or "").split(".")[0] == param.split(".")[0]


def test_suffix_is_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        check({"model": "m", "prompt": "a", "suffix": "b"}, CompletionRequest)
    assert caught.value.param == "suffix"


def test_choices_have_seeds_of_their_own() -> None:
    seeds = [choice_seed(seed, index) for seed in (0, 1, 2**63 - 1) for index in range(50)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert choice_seed(42, 0) == 42
