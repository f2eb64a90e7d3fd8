"""State of sequences in and out of the engine: handed over with a prompt, kept elsewhere, brought back.

All of it are copies on the host, so nothing here waits for the device; see `StateBook`.
"""

from collections.abc import Callable

from finback.shared.engine.sequence import Sequence, SequenceKey, State
from finback.shared.engine.state_book import NewSnapshot, StateBook
from finback.shared.engine.table import SequenceTable
from finback.shared.errors import InvalidRequest, NotFound
from finback.shared.kv.forget_scope import ForgetScope
from finback.shared.kv.state import StateSpec, read_header
from finback.shared.kv.state_policy import Start


class StatePort:
    """`Engine.states` of a model that keeps state beside its blocks."""

    def __init__(self, table: SequenceTable, book: StateBook, spec: StateSpec) -> None:
        self._table = table
        self._book = book
        self._spec = spec

    @property
    def payload_bytes(self) -> int:
        """Bytes of a snapshot (at a block's end)."""
        return self._spec.payload_bytes

    def payload_bytes_at(self, position: int) -> int:
        """Bytes of the state at any position."""
        return self._spec.payload_bytes_at(position)

    @property
    def num_replayed_tokens(self) -> int:
        """Tokens that were computed again because state was lost and blocks were not."""
        return self._book.num_replayed_tokens

    @property
    def num_snapshots(self) -> int:
        """Snapshots that are here now."""
        return len(self._book.pool)

    @property
    def on_snapshot(self) -> Callable[[Sequence, NewSnapshot], None] | None:
        """Hears of each snapshot that is kept; called while steps are committed, must be quick."""
        return self._book.on_snapshot

    @on_snapshot.setter
    def on_snapshot(self, listener: Callable[[Sequence, NewSnapshot], None] | None) -> None:
        self._book.on_snapshot = listener

    @property
    def on_begin(self) -> Callable[[str, int], None] | None:
        """See `StateBook`."""
        return self._book.on_begin

    @on_begin.setter
    def on_begin(self, listener: Callable[[str, int], None] | None) -> None:
        self._book.on_begin = listener

    # -- hand-over

    def export(self, key: SequenceKey) -> tuple[int, bytes] | None:
        """(position, payload) of a prompt in mode prefill that is complete; None: it left no state.

        Raises `NotFound` when the sequence is gone or not complete.
        """
        sequence = self._table.by_key.get(key)
        if sequence is None or sequence.state is not State.HELD:
            raise NotFound(f"the state of {key[0]} is not here")
        last, begun = sequence.last_state, sequence.start_state
        if last is not None and last[0] == sequence.target:
            return last
        if begun is not None and sequence.num_computed == sequence.target:
            return (sequence.target, begun)  # all of it was cached, nothing was computed
        return None

    def give(self, key: SequenceKey, payload: bytes) -> None:
        """Mode decode, before `activate`: the state at the prompt's end. Raises `NotFound`, `InvalidRequest`."""
        sequence = self._table.by_key.get(key)
        if sequence is None or sequence.state is not State.RESERVED:
            raise NotFound(f"{key[0]} takes no state any more")
        header = read_header(payload, self._spec)
        if header.position >= sequence.num_tokens:
            raise InvalidRequest(
                f"a state at {header.position} for a prompt of {sequence.num_tokens} tokens"
            )
        sequence.given_state = (header.position, payload)

    def export_snapshot(self, key: SequenceKey) -> bytes | None:
        """The snapshot that a complete prompt has left at the end of a block, for its other choices."""
        sequence = self._table.by_key.get(key)
        if sequence is None or not self._book.cut(sequence):
            return None
        count = self._book.cut(sequence) // self._table.config.block_size
        return self._book.pool.peek(self._table.pairs(sequence, count)[-1][0])

    def take_snapshot(self, key: SequenceKey, payload: bytes) -> bool:
        """Mode decode: keep what `export_snapshot` gave. Raises `NotFound`, `InvalidRequest`."""
        sequence = self._table.by_key.get(key)
        if sequence is None:
            raise NotFound(f"{key[0]} is not here")
        header, size = read_header(payload, self._spec), self._table.config.block_size
        if not 0 < header.position < sequence.num_tokens or header.position % size:
            raise InvalidRequest(f"a state at {header.position} is no snapshot of this prompt")
        block_hash, tokens = self._table.pairs(sequence, header.position // size)[-1]
        return self._book.put(block_hash, tokens, payload)

    # -- snapshots

    def best(self, num_kept: int, pairs: list[tuple[bytes, bytes]]) -> Start:
        """Where a prompt would begin with these leading blocks and the snapshots that are here."""
        return self._book.start_of(num_kept, pairs)

    def put(self, block_hash: bytes, tokens: bytes, position: int, payload: bytes) -> bool:
        """Keep a snapshot that was brought from elsewhere. Raises `InvalidRequest` if it does not fit."""
        header = read_header(payload, self._spec)
        if header.position != position:
            raise InvalidRequest(
                f"a state at {header.position} where one at {position} was expected"
            )
        return self._book.put(block_hash, tokens, payload)

    def find(self, block_hash: bytes) -> bytes | None:
        """A snapshot that is here, without using it."""
        return self._book.pool.peek(block_hash)

    def forget(self, scope: ForgetScope) -> None:
        """Drop snapshots; sequences keep what they run with. Of a tenant: all, none says whose."""
        if scope.tenant is None and scope.hashes:
            self._book.pool.discard(scope.hashes)
        else:
            self.clear()

    def clear(self) -> None:
        """Drop all snapshots; sequences keep what they run with."""
        self._book.pool.clear()
