"""Kill -9 of every service while an answer streams."""

import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.stack import Answer, Stack, StreamFailed

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]

LONG = {"max_tokens": 96, "ignore_eos": True}
# What a client may have to wait for word after a worker's death.
WORD_S = 5.0


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


def test_after_a_kill_of_decode_the_client_gets_word(stack: Stack) -> None:
    lost, killed_s = "", 0.0
    last_s = time.monotonic()
    try:
        for number, _ in enumerate(stack.stream("Count upwards.", **LONG)):
            last_s = time.monotonic()
            if number == 5:
                lost, killed_s = stack.kill("decode"), time.monotonic()
    except StreamFailed as error:
        assert str(error)
        last_s = time.monotonic()
    assert lost
    assert last_s - killed_s < WORD_S
    stack.wait_restored("decode", lost)
    assert stack.ask("And now?", max_tokens=4).completion_tokens > 0


def test_after_a_kill_of_prefill_the_client_gets_word(stack: Stack) -> None:
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(stack.ask, "word " * 3000, max_tokens=4)
        time.sleep(0.5)  # it is being computed
        lost, killed_s = stack.kill("prefill"), time.monotonic()
        try:
            assert asked.result(60).completion_tokens > 0
        except StreamFailed as error:
            assert str(error)
            assert time.monotonic() - killed_s < WORD_S
    stack.wait_restored("prefill", lost)


def test_a_killed_gateway_is_back_on_its_port(stack: Stack) -> None:
    url, lost = stack.http, stack.kill("gateway")
    stack.wait_restored("gateway", lost)
    assert stack.http == url
    assert stack.ask("And now?", max_tokens=4).completion_tokens > 0
