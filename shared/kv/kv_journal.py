"""What one process tells of its KV blocks: changes become numbered events, holdings become pages. Pure.

A block has one state at a time, held or not, so changes that wait are kept as the last one of each
block. A snapshot may therefore be newer than its number says: the events behind it tell the same
again, and the last word on a block is the true one.
"""

import secrets
from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

from finback.shared.errors import InvalidRequest, NotFound
from finback.shared.kv.block_hash import HASH_BYTES
from finback.shared.wire.messages.kv import (
    KvEvents,
    KvHoldings,
    KvSnapshotReply,
    KvSnapshotRequest,
)

MAX_PENDING: Final = 65_536
"""Changes that may wait; with more, a number is skipped and listeners ask for a snapshot."""
MAX_HASHES: Final = 4_096  # in one event: 128 KiB
MAX_PAGE: Final = 16_384  # in one page: 512 KiB
MAX_SNAPSHOTS: Final = 4  # that are open at once
SNAPSHOT_LIFE_S: Final = 30.0

Holding = tuple[str, str, Collection[bytes]]
"""(salt, tier, hashes of 32 bytes each)."""


class KvJournal:
    """Changes that are not told yet, and the number of the last message."""

    def __init__(
        self, *, service: str, instance: str, epoch: int, max_pending: int = MAX_PENDING
    ) -> None:
        self._service, self._instance, self._epoch = service, instance, epoch
        self._max_pending = max_pending
        # By (salt, tier): hash -> is it held now.
        self._pending: dict[tuple[str, str], dict[bytes, bool]] = {}
        self._num_pending = 0
        self._is_reset = False
        self.seq = 0
        self.num_overflows = 0

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not self._num_pending and not self._is_reset

    def stored(self, salt: str, tier: str, hashes: Iterable[bytes]) -> None:
        """These blocks are held now."""
        self._changed(salt, tier, dict.fromkeys(hashes, True))

    def removed(self, salt: str, tier: str, hashes: Iterable[bytes]) -> None:
        """These blocks are not held any more."""
        self._changed(salt, tier, dict.fromkeys(hashes, False))

    def reset(self) -> None:
        """Nothing is held any more, whatever was told before."""
        self._pending.clear()
        self._num_pending = 0
        self._is_reset = True

    def skip(self) -> None:
        """Drop what waits and skip a number: whoever listens misses it and asks for a snapshot."""
        self.reset()
        self._is_reset = False
        self.seq += 1
        self.num_overflows += 1

    def take(self) -> list[KvEvents]:
        """The messages that tell everything that waits."""
        events = []
        for (salt, tier), changes in self._pending.items():
            items = list(changes.items())
            for start in range(0, len(items), MAX_HASHES):
                part = items[start : start + MAX_HASHES]
                events.append(
                    self._event(
                        salt,
                        tier,
                        stored=b"".join(h for h, is_held in part if is_held),
                        removed=b"".join(h for h, is_held in part if not is_held),
                    )
                )
        if self._is_reset and not events:
            events.append(self._event("", ""))
        self._pending.clear()
        self._num_pending = 0
        return events

    def beat(self) -> KvEvents:
        """An empty message: whoever missed the one before it notices."""
        return self._event("", "")

    def _event(self, salt: str, tier: str, stored: bytes = b"", removed: bytes = b"") -> KvEvents:
        self.seq += 1
        is_reset, self._is_reset = self._is_reset, False
        return KvEvents(
            service=self._service,
            instance=self._instance,
            epoch=self._epoch,
            seq=self.seq,
            salt=salt,
            tier=tier,
            stored=stored,
            removed=removed,
            is_reset=is_reset,
        )

    def _changed(self, salt: str, tier: str, changes: dict[bytes, bool]) -> None:
        pending = self._pending.setdefault((salt, tier), {})
        before = len(pending)
        pending.update(changes)
        self._num_pending += len(pending) - before
        if self._num_pending > self._max_pending:
            self.skip()


@dataclass(slots=True)
class _Snapshot:
    """Frozen holdings, cut into pages as they are asked for. `seq`: the last event before it."""

    seq: int
    holdings: list[tuple[str, str, list[bytes]]]
    until_s: float

    def page(self, start: int, max_blocks: int) -> tuple[tuple[KvHoldings, ...], int]:
        """Holdings from block number `start` on, and the number behind them (-1: no more)."""
        found, end = [], start
        for salt, tier, hashes in self.holdings:
            if start >= len(hashes):
                start -= len(hashes)
                continue
            part = hashes[start : start + max_blocks]
            found.append(KvHoldings(salt=salt, tier=tier, hashes=b"".join(part)))
            end += len(part)
            max_blocks -= len(part)
            start = 0
            if not max_blocks:
                break
        is_last = end >= sum(len(hashes) for _, _, hashes in self.holdings)
        return tuple(found), -1 if is_last else end


class SnapshotDesk:
    """Open snapshots by a token that is part of their cursors; few, and for a short time."""

    def __init__(self, *, epoch: int) -> None:
        self._epoch = epoch
        self._open: OrderedDict[str, _Snapshot] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def answer(
        self, request: KvSnapshotRequest, holdings: Iterable[Holding], seq: int, now_s: float
    ) -> KvSnapshotReply:
        """One page; `holdings` and `seq` are those of now, looked at for a first page only.

        Raises `NotFound` for a cursor that ran out: the asker begins again.
        """
        self.sweep(now_s)
        if request.cursor:
            token, start = _parse(request.cursor)
            snapshot = self._open.get(token)
            if snapshot is None:
                raise NotFound("this snapshot has run out", param="cursor", reason="cursor")
        else:
            token, start = secrets.token_hex(8), 0
            frozen = [(salt, tier, list(hashes)) for salt, tier, hashes in holdings]
            snapshot = _Snapshot(seq, frozen, now_s + SNAPSHOT_LIFE_S)
        page, end = snapshot.page(start, min(max(1, request.max_blocks), MAX_PAGE))
        self._keep(token, snapshot, end, now_s)
        return KvSnapshotReply(
            epoch=self._epoch,
            seq=snapshot.seq,
            holdings=page,
            next_cursor="" if end < 0 else f"{token}:{end}",
        )

    def sweep(self, now_s: float) -> None:
        """Let go what nobody has asked for lately."""
        gone = [token for token, snapshot in self._open.items() if snapshot.until_s < now_s]
        for token in gone:
            del self._open[token]

    def _keep(self, token: str, snapshot: _Snapshot, end: int, now_s: float) -> None:
        # The last page's reply may be lost, so its snapshot stays until its time is over.
        if end < 0 and token not in self._open:
            return
        snapshot.until_s = now_s + SNAPSHOT_LIFE_S
        self._open[token] = snapshot
        self._open.move_to_end(token)
        while len(self._open) > MAX_SNAPSHOTS:
            self._open.popitem(last=False)


def split(joined: bytes) -> list[bytes]:
    """Hashes of 32 bytes each; raises `ValueError` for another length."""
    if len(joined) % HASH_BYTES:
        raise ValueError(f"hashes must be a multiple of {HASH_BYTES} bytes, not {len(joined)}")
    return [joined[i : i + HASH_BYTES] for i in range(0, len(joined), HASH_BYTES)]


def _parse(cursor: str) -> tuple[str, int]:
    token, _, start = cursor.partition(":")
    if not start.isdecimal() or len(start) > 12:
        raise InvalidRequest("cursor must be one of this instance", param="cursor")
    return token, int(start)
