"""Single decisions of the scheduler, spelled out."""

from typing import Any

import numpy as np

from finback.shared.engine.outcome import Committed
from finback.shared.engine.scheduler import Scheduler
from finback.shared.engine.sequence import SequenceSpec
from finback.shared.engine.table import SchedulerConfig
from finback.shared.wire.messages.generate import SamplingSpec
from support.engine_sim import VOCAB_SIZE, SimRunner, expected_completion


class Bench:
    """A scheduler and a device in step (nothing in flight between calls)."""

    def __init__(self, **fields: Any) -> None:
        self.config = SchedulerConfig(
            **{
                "num_blocks": 8,
                "block_size": 4,
                "max_model_len": 32,
                "vocab_size": VOCAB_SIZE,
                "max_num_seqs": 4,
                "max_num_batched_tokens": 16,
                **fields,
            }
        )
        self.scheduler = Scheduler(self.config)
        self.runner = SimRunner(
            num_slots=self.config.max_num_seqs,
            max_model_len=self.config.max_model_len,
            block_size=4,
            num_blocks=self.config.num_blocks,
        )

    def spec(self, name: str, num_prompt: int, **fields: Any) -> SequenceSpec:
        tokens = np.random.default_rng(len(name) + ord(name[0])).integers(1, VOCAB_SIZE, num_prompt)
        max_tokens = fields.pop("max_tokens", 30)
        return SequenceSpec(
            **{
                "key": (name, 0),
                "attempt": 1,
                "token_ids": tokens.astype(np.int32),
                "sampling": SamplingSpec(max_tokens=max_tokens, ignore_eos=True),
                "seed": 1,
                **fields,
            }
        )

    def add(self, name: str, num_prompt: int, **fields: Any) -> None:
        assert self.scheduler.add(self.spec(name, num_prompt, **fields)).accepted

    def step(self, max_chunk_rows: int | None = None) -> tuple[dict[str, int], Committed]:
        """(rows by sequence, what it brought) of one step."""
        plan = self.scheduler.plan(max_chunk_rows)
        if plan is None:
            return {}, self.scheduler.take_news()
        rows = {item.sequence.spec.key[0]: item.num_rows for item in plan.items}
        return rows, self.scheduler.commit(plan, self.runner.execute(plan))

    def until_ended(self, name: str) -> list[int]:
        """Run until this sequence ends; its completion."""
        for _ in range(200):
            if any(row.key == (name, 0) and row.end for row in self.step()[1].rows):
                tokens = self.scheduler.tokens((name, 0))
                assert tokens is not None
                return [int(token) for token in tokens]
        raise AssertionError(f"{name} never ended")


def test_decoding_rows_come_first_and_chunks_fill_the_step() -> None:
    bench = Bench(num_blocks=12)
    bench.add("a", 3)
    assert bench.step()[0] == {"a": 3}
    bench.add("long", 20)
    bench.add("b", 2)
    assert bench.step()[0] == {"a": 1, "long": 15}
    assert bench.step()[0] == {"a": 1, "long": 5, "b": 2}
    assert bench.step()[0] == {"a": 1, "long": 1, "b": 1}


def test_nobody_overtakes_a_sequence_that_waits_for_blocks() -> None:
    bench = Bench()
    bench.add("a", 16, max_tokens=2)
    assert bench.step()[0] == {"a": 16}
    bench.add("big", 20)
    bench.add("small", 1)
    assert bench.step()[0] == {"a": 1}
    rows, _ = bench.step()
    assert list(rows) == ["big"]


def test_the_youngest_is_preempted_and_comes_back_first() -> None:
    bench = Bench(num_blocks=6, max_model_len=24)
    bench.add("a", 8, max_tokens=16)
    bench.add("b", 7, max_tokens=16)
    bench.add("c", 1, max_tokens=2)
    tokens = bench.until_ended("a")
    assert bench.scheduler.table.num_preemptions >= 1
    assert tokens == expected_completion(bench.spec("a", 8, max_tokens=16), 24, ())[0]
    spec = bench.spec("b", 7, max_tokens=16)
    assert bench.until_ended("b") == expected_completion(spec, 24, ())[0]


def test_an_activated_sequence_without_a_slot_gives_its_blocks_to_the_running_one() -> None:
    bench = Bench(num_blocks=8, max_num_seqs=1)
    bench.add("older", 16, mode="decode")
    bench.add("a", 15, max_tokens=17)
    assert bench.step()[0] == {"a": 15}
    assert bench.scheduler.activate(("older", 0), 0)
    bench.until_ended("a")
    spec = bench.spec("older", 16)
    assert bench.until_ended("older") == expected_completion(spec, 32, ())[0]


