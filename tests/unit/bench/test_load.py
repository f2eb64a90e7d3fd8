"""Load over the HTTP client, against a real server on a socket: counts, times, failures, refusals."""

import asyncio
import time
from typing import Any

import pytest

from finback.shared.bench.http_client import HttpClient, check_url
from finback.shared.bench.load import Job, Load, Pace, Sampling
from finback.shared.bench.outcomes import Outcome
from finback.shared.errors import ConfigError
from support.sse_server import Body, Script, SseServer, answer, event, sse_server

PACE = Pace(concurrency=0, is_open=False, timeout_s=20.0)


def jobs(count: int, *, num_tokens: int = 4, every_s: float = 0.0) -> list[Job]:
    return [
        Job(index=at, prompt=(5, 6, 7), num_tokens=num_tokens, seed=at, due_s=at * every_s)
        for at in range(count)
    ]


async def load(
    server: SseServer, wanted: list[Job], pace: Pace = PACE, num_logprobs: int | None = None
) -> list[Outcome]:
    client = HttpClient(url=server.url, model="m", key="secret")
    run = Load(client, wanted, Sampling(temperature=0.6, num_logprobs=num_logprobs), pace)
    start_at_s = time.monotonic()
    try:
        await run.run(start_at_s)
    finally:
        await client.close()
    return sorted((track.outcome(start_at_s) for track in run.tracks), key=lambda o: o.index)


def whole(body: Body, number: int) -> tuple[int, dict[str, str], list[bytes]]:
    return 200, {}, answer(body, cached=2)


async def test_every_token_is_counted_and_every_arrival_timed() -> None:
    async with sse_server(whole, pause_s=0.005) as server:
        outcomes = await load(server, jobs(3))
    assert all(outcome.is_whole for outcome in outcomes)
    for outcome in outcomes:
        assert (outcome.num_tokens, outcome.num_prompt_tokens, outcome.num_cached_tokens) == (
            4,
            3,
            2,
        )
        assert len(outcome.gaps_s) == 3
        assert outcome.first_s is not None
        assert outcome.last_s is not None
        assert sum(outcome.gaps_s) == pytest.approx(outcome.last_s - outcome.first_s)
    body = server.bodies[0]
    assert (body["ignore_eos"], body["temperature"], body["max_tokens"]) == (True, 0.6, 4)
    assert "logprobs" not in body
    assert "top_p" not in body


def with_ids(num_ids: int) -> Script:
    """Four tokens in the usage, `num_ids` ids, two of them in an event without text."""

    def script(body: Body, number: int) -> tuple[int, dict[str, str], list[bytes]]:
        assert body["return_token_ids"] is True
        silent = {"index": 0, "text": "", "token_ids": [7, 8], "finish_reason": None}
        rest = {"index": 0, "text": "a", "token_ids": [9] * (num_ids - 2), "finish_reason": None}
        return 200, {}, [event(choices=[silent]), event(choices=[rest]), *answer(body)[4:]]

    return script


async def test_ids_are_counted_and_must_agree_with_the_usage() -> None:
    async with sse_server(with_ids(4), pause_s=0.005) as server:
        (outcome,) = await load(server, jobs(1))
    assert outcome.is_whole
    assert len(outcome.gaps_s) == 1  # the event without text was an arrival too
    async with sse_server(with_ids(5)) as server:
        (outcome,) = await load(server, jobs(1))
    assert outcome.error == "5 token ids came, but the usage counts 4"


async def test_a_bound_is_kept_and_connections_are_used_again() -> None:
    pace = Pace(concurrency=2, is_open=False, timeout_s=20.0)
    async with sse_server(whole) as server:
        outcomes = await load(server, jobs(8), pace)
    assert all(outcome.is_whole for outcome in outcomes)
    assert server.num_connections == 2


async def test_an_answer_that_is_short_is_not_whole() -> None:
    def short(body: Body, number: int) -> tuple[int, dict[str, str], list[bytes]]:
        return 200, {}, answer(body, num_tokens=3)

    async with sse_server(short) as server:
        (outcome,) = await load(server, jobs(1))
    assert not outcome.is_whole
    assert (outcome.num_tokens, outcome.num_wanted) == (3, 4)


