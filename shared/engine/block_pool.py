"""Which KV block belongs to whom, and which prefix lies where. Pure: ids only, no tensor.

A block is *free* (nobody refers to it) or *held* (ref count above 0). A full, committed block may be
*registered* under its chained hash; a free registered block keeps its content and serves prefix hits
until it is evicted, least recently used first. Free blocks without content are taken before those.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from finback.shared.errors import InvariantViolated


class BlockPool:
    """Ref counts, prefix index and eviction order of `num_blocks` blocks.

    `on_change` hears (hash, True) when a block becomes findable and (hash, False) when it no longer is.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be positive, not {num_blocks}")
        self.num_blocks = num_blocks
        self.num_used = 0
        """Blocks 0 to this one have been handed out at some time; the others never."""
        self._ref = [0] * num_blocks
        # Key order is eviction order: blocks without content first, then by age.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._by_hash: dict[bytes, int] = {}
        # Hash, tokens, and what the chain of hashes began with.
        self._content: dict[int, tuple[bytes, bytes, bytes]] = {}
        self.on_change: Callable[[bytes, bool], None] | None = None

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` could hand out (evicting what they cache)."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Registered blocks, free or held."""
        return len(self._content)

    def match(self, blocks: Iterable[tuple[bytes, bytes]]) -> list[int]:
        """The longest registered prefix of `blocks`, pairs (chained hash, token bytes).

        Tokens are compared, so a hash collision never serves wrong KV. Nothing is acquired.
        """
        found = []
        for block_hash, token_bytes in blocks:
            block_id = self._by_hash.get(block_hash)
            if block_id is None or self._content[block_id][1] != token_bytes:
                break
            found.append(block_id)
        return found

    def find(self, block_hash: bytes) -> tuple[int, bytes] | None:
        """(block, token bytes) of a registered block."""
        block_id = self._by_hash.get(block_hash)
        return None if block_id is None else (block_id, self._content[block_id][1])

    def hashes(self) -> list[bytes]:
        """All that is findable now."""
        return list(self._by_hash)

    def count_free(self, block_ids: Iterable[int]) -> int:
        """How many of these are free now, so that acquiring them shrinks `num_free`."""
        return sum(block_id in self._free for block_id in block_ids)

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each (matched) block."""
        for block_id in block_ids:
            if self._ref[block_id] == 0:
                del self._free[block_id]
            self._ref[block_id] += 1

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Take `num_blocks` blocks with one reference each, or None (and take nothing)."""
        if num_blocks > len(self._free):
            return None
        taken = []
        for _ in range(num_blocks):
            block_id, _unused = self._free.popitem(last=False)
            self._drop_content(block_id)
            self._ref[block_id] = 1
            self.num_used = max(self.num_used, block_id + 1)
            taken.append(block_id)
        return taken

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop a reference from each. The end of a sequence is evicted before its beginning."""
        for block_id in reversed(block_ids):
            if self._ref[block_id] < 1:
                raise InvariantViolated(f"KV block {block_id} was freed twice")
            self._ref[block_id] -= 1
            if self._ref[block_id] == 0:
                self._free[block_id] = None
                self._free.move_to_end(block_id, last=block_id in self._content)

    def register(
        self, block_id: int, block_hash: bytes, token_bytes: bytes, cache_salt: bytes = b""
    ) -> bool:
        """Make a held, full block findable; False if its hash already is (the first one stays)."""
        if self._ref[block_id] < 1:
            raise InvariantViolated(f"free KV block {block_id} was registered")
        if block_id in self._content:
            raise InvariantViolated(f"KV block {block_id} was registered twice")
        if block_hash in self._by_hash:
            return False
        self._by_hash[block_hash] = block_id
        self._content[block_id] = (block_hash, token_bytes, cache_salt)
        if self.on_change is not None:
            self.on_change(block_hash, True)
        return True

    def unregister(self, block_ids: Iterable[int]) -> None:
        """Make blocks unfindable (their content is not to be trusted)."""
        for block_id in block_ids:
            self._drop_content(block_id)
            if block_id in self._free:
                self._free.move_to_end(block_id, last=False)

    def forget(self, is_forgotten: Callable[[bytes, bytes], bool]) -> None:
        """Make blocks unfindable by (hash, cache salt); those that sequences hold stay theirs."""
        doomed = [
            block_id
            for block_id, (block_hash, _, cache_salt) in self._content.items()
            if is_forgotten(block_hash, cache_salt)
        ]
        self.unregister(doomed)

    def ref_count(self, block_id: int) -> int:
        """References to a block."""
        return self._ref[block_id]

    def check_integrity(self) -> None:
        """Raise `InvariantViolated` if the books do not add up. Cost: O(num_blocks)."""
        free = {block_id for block_id, count in enumerate(self._ref) if count == 0}
        if free != set(self._free):
            raise InvariantViolated("the free list is not the set of blocks without references")
        if {self._by_hash[item[0]] for item in self._content.values()} != set(self._content):
            raise InvariantViolated("the prefix index and the block contents disagree")
        if len(self._by_hash) != len(self._content):
            raise InvariantViolated("the prefix index names blocks without content")

    def _drop_content(self, block_id: int) -> None:
        content = self._content.pop(block_id, None)
        if content is not None:
            del self._by_hash[content[0]]
            if self.on_change is not None:
                self.on_change(content[0], False)
