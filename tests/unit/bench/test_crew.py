"""Workers in processes of their own, against a real server."""

import asyncio

import pytest

from finback.shared.bench.crew import BenchFailed, Crew
from finback.shared.bench.load import Job, Pace, Sampling
from support.sse_server import Body, answer, sse_server

pytestmark = pytest.mark.slow
PACE = Pace(concurrency=0, is_open=False, timeout_s=20.0)
SAMPLING = Sampling(temperature=0.6)


def jobs(count: int, num_tokens: int = 3) -> list[Job]:
    return [
        Job(index=at, prompt=(5, 6), num_tokens=num_tokens, seed=at, due_s=0.0)
        for at in range(count)
    ]


def whole(body: Body, number: int) -> tuple[int, dict[str, str], list[bytes]]:
    return 200, {}, answer(body)


def opening(url: str) -> dict[str, object]:
    return {"kind": "open", "mode": "http", "url": url, "model": "m", "key": "", "has_ids": False}


def quiet(num_done: int, num_tokens: int) -> None:
    """Nobody looks."""


async def test_two_workers_share_the_jobs_and_the_clock() -> None:
    async with sse_server(whole, pause_s=0.02) as server, Crew(opening(server.url), 2) as crew:
        await crew.reset()
        run = await crew.run(jobs(5), SAMPLING, PACE, quiet)
        again = await crew.run(jobs(1), SAMPLING, PACE, quiet)
        assert len(set(crew.pids)) == 2
    assert [outcome.index for outcome in run.outcomes] == list(range(5))
    assert all(outcome.is_whole for outcome in run.outcomes + again.outcomes)
    assert not run.is_cut
    last_s = max(outcome.last_s or 0.0 for outcome in run.outcomes)
    assert 0 < last_s <= run.elapsed_s < 10
    assert run.client_cpu_s > 0


async def test_a_stop_ends_the_run_and_keeps_what_came() -> None:
    seen: list[int] = []
    async with sse_server(whole, pause_s=0.05) as server, Crew(opening(server.url), 1) as crew:

        def stop_soon(num_done: int, num_tokens: int) -> None:
            seen.append(num_tokens)
            if num_tokens:
                crew.stop()

        async with asyncio.timeout(30):
            run = await crew.run(jobs(2, num_tokens=2000), SAMPLING, PACE, stop_soon)
    assert run.is_cut
    assert seen
    assert sum(outcome.num_tokens for outcome in run.outcomes) >= seen[-1] > 0
    assert all(outcome.is_cut for outcome in run.outcomes)


async def test_what_a_worker_cannot_do_is_told() -> None:
    with pytest.raises(BenchFailed, match="url must look like"):
        async with Crew(opening("nowhere"), 1):
            pass
