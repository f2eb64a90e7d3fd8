"""`LLM` from start to end: interrupts, failures, many prompts, several threads, loops, processes."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from finback.shared.errors import InvariantViolated, ServingError, Unavailable
from finback.shared.offline.llm import LLM
from finback.shared.offline.params import SamplingParams
from support.tiny_llm import VOCAB_SIZE, mixed_params, tiny_llm, token_prompts, told

LONG = SamplingParams(max_tokens=400, ignore_eos=True)
SHORT = SamplingParams(max_tokens=3, ignore_eos=True)


def _until(is_reached: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_reached():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _is_idle(llm: LLM) -> bool:
    stats = llm.stats()
    return stats.num_free_kv_blocks == stats.num_kv_blocks


def test_ten_thousand_prompts_wait_for_room(llm: LLM) -> None:
    prompts = [[3 + at % 90, 3 + at // 90 % 90] for at in range(10_000)]
    found = llm.generate(prompts, SamplingParams(max_tokens=1, temperature=0.0))
    assert [list(c.prompt_token_ids) for c in found] == prompts
    assert all(len(c.token_ids) == 1 for c in found)
    assert found[0].token_ids == found[8100].token_ids  # the same prompt


def test_a_reader_who_is_slow_holds_nobody_else_up(llm: LLM) -> None:
    stream = llm.stream([[5, 6]] * 200, SHORT)
    next(stream)
    assert len(llm.generate([[5, 6]] * 50, SHORT)) == 50
    ends = sum(chunk.finish_reason is not None for chunk in stream)
    assert ends == 200


def test_a_stream_that_is_left_ends_its_sequences(llm: LLM) -> None:
    stream = llm.stream([[5, 6]] * 100, LONG)
    next(stream)
    stream.close()  # type: ignore[attr-defined]  # a generator
    _until(lambda: _is_idle(llm))
    for _ in llm.stream([[5, 6]] * 100, LONG):
        break
    _until(lambda: _is_idle(llm))


@pytest.fixture
def interrupts() -> Iterator[None]:
    """As in a terminal; what is started in the background may inherit that they are ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_ends_the_call_alone(llm: LLM) -> None:
    timer = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[5, 6]] * 1000, LONG)
    timer.join()
    _until(lambda: _is_idle(llm))
    assert len(llm.generate([[5, 6]] * 3, SHORT)) == 3


def test_threads_share_the_batch(llm: LLM) -> None:
    prompts = token_prompts(12, low=3, high=VOCAB_SIZE, num_shared=9, lengths=(4, 30, 11))
    params = mixed_params(12, 24)
    alone = told(llm.generate(prompts, params))
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: llm.generate(prompts, params), range(8)):
            assert told(found) == alone


def test_two_in_one_process(llm: LLM, tiny_path: Path) -> None:
    params = mixed_params(4, 12)
    prompts = token_prompts(4, low=3, high=VOCAB_SIZE, num_shared=9, lengths=(4, 30))
    with (
        tiny_llm(tiny_path, deterministic=True, max_num_seqs=2) as other,
        ThreadPoolExecutor(2) as pool,
    ):
        first, second = pool.map(lambda one: told(one.generate(prompts, params)), (llm, other))
    assert first == second
    assert told(llm.generate(prompts, params)) == first


def test_closing_ends_what_waits_and_refuses_what_comes(tiny_path: Path) -> None:
    llm = tiny_llm(tiny_path)
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            llm.generate([[5, 6]] * 1000, LONG)
        except ServingError as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    _until(lambda: not _is_idle(llm))
    llm.close()
    llm.close()
    thread.join(20)
    assert [type(error) for error in errors] == [Unavailable]
    for use in (lambda: llm.generate("the"), llm.reset_prefix_cache, lambda: next(llm.stream("a"))):
        with pytest.raises(Unavailable, match="closed"):
            use()
    assert llm.stats().num_kv_blocks == 64