def test_out_of_credit_loses_its_blocks_to_others_first() -> None:
    bench = Bench(num_blocks=6, max_model_len=24)
    bench.add("paused", 8, credit_tokens=1, max_tokens=4)
    bench.step()
    bench.add("b", 8, max_tokens=16)
    bench.until_ended("b")
    assert bench.scheduler.table.num_preemptions == 1
    assert bench.step()[0] == {}
    assert bench.scheduler.grant(("paused", 0), 9)
    assert len(bench.until_ended("paused")) == 4


def test_a_second_request_finds_the_prefix() -> None:
    bench = Bench()
    bench.add("x", 12, max_tokens=1)
    bench.until_ended("x")
    same = bench.spec("x", 12, max_tokens=1, key=("y", 0))
    assert bench.scheduler.add(same).num_cached_tokens == 8  # the last token is never cached
    assert bench.step()[0] == {"y": 4}
    other_tenant = bench.spec("x", 12, key=("z", 0), cache_salt=b"other")
    assert bench.scheduler.add(other_tenant).num_cached_tokens == 0


def test_priority_goes_before_arrival() -> None:
    bench = Bench(max_num_seqs=1)
    bench.add("late", 2, max_tokens=2, priority=1)
    bench.add("soon", 2, max_tokens=2, priority=0)
    assert bench.step()[0] == {"soon": 2}


def test_a_prompt_of_one_token_needs_no_prefill() -> None:
    bench = Bench()
    bench.add("one", 1, mode="prefill")
    rows, brought = bench.step()
    assert rows == {}
    (progress,) = brought.prefilled
    assert (progress.num_computed_tokens, progress.is_last) == (0, True)
    bench.scheduler.release(("one", 0))
    assert not bench.scheduler.table.by_key


def test_prefill_stops_before_the_last_token_and_holds_its_blocks() -> None:
    bench = Bench()
    bench.add("p", 13, mode="prefill")
    rows, brought = bench.step()
    assert rows == {"p": 12}
    (progress,) = brought.prefilled
    assert (progress.num_computed_tokens, progress.is_last) == (12, True)
    assert bench.step()[0] == {}
    assert bench.scheduler.table.pool.num_free == 5
    assert len(bench.scheduler.table.free_slots) == 4
    bench.scheduler.release(("p", 0))
    assert bench.scheduler.table.pool.num_free == 8
    assert bench.scheduler.add(bench.spec("p", 13)).num_cached_tokens == 12


def test_tokens_past_a_stop_are_not_hashed() -> None:
    bench = Bench()
    spec = bench.spec("s", 3, max_tokens=20, drafting=True)
    full, _ = expected_completion(spec, 32, ())
    stop = full[3]
    where = full.index(stop) + 1
    bench.add("s", 3, drafting=True, sampling=SamplingSpec(max_tokens=20, stop_token_ids=(stop,)))
    bench.step()
    sequence = bench.scheduler.table.by_key["s", 0]
    guess = np.array(full, dtype=np.int32)
    bench.runner.slots.offer_draft(sequence.slot, sequence.incarnation, 3, guess)
    assert bench.until_ended("s") == full[:where]
    assert bench.scheduler.table.pool.num_cached == (3 + where) // 4


def test_a_prompt_waits_for_a_long_prefix_that_another_computes() -> None:
    prefix = np.arange(700, dtype=np.int32) % (VOCAB_SIZE - 1) + 1
    bench = Bench(num_blocks=700, max_model_len=800, max_num_batched_tokens=400)
    for name, start in (("a", prefix), ("b", prefix), ("c", prefix[:80][::-1])):
        own = np.full(8, 1 + ord(name) % 3, dtype=np.int32)
        bench.add(name, 0, token_ids=np.concatenate((start, own)))
    assert bench.step()[0] == {"a": 400}
    assert bench.step()[0] == {"a": 308, "c": 88}  # "b" waits for 300 tokens, and is overtaken
    assert bench.step()[0] == {"a": 1, "c": 1, "b": 8}


def test_a_prompt_does_not_wait_for_a_short_prefix() -> None:
    prefix = np.arange(200, dtype=np.int32) % (VOCAB_SIZE - 1) + 1
    bench = Bench(num_blocks=700, max_model_len=800, max_num_batched_tokens=400)
    for name in "ab":
        own = np.full(8, 1 + ord(name) % 3, dtype=np.int32)
        bench.add(name, 0, token_ids=np.concatenate((prefix, own)))
    assert bench.step()[0] == {"a": 208, "b": 192}


def test_prompts_take_few_rows_beside_sequences_that_decode() -> None:
    bench = Bench(num_blocks=12)
    bench.add("a", 3)
    assert bench.step(max_chunk_rows=2)[0] == {"a": 3}  # nobody waits for it
    bench.add("long", 7)
    bench.add("b", 4)
    found = [bench.step(max_chunk_rows=4)[0] for _ in range(3)]
    assert found == [{"a": 1, "long": 4}, {"a": 1, "long": 3, "b": 1}, {"a": 1, "long": 1, "b": 3}]
