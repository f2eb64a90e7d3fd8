"""Asks the sampler whether the beginning of an answer is a whole answer by its grammar."""

import asyncio
from array import array
from collections.abc import Sequence
from typing import Final

from finback.services.gateway.desk import Desk
from finback.services.gateway.generation import Choice, Generation
from finback.shared.actor.deadline import Deadline
from finback.shared.errors import DeadlineExceeded, Unavailable
from finback.shared.wire.messages.sampler import Mask, MaskReply, MaskRequest, MaskRow

_TIMEOUT_S: Final = 5.0
_RETRY_S: Final = 0.05
_SOON_S: Final = 0.001
# As long as decode waits for a mask.
_PATIENCE_S: Final = 30.0
_EPOCH: Final = 0


class WholeAnswers:
    """One answer's questions. The sampler knows each choice as a sequence of its own, so that what
    was told before need not be told again."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._told: dict[tuple[str, int], list[int]] = {}

    def ask(
        self, generation: Generation, choice: Choice, token_ids: Sequence[int]
    ) -> "asyncio.Task[bool]":
        """Are the first tokens of a choice a whole answer? Fails with `Unavailable`."""
        return asyncio.create_task(self._ask(generation, choice, list(token_ids)))

    async def close(self) -> None:
        """The sampler may forget the choices that it was asked about."""
        ended, self._told = tuple(self._told), {}
        if ended:
            await self._desk.publish(self._subject, self._request((), ended))

    @property
    def _subject(self) -> str:
        return self._desk.subjects.service("sampler", "mask")

    async def _ask(self, generation: Generation, choice: Choice, ids: list[int]) -> bool:
        grammar = generation.spec.grammar
        if grammar is None:
            return True
        key = (f"{generation.request_id}#stop", choice.index)
        start, has_grammar = _num_equal(self._told.get(key, ()), ids), False
        waiting = Deadline.after(_PATIENCE_S)
        while not waiting.is_expired:
            row = MaskRow(
                request_id=key[0],
                choice=key[1],
                grammar_id=grammar.grammar_id,
                position=start,
                token_ids=array("i", ids[start:]).tobytes(),
                grammar=grammar if has_grammar else None,
            )
            mask = await self._mask(row)
            if mask is None:
                await asyncio.sleep(_RETRY_S)
            elif mask.need_grammar:
                start, has_grammar = 0, True
                await asyncio.sleep(_SOON_S)
            elif mask.need_from is not None:
                start = min(mask.need_from, len(ids))
                await asyncio.sleep(_SOON_S)
            else:
                # What does not fit the grammar is no answer; the sampler has forgotten the choice.
                self._told[key] = [] if mask.error else ids
                return not mask.error and mask.is_accepting
        raise Unavailable(
            "the sampler service does not answer", reason="no_sampler", retry_after_s=1.0
        )

    async def _mask(self, row: MaskRow) -> Mask | None:
        """None: it did not answer, or left the row out."""
        try:
            reply = await self._desk.client.call(
                self._subject,
                self._request((row,), ()),
                MaskReply,
                timeout_s=_TIMEOUT_S,
                request_id=row.request_id,
            )
        except (Unavailable, DeadlineExceeded):
            return None
        return reply.masks[0] if reply.masks else None

    def _request(
        self, rows: tuple[MaskRow, ...], ended: tuple[tuple[str, int], ...]
    ) -> MaskRequest:
        return MaskRequest(
            instance=self._desk.instance,
            epoch=_EPOCH,
            model="",
            rows=rows,
            ended=ended,
        )


def _num_equal(known: Sequence[int], ids: Sequence[int]) -> int:
    """How many tokens both begin with."""
    for at, (ours, theirs) in enumerate(zip(known, ids, strict=False)):
        if ours != theirs:
            return at
    return min(len(known), len(ids))