def test_what_is_forgotten_is_collected(tiny_path: Path) -> None:
    llm = tiny_llm(tiny_path)
    llm.generate("the", SHORT)
    seen = weakref.ref(llm)
    before = {thread for thread in threading.enumerate() if thread.name.startswith("finback")}
    del llm
    gc.collect()
    assert seen() is None
    left = {t for t in before if "engine" in t.name or "device" in t.name}
    _until(lambda: sum(thread.is_alive() for thread in left) <= len(left) - 2)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_failure_of_the_device_is_raised(tiny_path: Path, is_streamed: bool) -> None:
    with tiny_llm(tiny_path) as llm:
        llm.generate("the", SHORT)

        def fail(*_: object) -> None:
            raise RuntimeError("the device fell off")

        model = llm._host._calls.engine._runner._model
        model.forward, kept = fail, model.forward  # type: ignore[method-assign, assignment]  # the fault
        with pytest.raises(InvariantViolated, match="the device fell off"):
            list(llm.stream("the", LONG)) if is_streamed else llm.generate(["the"] * 100, LONG)
        with pytest.raises(InvariantViolated, match="the device fell off"):
            llm.generate("the")
        model.forward = kept  # type: ignore[method-assign]  # as it was


def test_a_sequence_that_fails_fails_its_call_alone(tiny_path: Path) -> None:
    with tiny_llm(tiny_path) as llm:
        model = llm._host._calls.engine._runner._model
        kept = model.logits

        def spoiled(hidden: torch.Tensor) -> torch.Tensor:
            return kept(hidden).fill_(float("nan"))

        model.logits = spoiled  # type: ignore[method-assign]  # the fault
        with pytest.raises(InvariantViolated, match=r"prompts\[\d+\]: .* not finite"):
            llm.generate(["the"] * 100, LONG)
        model.logits = kept  # type: ignore[method-assign]  # as it was
        _until(lambda: _is_idle(llm))
        assert len(llm.generate(["the"] * 3, SHORT)) == 3


def test_a_failure_at_the_start_is_raised(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("no such device")

    monkeypatch.setattr("finback.shared.engine.device.Device.prepare_thread", fail)
    with pytest.raises(InvariantViolated, match="no such device"):
        tiny_llm(tiny_path)


async def test_coroutines_wait_without_blocking_their_loop(llm: LLM) -> None:
    prompts = [[5, 6], [7, 8, 9]]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    wanted = await asyncio.to_thread(llm.generate, prompts, params)
    both = await asyncio.gather(llm.agenerate(prompts, params), llm.agenerate(prompts, params))
    assert [told(found) for found in both] == [told(wanted)] * 2
    texts = ["", ""]
    async for chunk in llm.astream(prompts, params):
        texts[chunk.index] += chunk.text
    assert texts == [c.text for c in wanted]
    with pytest.raises(ValueError, match="must not be empty"):
        await llm.agenerate([[]])


async def test_a_cancelled_coroutine_ends_its_sequences(llm: LLM) -> None:
    task = asyncio.ensure_future(llm.agenerate([[5, 6]] * 500, LONG))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async for _ in llm.astream([[5, 6]] * 100, LONG):
        break
    await asyncio.to_thread(_until, lambda: _is_idle(llm))


_PROGRAM = """
import os, sys
import finback
assert not {"torch", "numpy", "finback.shared"} & set(sys.modules)
from finback import LLM, SamplingParams
llm = LLM(sys.argv[1], num_threads=1, kv_pool_bytes=2**21)
stream = llm.stream([[5, 6]] * 100, SamplingParams(max_tokens=400, ignore_eos=True))
print(next(stream).index)
sys.stdout.flush()
if os.fork() == 0:
    try:
        llm.generate("the")
    except finback.shared.errors.Unavailable as error:
        print(error)
    sys.exit()
os.wait()
print("end")
"""


def test_a_process_ends_without_closing(tiny_path: Path) -> None:
    """In the middle of a stream; and a forked child is refused instead of waiting for ever."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(tiny_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    first, refused, last = done.stdout.splitlines()
    assert (first, last) == ("0", "end")
    assert "before a fork" in refused
