"""Kill -9 of every service while an answer streams."""

import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from support.stack import Answer, Stack

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

LONG = {"max_tokens": 96, "ignore_eos": True}


@pytest.mark.parametrize("service", ["router", "cache", "drafter", "sampler", "prefill"])
def test_a_stream_survives_what_it_does_not_need(stack: Stack, service: str) -> None:
    answer, lost = Answer(), ""
    for number, chunk in enumerate(stack.stream("Count upwards.", **LONG)):
        answer.add(chunk)
        if number == 5:
            lost = stack.kill(service)
    assert lost
    assert answer.completion_tokens == LONG["max_tokens"]
    assert answer.finish_reason == "length"
    if service != "prefill":  # a new request is answered without it, or waits for it
        assert stack.ask("And now?", max_tokens=4).completion_tokens > 0
    stack.wait_restored(service, lost)
    assert stack.ask("And now?", max_tokens=4).completion_tokens > 0


def test_a_constrained_stream_waits_for_the_sampler(stack: Stack) -> None:
    regex = r"(one two three ){12}"
    answer, lost = Answer(), ""
    for number, chunk in enumerate(
        stack.stream("Count.", max_tokens=100, structured_outputs={"regex": regex})
    ):
        answer.add(chunk)
        if number == 5:
            lost = stack.kill("sampler")
    assert lost
    assert re.fullmatch(regex, answer.text), answer.text
    stack.wait_restored("sampler", lost)


def test_after_a_kill_of_the_only_decode_a_stream_waits_for_the_next(stack: Stack) -> None:
    answer, lost = Answer(), ""
    for number, chunk in enumerate(stack.stream("Count upwards.", n=2, **LONG)):
        answer.add(chunk)
        if number == 5:
            lost = stack.kill("decode")
    assert lost
    assert answer.completion_tokens == 2 * LONG["max_tokens"]
    assert answer.finish_reason == "length"
    stack.wait_restored("decode", lost)


def test_after_a_kill_of_prefill_a_prompt_is_computed_elsewhere(stack: Stack) -> None:
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(stack.ask, "word " * 3000, max_tokens=4)
        time.sleep(0.5)  # it is being computed
        lost = stack.kill("prefill")
        assert asked.result(120).completion_tokens > 0
    stack.wait_restored("prefill", lost)


def test_a_killed_gateway_is_back_on_its_port(stack: Stack) -> None:
    url, lost = stack.http, stack.kill("gateway")
    stack.wait_restored("gateway", lost)
    assert stack.http == url
    assert stack.ask("And now?", max_tokens=4).completion_tokens > 0


def test_a_request_may_come_back_under_its_id_after_its_gateway_was_killed(stack: Stack) -> None:
    """Clients retry with the id they sent; engines still know the dead gateway's request by it."""
    lost = ""
    with (
        pytest.raises(httpx.TransportError),
        httpx.stream(**under_its_id(stack, stream=True)) as reply,
    ):
        for line in reply.iter_lines():
            if line and not lost:
                lost = stack.kill("gateway")
    assert lost
    stack.wait_restored("gateway", lost)
    again = httpx.request(**under_its_id(stack, stream=False))
    assert again.status_code == 200, again.text
    assert again.headers["x-request-id"] == "again-and-again"
    assert again.json()["usage"]["completion_tokens"] == LONG["max_tokens"]


def under_its_id(stack: Stack, *, stream: bool) -> dict[str, Any]:
    """What httpx is told, but for the way."""
    messages = [{"role": "user", "content": "Count upwards."}]
    return {
        "method": "POST",
        "url": f"{stack.http}/v1/chat/completions",
        "json": {"model": "gpt-4o", "messages": messages, "stream": stream, **LONG},
        "headers": {"x-request-id": "again-and-again"},
        "timeout": 120.0,
    }