@pytest.mark.parametrize(
    ("script", "told"),
    [
        (lambda body, n: (400, {}, [b'{"error":{"message":"no such model"}}']), "no such model"),
        (lambda body, n: (200, {}, [*answer(body)[:2], b""]), "the connection was lost"),
        (lambda body, n: (200, {}, answer(body)[:2]), "ended before the answer did"),
        (lambda body, n: (200, {}, [event(error={"message": "it broke"})]), "it broke"),
        (lambda body, n: (200, {}, [b"data: {no json\n\n"]), "a chunk that is none"),
    ],
)
async def test_a_failure_is_told_and_ends_its_request_only(script: Script, told: str) -> None:
    def first_fails(body: Body, number: int) -> tuple[int, dict[str, str], list[bytes]]:
        return script(body, number) if body["seed"] == 0 else whole(body, number)

    async with sse_server(first_fails) as server:
        outcomes = await load(server, jobs(3))
    assert told in outcomes[0].error
    assert [outcome.is_whole for outcome in outcomes] == [False, True, True]


def refused_once() -> Script:
    asked: set[int] = set()

    def script(body: Body, number: int) -> tuple[int, dict[str, str], list[bytes]]:
        if body["seed"] not in asked:
            asked.add(body["seed"])
            return 429, {"retry-after": "0"}, [b'{"error":{"message":"full"}}']
        return whole(body, number)

    return script


async def test_a_refused_request_is_asked_again_and_waits_from_its_first_try() -> None:
    async with sse_server(refused_once()) as server:
        outcomes = await load(server, jobs(2))
    assert all(outcome.is_whole for outcome in outcomes)
    assert [outcome.num_refusals for outcome in outcomes] == [1, 1]
    assert all(outcome.ttft_s is not None and outcome.ttft_s > 0.05 for outcome in outcomes)


async def test_a_refused_request_of_an_open_loop_is_lost() -> None:
    pace = Pace(concurrency=0, is_open=True, timeout_s=20.0)
    async with sse_server(refused_once()) as server:
        outcomes = await load(server, jobs(2, every_s=0.01), pace)
    assert all(outcome.is_refused and "full" in outcome.error for outcome in outcomes)
    assert [outcome.due_s for outcome in outcomes] == pytest.approx([0.0, 0.01])


async def test_an_answer_that_never_comes_has_a_deadline() -> None:
    async with sse_server(whole, pause_s=30.0) as server:
        (outcome,) = await load(server, jobs(1), Pace(concurrency=0, is_open=False, timeout_s=0.2))
    assert outcome.error == "no whole answer within 0.2 s"


async def test_a_cut_run_keeps_what_came() -> None:
    async with sse_server(whole, pause_s=0.02) as server:
        client = HttpClient(url=server.url, model="m")
        run = Load(client, jobs(1, num_tokens=500), Sampling(temperature=0.6), PACE)
        start_at_s = time.monotonic()
        task = asyncio.create_task(run.run(start_at_s))
        while not (run.tracks and run.tracks[0].num_arrived >= 3):  # noqa: ASYNC110 -- no event
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])
        await client.close()
    outcome = run.tracks[0].outcome(start_at_s)
    assert outcome.is_cut
    assert outcome.num_tokens >= 3
    assert not outcome.is_whole


async def test_logprobs_become_surprisals() -> None:
    logprobs: dict[str, Any] = {"tokens": ["a", "b"], "token_logprobs": [-0.6931471805599453, 0.0]}

    def script(body: Body, number: int) -> tuple[int, dict[str, str], list[bytes]]:
        assert body["logprobs"] == 0
        choice = {"index": 0, "text": "ab", "logprobs": logprobs, "finish_reason": None}
        return 200, {}, [event(choices=[choice]), *answer(body)[4:]]

    async with sse_server(script) as server:
        client = HttpClient(url=server.url, model="m")
        sampling = Sampling(temperature=0.6, num_logprobs=0)
        run = Load(client, jobs(1), sampling, PACE)
        await run.run(time.monotonic())
        await client.close()
    assert run.tracks[0].surprisals_bits == pytest.approx([1.0, 0.0])
    assert run.tracks[0].token_counts == {"a": 1, "b": 1}


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://a", "http://", ""])
def test_a_wrong_address_is_named(url: str) -> None:
    with pytest.raises(ConfigError, match="url must look like"):
        check_url(url)
