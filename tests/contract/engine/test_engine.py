"""What an engine promises its worker, on a small real network."""

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from finback.shared.engine.config import EngineConfig
from finback.shared.engine.sequence import SequenceSpec
from finback.shared.errors import ConfigError, InvalidRequest, InvariantViolated, Unavailable
from finback.shared.models.batch import ForwardBatch
from finback.shared.models.kv_pool import KVPool
from finback.shared.wire.messages.generate import SamplingSpec
from support.engine_driver import Completion, Driver, generate
from support.slow_engine import slow_completion
from support.tiny_model import CONFIG, tiny_model, tiny_resident

SMALL = EngineConfig(
    num_blocks=40,
    block_size=8,
    max_model_len=120,
    max_num_seqs=3,
    max_num_batched_tokens=32,
    max_queue=4,
    mode="deterministic",
    num_threads=1,
    overlap_below_ms=1e9,
)


@pytest.fixture(params=[tiny_model, tiny_resident], autouse=True, ids=["waiting", "resident"])
def network(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs under both runners."""
    monkeypatch.setitem(globals(), "tiny_model", request.param)


def _spec(name: str = "r", num_prompt: int = 9, **fields: Any) -> SequenceSpec:
    seed = sum(name.encode())
    tokens = np.random.default_rng(seed).integers(4, CONFIG.vocab_size, num_prompt)
    sampling = SamplingSpec(temperature=1.0, max_tokens=fields.pop("max_tokens", 10))
    return SequenceSpec(
        **{
            "key": (name, 0),
            "attempt": 1,
            "token_ids": tokens.astype(np.int32),
            "sampling": sampling,
            "seed": seed,
            **fields,
        }
    )


def _wants(driver: Driver, position: int) -> bool:
    return driver.wants_mask(("constrained", 0)) == position


def _has_more(got: Completion, count: int) -> bool:
    return len(got.tokens) > count


def _expected(spec: SequenceSpec) -> list[int]:
    return slow_completion(tiny_model(), spec, max_model_len=120, eos_token_ids=())[0]


def _run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(main)


def test_refusals_say_why() -> None:
    async def main() -> None:
        async with Driver(tiny_model(), SMALL) as driver:
            add = driver.engine.add
            assert add(_spec(num_prompt=120)).reason == "too_long"
            assert add(_spec(token_ids=np.array([], dtype=np.int32))).reason == "empty"
            assert (
                add(_spec(token_ids=np.array([CONFIG.vocab_size], np.int32))).reason == "bad_token"
            )
            assert add(_spec(token_ids=np.array([-1], np.int32))).reason == "bad_token"
            names = [f"q{i}" for i in range(4)]
            for name in names:
                driver.add(_spec(name))
            assert add(_spec("q0")).reason == "duplicate"
            assert add(_spec("more")).reason == "queue_full"
            for index in range(3):  # 13 of 40 blocks each
                assert add(_spec(f"d{index}", num_prompt=100, mode="decode")).accepted
            assert add(_spec("d3", num_prompt=100, mode="decode")).reason == "no_blocks"
            for index in range(3):
                assert driver.engine.abort((f"d{index}", 0))
            await driver.until(lambda: all(driver.got[name, 0].end for name in names))
            assert add(_spec("q0")).reason == "duplicate"  # ended, and not forgotten
            driver.engine.forget(("q0", 0))
            assert add(_spec("q0")).accepted
        assert driver.engine.add(_spec("late")).reason == "stopped"

    _run(main())


def test_a_newer_attempt_replaces_an_older_one() -> None:
    async def main() -> None:
        async with Driver(tiny_model(), SMALL) as driver:
            driver.add(_spec(credit_tokens=2))
            await driver.until(lambda: len(driver.got["r", 0].tokens) == 2)
            assert driver.engine.add(_spec()).reason == "duplicate"
            spec = _spec(attempt=2)
            (completion,) = await driver.run([spec])
            assert completion.tokens == _expected(spec)

    _run(main())


def test_credit_stops_a_sequence_alone() -> None:
    async def main() -> None:
        async with Driver(tiny_model(), SMALL) as driver:
            driver.add(_spec("slow", credit_tokens=3))
            (other,) = await driver.run([_spec("other")])
            assert other.tokens == _expected(_spec("other"))
            slow = driver.got["slow", 0]
            assert len(slow.tokens) == 3
            assert slow.end is None
            driver.engine.grant(("slow", 0), 5)
            await driver.until(lambda: len(slow.tokens) == 5)
            driver.engine.grant(("slow", 0), 100)
            await driver.until(lambda: slow.end is not None)
            assert slow.tokens == _expected(_spec("slow"))

    _run(main())


def test_masks_are_awaited_by_their_sequence_alone() -> None:
    """A grammar that allows one token at each position; the other sequence just runs."""

    async def main() -> None:
        async with Driver(tiny_model(), SMALL) as driver:
            spec = _spec("constrained", has_grammar=True, max_tokens=4)
            driver.add(spec)
            (other,) = await driver.run([_spec("other")])
            assert other.tokens == _expected(_spec("other"))
            got = driver.got[spec.key]
            for position, allowed in enumerate((50, 60, 70, 80)):
                await driver.until(partial(_wants, driver, position))
                words = np.zeros(-(-CONFIG.vocab_size // 32), dtype=np.uint32)
                words[allowed // 32] = 1 << allowed % 32
                driver.engine.provide_mask(spec.key, position + 1, (words.tobytes(),))  # too early
                driver.engine.provide_mask(spec.key, position, (words.tobytes(),))
                await driver.until(partial(_has_more, got, position))
            assert got.tokens == [50, 60, 70, 80]
            with pytest.raises(InvalidRequest):
                driver.engine.provide_mask(spec.key, 0, (b"short",))

    _run(main())


def test_finish_keeps_what_was_asked_for() -> None:
    async def main() -> None:
        async with Driver(tiny_model(), SMALL) as driver:
            driver.add(_spec(max_tokens=60, credit_tokens=7))
            await driver.until(lambda: len(driver.got["r", 0].tokens) == 7)
            counts = driver.engine.finish(("r", 0), 4)
            assert counts is not None
            assert (counts.num_completion_tokens, counts.num_prompt_tokens) == (4, 9)
            assert driver.engine.finish(("r", 0), 4) is None
            await driver.run([_spec("ended")])
            tokens = driver.engine.tokens(("ended", 0))
            assert tokens is not None
            assert tokens.tolist() == _expected(_spec("ended"))
            late = driver.engine.finish(("ended", 0), 2)
            assert late is not None
            assert late.num_completion_tokens == 2
            assert driver.engine.tokens(("ended", 0)) is None

    _run(main())


def test_abort_frees_everything() -> None:
    async def main() -> None:
        async with Driver(tiny_model(), SMALL) as driver:
            for index in range(4):
                driver.add(_spec(f"r{index}", max_tokens=100))
            await driver.until(lambda: len(driver.got["r0", 0].tokens) > 3)
            for index in range(4):
                assert await driver.engine.abort_and_wait((f"r{index}", 0))
            assert not driver.engine.abort(("r0", 0))
            assert driver.engine.load().num_free_blocks == SMALL.num_blocks
            driver.engine.check_integrity()
            (after,) = await driver.run([_spec("after")])
            assert after.tokens == _expected(_spec("after"))

    _run(main())


def test_logprobs_are_of_the_raw_distribution() -> None:
    sampling = SamplingSpec(
        temperature=0.7, max_tokens=6, num_logprobs=3, logit_bias={9: 50.0}, top_k=2
    )
    (got,) = generate(tiny_model(), SMALL, [_spec(sampling=sampling)])
    assert got.tokens == [9] * 6
    assert len(got.logprobs) == 6
    for item in got.logprobs:
        assert len(item.top_ids) == len(item.top_logprobs) == 3
        assert sorted(item.top_logprobs, reverse=True) == list(item.top_logprobs)
        assert 9 not in item.top_ids or item.logprob in item.top_logprobs
        assert item.logprob < 0.0


def test_drafted_logprobs_are_the_undrafted_ones() -> None:
    sampling = SamplingSpec(temperature=0.7, max_tokens=12, num_logprobs=2)
    spec = _spec(sampling=sampling, drafting=True)
    truth = _expected(spec)

    def perfect(spec: SequenceSpec, _known: Any, position: int) -> Any:
        start = position - spec.token_ids.size
        return np.array(truth[start : start + 9], dtype=np.int32)

    (plain,) = generate(tiny_model(), SMALL, [replace(spec, drafting=False)])
    (drafted,) = generate(tiny_model(), SMALL, [spec], drafter=perfect)
    assert drafted.tokens == plain.tokens == truth
    assert drafted.end is not None
    assert drafted.end.num_accepted_tokens > 0
    for one, other in zip(plain.logprobs, drafted.logprobs, strict=True):
        assert one.top_ids == other.top_ids
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


class _Spoiled:
    """The network, but for what `forward` does to it."""

    def __init__(self, spoil: Any) -> None:
        self._model = tiny_model()
        self._spoil = spoil

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._model, name)
        # A decoding step of the network goes through `forward` as well: through the spoiled one.
        return partial(getattr(type(self._model), name), self) if name == "decode" else found

    def forward(self, batch: ForwardBatch, kv: KVPool) -> torch.Tensor:
        hidden: torch.Tensor = self._spoil(batch, self._model.forward(batch, kv))
        return hidden


def test_logits_that_are_not_finite_end_their_sequence_alone() -> None:
    def poison(batch: ForwardBatch, hidden: torch.Tensor) -> torch.Tensor:
        bad = (
            batch.positions[batch.logit_rows] == 14
        )  # only the long prompt has such a row at first
        return torch.where(bad[:, None], torch.full_like(hidden, float("nan")), hidden)

    model: Any = _Spoiled(poison)
    short, long = _spec("short", num_prompt=3, max_tokens=5), _spec("long", num_prompt=12)
    first, second = generate(model, SMALL, [short, long])
    assert first.tokens == _expected(short)
    assert second.end is not None
    assert (second.end.finish_reason, second.end.error_code) == ("error", "internal")
    assert second.tokens == _expected(long)[: len(second.tokens)]
    assert len(second.tokens) == 3


def test_a_failing_device_fails_the_engine() -> None:
    def explode(batch: ForwardBatch, hidden: torch.Tensor) -> torch.Tensor:
        if batch.max_context == 9:  # the prompt, not the warm-up
            raise RuntimeError("the device is gone")
        return hidden

    async def main() -> None:
        model: Any = _Spoiled(explode)
        async with Driver(model, SMALL) as driver:
            driver.add(_spec())
            with pytest.raises(InvariantViolated) as caught:
                await asyncio.wait_for(driver.engine.failed(), 10)
            assert "the device is gone" in str(caught.value.__cause__)
            assert driver.engine.add(_spec("more")).reason == "stopped"
            with pytest.raises(Unavailable):
                await driver.engine.export_block(("r", 0), 0, memoryview(bytearray()))

    _run(main())


def test_a_device_that_fails_at_once_stops_the_start() -> None:
    def explode(batch: ForwardBatch, hidden: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no device")

    async def main() -> None:
        model: Any = _Spoiled(explode)
        driver = Driver(model, SMALL)
        with pytest.raises(RuntimeError, match="no device"):
            await driver.engine.start()
        assert driver.engine.add(_spec()).reason == "stopped"

    _run(main())


def test_load_and_step_times_are_told() -> None:
    async def main() -> None:
        async with Driver(tiny_model(), SMALL) as driver:
            assert driver.engine.progress == 0
            await driver.run([_spec(f"r{i}") for i in range(4)])
            load = driver.engine.load()
            assert (load.num_running, load.num_waiting) == (0, 0)
            assert load.step_time_ms > 0
            assert load.tokens_per_s > 0
            assert driver.engine.progress == driver.steps[-1].step >= 10
            assert sum(row.num_steps for row in driver.engine.step_times) >= 10

    _run(main())


def test_a_pool_that_does_not_fit_stops_the_start() -> None:
    with pytest.raises(ConfigError, match="out of memory"):
        Driver(tiny_model(), replace(SMALL, num_blocks=0, kv_pool_bytes=1 << 50))
