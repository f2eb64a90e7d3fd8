"""Erasing blocks for good, and waiting until that is on the disk."""

from collections.abc import Sequence
from typing import Final

from finback.services.cache.segments.record import Entry
from finback.services.cache.segments.state import State
from finback.shared.errors import Unavailable

_BATCH: Final = 1000


def forget(
    state: State, *, tenant: str | None, salt: str | None, hashes: Sequence[bytes] | None
) -> int:
    """Erase all blocks that fit what is given; returns how many. Raises `Unavailable`.

    Other writers' blocks leave this index only: each writer has to be told.
    """
    num_gone = 0
    with state.writing:
        while found := state.run(
            lambda: state.index.matching(tenant=tenant, salt=salt, hashes=hashes, limit=_BATCH)
        ):
            num_gone += _erase(state, found)
        state.flush()
    return num_gone


def _erase(state: State, found: Sequence[Entry]) -> int:
    if state.is_read_only and any(entry.is_own for entry in found):
        raise Unavailable("the file tier cannot be written, so nothing is forgotten")
    try:
        return state.erase(found, "forgotten", is_final=True)
    except OSError as error:
        raise Unavailable(f"cannot forget: {error.strerror or error}") from None
