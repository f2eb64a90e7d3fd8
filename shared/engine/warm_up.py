"""One generation that nobody asked for, so that the first real one does not pay for first uses.

Kernels are compiled or read from their cache, memory is touched, threads are woken. Its text is of
no account, and its blocks are the first that the pool takes back.
"""

import asyncio
from typing import TYPE_CHECKING, Final

import numpy as np

from finback.shared.engine.output import StepOutput
from finback.shared.engine.sequence import SequenceSpec
from finback.shared.wire.messages.generate import SamplingSpec

if TYPE_CHECKING:
    from finback.shared.engine.engine import Engine  # brings torch; the caller built it

KEY: Final = ("finback-warm-up", 0)
# Longer than what kernels for few rows take, and no whole number of blocks.
NUM_PROMPT_TOKENS: Final = 150
NUM_TOKENS: Final = 3
# A machine that has to compile every kernel first serves meanwhile, slowly, rather than not at all.
MAX_S: Final = 20.0


class WarmUp:
    """Runs before any role starts; `on_step` must see the engine's steps meanwhile."""

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self._over = asyncio.Event()

    async def run(self) -> None:
        """Return when it has ended, or has taken too long; raises if the engine fails at it."""
        num_prompt = max(1, min(NUM_PROMPT_TOKENS, self._engine.max_model_len - NUM_TOKENS))
        admission = self._engine.add(
            SequenceSpec(
                key=KEY,
                attempt=1,
                token_ids=np.arange(num_prompt, dtype=np.int32) % 7,
                sampling=SamplingSpec(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True),
                seed=0,
            )
        )
        if not admission.accepted:
            return
        over = asyncio.ensure_future(self._over.wait())
        failed = asyncio.ensure_future(self._engine.failed())
        try:
            await asyncio.wait((over, failed), timeout=MAX_S, return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                failed.result()
        finally:
            over.cancel()
            failed.cancel()
        self._engine.forget(KEY)

    def on_step(self, output: StepOutput) -> None:
        """Look for the end."""
        if any(row.key == KEY and row.end is not None for row in output.rows):
            self._over.set()
