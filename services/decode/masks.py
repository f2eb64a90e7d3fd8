"""Asks the sampler service for masks: one message for all sequences that wait, one at a time.

A sampler that is away is asked again until the patience of the sequences runs out; it rebuilds what
it lost from the tokens it is told. The batch goes on meanwhile, only these sequences wait.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Final

from finback.services.decode.fair_parent import FairParent
from finback.services.decode.mask_book import Key, MaskBook, Masked, TokensFrom
from finback.shared.clock import monotonic_s
from finback.shared.engine.worker_host import WorkerHost
from finback.shared.errors import InvalidRequest, ServingError
from finback.shared.telemetry import tracing
from finback.shared.wire.messages.generate import GrammarSpec
from finback.shared.wire.messages.sampler import MaskReply, MaskRequest

# A healthy sampler answers in about a millisecond; a new grammar may have to be compiled.
_TIMEOUT_S: Final = 5.0
_RETRY_S: Final = 0.1
_MAX_RETRY_S: Final = 1.0
# A new sampler asks for the grammar, then for the tokens.
_MAX_FRUITLESS: Final = 2
PATIENCE_S: Final = 30.0

# (key, error code, text): the choice ends with this error.
OnBroken = Callable[[Key, str, str], None]


class MaskPump:
    """Keeps the engine in masks. `run` is its loop; the other methods only take notes."""

    def __init__(
        self,
        host: WorkerHost,
        tokens_from: TokensFrom,
        parent_of: Callable[[Key], Any],
        broken: OnBroken,
    ) -> None:
        self._host = host
        self._book = MaskBook()
        self._tokens_from = tokens_from
        self._parents = FairParent(parent_of)
        self._broken = broken
        self._waiting_since: dict[Key, float] = {}
        self._wake = asyncio.Event()

    def add(self, key: Key, grammar: GrammarSpec) -> None:
        """Constrain a sequence from its first token on."""
        self._book.add(key, grammar)

    def end(self, key: Key) -> None:
        """The sequence is over."""
        self._waiting_since.pop(key, None)
        self._parents.forget(key)
        self._book.end(key)
        self._wake.set()

    def want(self, wanted: tuple[tuple[Key, int], ...]) -> None:
        """The engine waits for these masks (key, completion index)."""
        now = monotonic_s()
        for key, position in wanted:
            if key in self._book:
                self._book.want(key, position)
                self._waiting_since.setdefault(key, now)
        if wanted:
            self._wake.set()

    async def run(self) -> None:
        """Answer wants for ever. A sampler that asks back twice in a row is busy: wait a little."""
        delay, num_fruitless = 0.0, 0
        while True:
            if not self._book.has_work:
                self._wake.clear()
                await self._wake.wait()
            if delay:
                await asyncio.sleep(delay)
            try:
                num_fruitless = 0 if await self._ask() else num_fruitless + 1
                delay = _RETRY_S if num_fruitless > _MAX_FRUITLESS else 0.0
            except ServingError as error:
                self._host.metrics.count("finback.decode.mask_failures", code=error.code)
                self._give_up(error)
                delay = min(_MAX_RETRY_S, delay * 2 or _RETRY_S)

    async def _ask(self) -> bool:
        """True if it brought a mask (or an end)."""
        rows, ended = self._book.rows(self._tokens_from), self._book.take_ended()
        if not rows and not ended:
            return True
        request = MaskRequest(
            instance=self._host.instance,
            epoch=self._host.epoch,
            model=self._host.config.model_name,
            rows=rows,
            ended=ended,
        )
        if not rows:
            # Told for tidiness: a sampler that does not hear it forgets them by itself.
            subject = self._host.subjects.service("sampler", "mask")
            await self._host.client.publish(subject, request)
            return True
        parent = self._parents.choose([(row.request_id, row.choice) for row in rows])
        with tracing.span("mask", {"finback.num_rows": len(rows)}, parent=parent):
            reply = await self._host.client.call(
                self._host.subjects.service("sampler", "mask"),
                request,
                MaskReply,
                timeout_s=_TIMEOUT_S,
                request_id=rows[0].request_id,
            )
        answers = self._book.apply(reply.masks)
        for mask in answers.masks:
            self._waiting_since.pop(mask.key, None)
            self._provide(mask)
        for key, text in answers.broken:
            # All tokens came through its masks: it is the grammar that cannot be followed further.
            self._broken(key, "invalid_argument", f"the grammar cannot be used: {text}")
        self._give_up(None)
        return bool(answers.masks or answers.broken)

    def _provide(self, mask: Masked) -> None:
        try:
            self._host.engine.provide_mask(mask.key, mask.position, (mask.bitmask,))
        except InvalidRequest as error:  # a sampler of another vocabulary
            self._broken(mask.key, "internal", error.public_message)

    def _give_up(self, error: ServingError | None) -> None:
        """End the sequences that have waited too long (also for a sampler that only asks back)."""
        now = monotonic_s()
        for key in self._book.wanted_keys():
            if now - self._waiting_since.get(key, now) >= PATIENCE_S:
                code = "unavailable" if error is None else error.code
                self._broken(key, code, "the sampler service does not answer")
