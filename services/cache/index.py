"""Which slot holds the block of a name, and which names a salt, a tenant or everybody has. Pure."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from finback.services.cache.slots import BlockName, SlotKey, name_of
from finback.shared.kv.block_hash import HASH_BYTES
from finback.shared.lanes.arena_format import BlockLabel


class BlockIndex:
    """Names of blocks that are kept or being written; a name has one slot at most."""

    def __init__(self) -> None:
        # By (salt, kind), so that a run of hashes costs one short look-up each.
        self._pools: dict[tuple[str, int], dict[bytes, SlotKey]] = {}
        self._tenants: defaultdict[bytes, set[SlotKey]] = defaultdict(set)

    def __len__(self) -> int:
        return sum(len(pool) for pool in self._pools.values())

    def get(self, name: BlockName) -> SlotKey | None:
        """The slot of `name`."""
        return self._pools.get(name[:2], {}).get(name[2])

    def pool(self, salt: str, kind: int) -> dict[bytes, SlotKey]:
        """Slots of one salt by hash; to be read only."""
        return self._pools.get((salt, kind), {})

    def add(self, label: BlockLabel, key: SlotKey) -> bool:
        """Take in a slot; False if the name has one already."""
        pool = self._pools.setdefault((label.salt, label.kind), {})
        if pool.setdefault(label.hash, key) != key:
            return False
        self._tenants[label.tenant].add(key)
        return True

    def remove(self, label: BlockLabel, key: SlotKey) -> bool:
        """Take out a slot; False if the name was not this slot's."""
        pool = self._pools.get((label.salt, label.kind), {})
        if pool.get(label.hash) != key:
            return False
        del pool[label.hash]
        if not pool:
            del self._pools[label.salt, label.kind]
        owned = self._tenants[label.tenant]
        owned.discard(key)
        if not owned:
            del self._tenants[label.tenant]
        return True

    def tenant(self, digest: bytes) -> set[SlotKey]:
        """Slots of one tenant; a copy."""
        return set(self._tenants.get(digest, ()))

    def salts(self, kind: int) -> list[str]:
        """Salts of which there is anything of that kind."""
        return [salt for salt, of in self._pools if of == kind]

    def salt(self, salt: str) -> list[SlotKey]:
        """Slots of one salt, of all kinds."""
        found: list[SlotKey] = []
        for (name, _), pool in self._pools.items():
            if name == salt:
                found += pool.values()
        return found

    def items(self) -> Iterator[tuple[BlockName, SlotKey]]:
        """Everything."""
        for (salt, kind), pool in self._pools.items():
            for digest, key in pool.items():
                yield (salt, kind, digest), key

    def is_at(self, label: BlockLabel, key: SlotKey) -> bool:
        """Whether the label's name leads to this slot."""
        return self.get(name_of(label)) == key


def split_hashes(hashes: bytes) -> list[bytes]:
    """Hashes that travelled joined, 32 bytes each; ValueError if the length does not fit."""
    if len(hashes) % HASH_BYTES:
        raise ValueError(f"{len(hashes)} bytes are no whole number of {HASH_BYTES}-byte hashes")
    return [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]


def leading_run(pool: dict[bytes, SlotKey], hashes: Sequence[bytes]) -> int:
    """How many of the first hashes are in the pool without a gap."""
    for count, digest in enumerate(hashes):
        if digest not in pool:
            return count
    return len(hashes)
