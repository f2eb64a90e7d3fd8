"""The arena as a store: blocks that are kept under their name, and found again by it.

Synchronous and quick: microseconds a block, no file is touched but the mapped arena.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from finback.services.cache.arena import (
    LEASE_MS,
    MAX_BLOCK_BYTES,
    MAX_BLOCKS,
    Arena,
    check_range,
    lease_id_of,
)
from finback.services.cache.block_names import (
    MAX_READ,
    checked_hashes,
    hashes_of,
    tenant_digest,
)
from finback.services.cache.clocks import Clocks
from finback.services.cache.elsewhere import Elsewhere
from finback.services.cache.kept import Now
from finback.services.cache.pin_book import Pin, PinBook
from finback.services.cache.retention import (
    block_kind,
    clamped,
    is_expired,
    stored_again,
    touched,
    traffic_class,
)
from finback.services.cache.slots import Lease, SlotKey, block_name, size_class
from finback.services.cache.store_policy import (
    SeenBefore,
    StorePolicy,
    is_class_wanted,
    is_prefix_wanted,
)
from finback.services.cache.top_prefixes import TopPrefixes
from finback.shared.actor.fence import Fence
from finback.shared.errors import Unavailable
from finback.shared.lanes.arena_format import (
    BlockKind,
    BlockLabel,
    SlotHeader,
    SlotState,
    TrafficClass,
)
from finback.shared.wire.messages.cache import CommitRequest
from finback.shared.wire.messages.cache_store import ReadRequest, StoreReply, StoreRequest

_MAX_U32: Final = 2**32 - 1


@dataclass(frozen=True, slots=True)
class Found:
    """The leading run of what was asked for that lies in memory, and why it ends."""

    keys: list[SlotKey]
    miss: str = ""


class KvStore:
    """Stores, finds, pins and forgets blocks of one arena."""

    def __init__(self, arena: Arena, policy: StorePolicy) -> None:
        self.arena = arena
        self.policy = policy
        self._book = arena.book
        self._kept = arena.kept
        self._fence = Fence()
        self._epochs: dict[str, int] = {}
        self._seen = SeenBefore()
        self.pins = PinBook(arena.folder)
        self.top = TopPrefixes()
        self.elsewhere: Elsewhere | None = None
        self._adopt_pins()
        self.refused: Counter[str] = Counter()  # blocks not stored, by cause, not yet fetched
        self.clocks = Clocks()
        # Told of blocks (salt, hash) whose time begins anew.
        self.on_renewed: Callable[[str, bytes], None] | None = None

    # --- store

    def store(self, request: StoreRequest, now: Now) -> StoreReply:
        """Slots for those blocks that are worth keeping and not kept yet."""
        kind = block_kind(request.kind)
        class_ = traffic_class(request.traffic_class)
        hashes = checked_hashes(request.salt, request.hashes, MAX_BLOCKS)
        check_range("payload_bytes", request.payload_bytes, 1, MAX_BLOCK_BYTES)
        check_range("lease_ms", request.lease_ms, *LEASE_MS)
        check_range("first_block", request.first_block, 0, _MAX_U32 - MAX_BLOCKS)
        retention_s = self.policy.retention.seconds(kind, class_, request.retention_s)
        self._check_fences(request.owner, request.owner_epoch, request.request_id, request.attempt)
        lease = self._book.lease(
            lease_id_of(request.lease_id),
            request.owner,
            request.owner_epoch,
            request.lease_ms,
            now.mono_s,
        )
        labels = [
            BlockLabel(
                salt=request.salt,
                hash=digest,
                kind=kind,
                block_index=request.first_block + index,
                tenant=tenant_digest(request.tenant),
                traffic_class=class_,
                retention_s=retention_s,
            )
            for index, digest in enumerate(hashes)
        ]
        fresh = self._fresh(labels, lease, now)
        prompt_blocks = request.prompt_blocks or request.first_block + len(hashes)
        wanted = self._wanted(fresh, prompt_blocks)
        slot_bytes = size_class(request.payload_bytes)
        wanted = self._with_room(wanted, slot_bytes, now)
        self._book.reserve_labelled(lease, wanted, slot_bytes)
        found = self._book.open_slots(lease, labels)
        self.refused["full"] += sum(label.hash not in found for label in wanted)
        slots = {at: found[digest] for at, digest in enumerate(hashes) if digest in found}
        return StoreReply(
            lease_id=lease.lease_id,
            slots=tuple(self.arena.slot(key, request.payload_bytes) for key in slots.values()),
            indexes=tuple(slots),
        )

    def commit(self, request: CommitRequest, now: Now) -> list[SlotKey]:
        """Make written slots readable; returns those that are kept from now on."""
        keys = self.arena.commit(request, now.mono_s, now.wall_s)
        self._keep(keys, self._book.opened_s(request.lease_id, now.mono_s))
        return keys

    def reserve_known(
        self,
        lease_id: str,
        labels: list[BlockLabel],
        payload_bytes: int,
        *,
        owner: str,
        owner_epoch: int,
        now: Now,
    ) -> dict[bytes, SlotKey]:
        """Slots, by hash, for blocks that this process itself will write."""
        lease = self._book.lease(lease_id, owner, owner_epoch, LEASE_MS[1], now.mono_s)
        slot_bytes = size_class(payload_bytes)
        wanted = self._with_room(self._fresh(labels, lease, now), slot_bytes, now)
        self._book.reserve_labelled(lease, wanted, slot_bytes)
        return self._book.open_slots(lease, labels)

    def commit_known(
        self, lease_id: str, written: Sequence[tuple[SlotKey, int, bytes]], now: Now
    ) -> None:
        """(slot, length, checksum) of what this process has written."""
        self._keep(self._book.commit(lease_id, written, now.mono_s, used_s=now.wall_s), now.mono_s)

    def _keep(self, keys: Sequence[SlotKey], used_s: float) -> None:
        for key in keys:
            self._kept.used(key, used_s)
            label = self._book.header(key).label
            if label is not None and (label.salt, label.hash) in self.pins:
                self.set_pinned(key, True)

    def _fresh(self, labels: Sequence[BlockLabel], lease: Lease, now: Now) -> list[BlockLabel]:
        """Those whose name has no slot; those that are kept are worth more from now on."""
        pool = self._book.index.pool(labels[0].salt, labels[0].kind)
        fresh = []
        for label in labels:
            key = pool.get(label.hash)
            if key is None:
                fresh.append(label)
                continue
            header = self._book.header(key)
            if header.state is not SlotState.KEPT:
                continue
            if is_expired(header, now.wall_s) and not self._book.is_held(key):
                self._book.drop(key, "expired")
                fresh.append(label)
                continue
            again = stored_again(header, label.traffic_class, label.retention_s, now.wall_s)
            self._kept.used(key, lease.opened_s)
            self._rewrite(key, header, again)
        return fresh

    def _wanted(self, labels: list[BlockLabel], prompt_blocks: int) -> list[BlockLabel]:
        if not labels:
            return labels
        kind, class_ = labels[0].kind, labels[0].traffic_class
        cause = ""
        if not is_class_wanted(self.policy, kind, class_):
            cause = "class"
        elif not is_prefix_wanted(self.policy, kind, prompt_blocks):
            cause = "short"
        if cause:
            self.refused[cause] += len(labels)
            return []
        if kind is BlockKind.BLOCK:
            labels = [label for label in labels if not self._is_elsewhere(label)]
        if kind is BlockKind.BLOCK and self.policy.is_kept_on_second_sight:
            known = [label for label in labels if self._seen.add(label.hash)]
            self.refused["first_sight"] += len(labels) - len(known)
            return known
        return labels

    def _is_elsewhere(self, label: BlockLabel) -> bool:
        """Whether another cache has it, and that is enough."""
        if self.elsewhere is None or (label.salt, label.hash) in self.pins:
            return False
        is_there = self.elsewhere.holds(label.salt, label.hash)
        self.refused["elsewhere"] += is_there
        return is_there

    def _with_room(self, labels: list[BlockLabel], slot_bytes: int, now: Now) -> list[BlockLabel]:
        """Those for which there is room, within the budgets, after older ones were given up."""
        if not labels:
            return labels
        label = labels[0]
        self.sweep(now)
        asked = len(labels)
        if self.policy.tenant_bytes:
            labels = labels[: self._under_quota(label.tenant, asked, slot_bytes)]
        if label.kind is BlockKind.STATE:
            labels = labels[: self._under_state_budget(len(labels), slot_bytes)]
        self.refused["quota"] += asked - len(labels)
        is_batch = label.traffic_class is TrafficClass.BATCH
        max_class = TrafficClass.BATCH if is_batch else TrafficClass.AGENT
        # A block gives way to a state below its budget, a state never to a block.
        is_state = label.kind is BlockKind.STATE
        for kind in (BlockKind.BLOCK, BlockKind.STATE) if is_state else (BlockKind.BLOCK,):
            self.arena.room.make(slot_bytes, len(labels), kind=kind, max_class=max_class)
        return labels

    def _under_quota(self, tenant: bytes, num_blocks: int, slot_bytes: int) -> int:
        limit = self.policy.tenant_bytes
        num_blocks = min(num_blocks, limit // slot_bytes)
        while self._kept.tenant_bytes[tenant] + num_blocks * slot_bytes > limit:
            victim = self._kept.victim_of(tenant)
            if victim is None:
                room = limit - self._kept.tenant_bytes[tenant]
                return max(0, room // slot_bytes)
            self._book.drop(victim, "quota")
        return num_blocks

    def _under_state_budget(self, num_slots: int, slot_bytes: int) -> int:
        limit = self.policy.state_bytes
        num_slots = min(num_slots, limit // slot_bytes)
        while self._kept.kind_bytes(BlockKind.STATE) + num_slots * slot_bytes > limit:
            victim = self._kept.oldest_of_kind(BlockKind.STATE)
            if victim is None:
                return max(0, (limit - self._kept.kind_bytes(BlockKind.STATE)) // slot_bytes)
            self._book.drop(victim[1], "budget")
        return num_slots

    # --- find

    def leading_run(self, salt: str, hashes: Sequence[bytes], kind: BlockKind, now: Now) -> int:
        """How many of the first blocks lie in memory without a gap."""
        pool = self._book.index.pool(salt, kind)
        header_of, kept, wall_s = self._book.header, SlotState.KEPT, now.wall_s
        for count, digest in enumerate(hashes):
            key = pool.get(digest)
            if key is None:
                return count
            header = header_of(key)
            if header.state is not kept or is_expired(header, wall_s):
                return count
        return len(hashes)

    def is_held(self, salt: str, digest: bytes, now: Now) -> bool:
        """Whether the block lies in memory and may be read."""
        return bool(self.leading_run(salt, (digest,), BlockKind.BLOCK, now))

    def touch(self, salt: str, hashes: Sequence[bytes], now: Now) -> None:
        """These blocks are about to be used: what lies in memory is not to go first."""
        pool = self._book.index.pool(salt, BlockKind.BLOCK)
        for digest in hashes:
            key = pool.get(digest)
            if key is None:
                return
            header = self._book.header(key)
            if header.state is SlotState.KEPT and not self._book.is_held(key):
                self._kept.used(key, now.mono_s)
                self._kept.idle(key, header)

    def pin_run(self, request: ReadRequest, now: Now, *, is_again: bool = False) -> Found:
        """The leading run of what lies in memory, held by the request's lease from now on.

        `is_again`: the same read was tried before.
        """
        kind = block_kind(request.kind)
        hashes = checked_hashes(request.salt, request.hashes, MAX_READ)
        check_range("lease_ms", request.lease_ms, *LEASE_MS)
        num_found = self.leading_run(request.salt, hashes, kind, now)
        lease = self._book.lease(
            lease_id_of(request.lease_id),
            request.owner,
            request.owner_epoch,
            request.lease_ms,
            now.mono_s,
        )
        pool = self._book.index.pool(request.salt, kind)
        keys = [pool[digest] for digest in hashes[:num_found]]
        if kind is BlockKind.BLOCK and not is_again:
            self._count_prefix(request.salt, hashes, keys)
        self._book.pin(lease, keys)
        for key in keys:
            header = self._book.header(key)
            self._kept.busy(key, header)
            self._kept.used(key, lease.opened_s)
            after = touched(header, now.wall_s)
            if after is not None:
                self._book.rewrite(key, after)
                if self.on_renewed is not None and header.label is not None:
                    self.on_renewed(header.label.salt, header.label.hash)
        if num_found == len(hashes):
            return Found(keys)
        return Found(keys, self.why_missing(request.salt, hashes[num_found], kind, now))

    def _count_prefix(self, salt: str, hashes: Sequence[bytes], keys: Sequence[SlotKey]) -> None:
        label = self._book.header(keys[0]).label if keys else None
        if label is not None and label.block_index == 0:
            self.top.add(salt, hashes[0], len(keys))

    def why_missing(self, salt: str, digest: bytes, kind: BlockKind, now: Now) -> str:
        """The cause of a miss in memory: `absent`, `expired`, `evicted`, `corrupt` or `busy`."""
        key = self._book.index.pool(salt, kind).get(digest)
        if key is None:
            why = self._kept.why_gone(block_name(salt, digest, kind))
            return why if why in ("absent", "expired", "corrupt") else "evicted"
        header = self._book.header(key)
        return "busy" if header.state is not SlotState.KEPT else "expired"

    # --- give up

    def sweep(self, now: Now, max_blocks: int = 1024) -> int:
        """Give up blocks whose time is over, up to so many; returns how many."""
        for count in range(max_blocks):
            key = self._kept.expired(now.wall_s)
            if key is None:
                return count
            self._book.drop(key, "expired")
        return max_blocks

    def drop_corrupt(self, salt: str, digest: bytes, generation: int) -> bool:
        """A reader's copy was not what was stored; False if that slot is gone already."""
        for kind in BlockKind:
            key = self._book.index.pool(salt, kind).get(digest)
            if key is None:
                continue
            header = self._book.header(key)
            if header.state is SlotState.KEPT and header.generation == generation:
                self._book.drop(key, "corrupt")
                return True
        return False

    def give_up(self, keys: Iterable[SlotKey], reason: str) -> int:
        """Drop kept slots, and do not keep those that are being written; returns their number."""
        num_slots = 0
        for key in keys:
            if self._book.header(key).state is SlotState.KEPT:
                self._book.drop(key, reason)
            else:
                self._book.unlabel(key)
            num_slots += 1
        return num_slots

    # --- pins

    def pin(self, name: str, salt: str, hashes: bytes) -> tuple[int, int]:
        """Name a prefix that is never given up; (blocks, of these in memory now)."""
        found = hashes_of(salt, hashes)
        before = self.pins.pin(name, salt, found)
        if before is not None:
            self._apply_pins(*before)
        return len(found), self._apply_pins(salt, found)

    def unpin(self, name: str) -> None:
        """Let the prefix go its way; NotFound if there is none of that name."""
        self._apply_pins(*self.pins.unpin(name))

    def merge_pins(self, others: Mapping[str, Pin]) -> dict[str, Pin]:
        """Take over pins that only the files know; returns those that they do not know."""
        for name, (salt, hashes) in others.items():
            if name not in self.pins.pins:
                self.pins.pin(name, salt, hashes)
                self._apply_pins(salt, hashes)
        return {name: pin for name, pin in self.pins.pins.items() if name not in others}

    def num_held(self, salt: str, hashes: Iterable[bytes]) -> int:
        """How many of these blocks are in memory."""
        pool = self._book.index.pool(salt, BlockKind.BLOCK)
        return sum(digest in pool for digest in hashes)

    def _apply_pins(self, salt: str, hashes: Iterable[bytes]) -> int:
        pool = self._book.index.pool(salt, BlockKind.BLOCK)
        keys = [(digest, pool[digest]) for digest in hashes if digest in pool]
        for digest, key in keys:
            self.set_pinned(key, (salt, digest) in self.pins)
        return len(keys)

    def _adopt_pins(self) -> None:
        kept = [(k, h) for k, h in self._book.slots() if h.state is SlotState.KEPT and h.label]
        if self.pins.is_damaged:
            labels = [header.label for _, header in kept if header.is_pinned]
            self.pins.recover((label.salt, label.hash) for label in labels if label)
        for key, header in kept:
            if header.label:
                self.set_pinned(key, (header.label.salt, header.label.hash) in self.pins)

    def set_pinned(self, key: SlotKey, is_pinned: bool) -> None:
        """Keep a block whatever its age, or no longer so."""
        header = self._book.header(key)
        if header.state is SlotState.KEPT and header.is_pinned is not is_pinned:
            self._rewrite(key, header, replace(header, is_pinned=is_pinned))

    # --- more

    def clock_went_back(self, now: Now) -> int:
        """Nothing is kept longer than its time from now on; returns the number of blocks changed."""
        num_changed = 0
        for key, header in list(self._book.slots()):
            after = clamped(header, now.wall_s) if header.state is SlotState.KEPT else None
            if after is not None:
                self._rewrite(key, header, after)
                num_changed += 1
        return num_changed

    def _rewrite(self, key: SlotKey, before: SlotHeader, after: SlotHeader) -> None:
        self._kept.busy(key, before)
        if before.label and after.label and before.label != after.label:
            self._kept.relabelled(key, before.label, after.label)
        self._book.rewrite(key, after)
        if not self._book.is_held(key):
            self._kept.idle(key, after)

    def _check_fences(self, owner: str, epoch: int, request_id: str, attempt: int) -> None:
        newest = self._epochs.get(owner, epoch)
        if epoch < newest:
            raise Unavailable("a later process has this owner's name", reason="superseded")
        if len(self._epochs) > 4096:
            self._epochs.clear()
        self._epochs[owner] = max(newest, epoch)
        if not self._fence.admit(request_id, attempt):
            raise Unavailable("superseded by a later attempt", reason="superseded")
