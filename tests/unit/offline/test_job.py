"""A job: chunks that wait are joined, and a reader who is slow holds only his own prompts up."""

import pytest

from finback.shared.errors import Unavailable
from finback.shared.offline.job import Job
from finback.shared.offline.outputs import CompletionChunk, TokenLogprobs
from finback.shared.offline.track import Request
from finback.shared.wire.messages.generate import SamplingSpec


def _requests(count: int) -> list[Request]:
    return [
        Request(index=at, token_ids=(1,), sampling=SamplingSpec(), seed=0) for at in range(count)
    ]


def _chunk(index: int, token_id: int, reason: str | None = None) -> CompletionChunk:
    return CompletionChunk(
        index=index,
        token_ids=(token_id,),
        text=str(token_id),
        logprobs=(TokenLogprobs(logprob=-1.0, top={}),),
        finish_reason=reason,
    )


def test_chunks_that_wait_become_one() -> None:
    wakes: list[None] = []
    job = Job(_requests(2), wake=lambda: wakes.append(None), max_unread=2)
    for chunk in (_chunk(0, 1), _chunk(1, 2), _chunk(0, 3, "stop")):
        job.tell(chunk)
    first, second = job.take()
    assert (first.token_ids, first.text, first.finish_reason) == ((1, 3), "13", "stop")
    assert first.logprobs is not None
    assert len(first.logprobs) == 2
    assert (second.token_ids, second.finish_reason) == ((2,), None)
    assert list(job.take()) == []
    assert len(wakes) == 3


def test_unread_answers_are_bounded() -> None:
    job = Job(_requests(3), wake=lambda: None, max_unread=2)
    job.start()
    job.start()
    assert not job.may_start()
    job.tell(_chunk(0, 1, "length"))
    assert not job.may_start()
    assert [chunk.index for chunk in job.take()] == [0]
    assert job.may_start()


def test_a_failure_is_told_once_and_ends_it() -> None:
    wakes: list[None] = []
    job = Job(_requests(2), wake=lambda: wakes.append(None))
    job.fail(Unavailable("first"))
    job.fail(Unavailable("second"))
    assert job.is_over
    assert not job.may_start()
    assert len(wakes) == 1
    with pytest.raises(Unavailable, match="first"):
        job.completions()


def test_a_job_without_prompts_is_over() -> None:
    job = Job([], wake=lambda: None)
    assert job.is_over
    assert job.is_read
    assert job.completions() == []
