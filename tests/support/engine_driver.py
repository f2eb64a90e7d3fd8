"""Drives an `Engine` the way a decode role does, for tests."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from finback.shared.engine.config import EngineConfig
from finback.shared.engine.engine import Engine
from finback.shared.engine.output import PrefillProgress, StepOutput
from finback.shared.engine.sequence import SequenceKey, SequenceSpec, TokenIds
from finback.shared.models.causal_lm import CausalLM
from finback.shared.wire.messages.generate import EndInfo, TokenLogprob

# (spec, tokens so far, position) -> guess from that position on
Drafter = Callable[[SequenceSpec, TokenIds, int], TokenIds]


@dataclass(slots=True)
class Completion:
    """What came out of one sequence."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    end: EndInfo | None = None
    progress: list[PrefillProgress] = field(default_factory=list)


class Driver:
    """An engine and what it told. Use as an async context manager."""

    def __init__(
        self, model: CausalLM, config: EngineConfig, *, drafter: Drafter | None = None
    ) -> None:
        self.engine = Engine(model, config, on_step=self._on_step)
        self.got: dict[SequenceKey, Completion] = {}
        self.specs: dict[SequenceKey, SequenceSpec] = {}
        self.steps: list[StepOutput] = []
        self._masks: dict[SequenceKey, int] = {}
        self._drafter = drafter
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        await self.engine.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.engine.stop()

    def add(self, spec: SequenceSpec) -> None:
        """Add a sequence that must be accepted."""
        admission = self.engine.add(spec)
        if not admission.accepted:
            raise ValueError(f"{spec.key} was refused: {admission.reason}")
        self.got[spec.key] = Completion()
        self.specs[spec.key] = spec

    async def until(self, is_reached: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Wait for something that a step brings; raise if the engine fails meanwhile."""
        async with asyncio.timeout(timeout_s):
            while not is_reached():
                self._changed.clear()
                waits: list[asyncio.Future[Any]] = [
                    asyncio.ensure_future(self._changed.wait()),
                    asyncio.ensure_future(self.engine.failed()),
                ]
                done, rest = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for wait in rest:
                    wait.cancel()
                for wait in done:
                    wait.result()

    async def run(self, specs: Sequence[SequenceSpec]) -> list[Completion]:
        """Add all and wait for their ends."""
        for spec in specs:
            self.add(spec)
        keys = [spec.key for spec in specs]
        await self.until(lambda: all(self.got[key].end is not None for key in keys))
        return [self.got[key] for key in keys]

    async def until_free(self) -> None:
        """Wait until every block is free: a step planned ahead of an end holds blocks until it retires."""
        await self.until(lambda: self.engine.load().num_free_blocks == self.engine.num_blocks)

    def wants_mask(self, key: SequenceKey) -> int | None:
        """The completion index that a mask was last wanted for."""
        return self._masks.get(key)

    def _on_step(self, output: StepOutput) -> None:
        self.steps.append(output)
        for row in output.rows:
            completion = self.got[row.key]
            assert completion.end is None, "an end was told twice"
            spec = self.specs.get(row.key)
            num_known = 0 if spec is None else spec.completion.size
            assert row.offset == num_known + len(completion.tokens)
            completion.tokens += row.token_ids.tolist()
            completion.logprobs += row.logprobs or ()
            completion.end = row.end
        for progress in output.prefilled:
            self.got[progress.key].progress.append(progress)
        self._masks.update(output.want_masks)
        for key, position in output.want_drafts:
            if self._drafter is not None:
                known = np.array(self.got[key].tokens, dtype=np.int32)
                guess = self._drafter(self.specs[key], known, position)
                self.engine.provide_draft(key, position, guess)
        self._changed.set()


def generate(
    model: CausalLM,
    config: EngineConfig,
    specs: Sequence[SequenceSpec],
    *,
    drafter: Drafter | None = None,
) -> list[Completion]:
    """Run sequences together in an engine of their own."""

    async def main() -> list[Completion]:
        async with Driver(model, config, drafter=drafter) as driver:
            completions = await driver.run(specs)
            driver.engine.check_integrity()
            return completions

    return asyncio.run(main())
