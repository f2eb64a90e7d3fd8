"""A prompt's parts in groups, each with a digest of everything up to its end.

Two prompts with the same digest at a border have the same ids up to it: groups end where a part
ends, or where text can be cut without changing its tokens. A group is as long as it takes to be
worth remembering, counted from the start, so prompts that begin alike are grouped alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from finback.shared.codec.control_tokens import ControlToken
from finback.shared.codec.safe_cuts import PIECE_CHARS, safe_pieces

GROUP_CHARS: Final = 1_024
DIGEST_BYTES: Final = 16
_TOKEN_CHARS: Final = 8

Part = str | ControlToken


@dataclass(frozen=True, slots=True)
class Group:
    """`digest`: of these parts and of all groups before."""

    parts: tuple[Part, ...]
    digest: bytes


def grouped(parts: Sequence[Part], *, salt: bytes, is_cuttable: bool) -> list[Group]:
    """The groups of a prompt. Digests of different salts never meet; text is cut if it may be."""
    groups: list[Group] = []
    kept: list[Part] = []
    digest = blake2b(salt, digest_size=DIGEST_BYTES).digest()
    num_chars = 0
    for part in _cut(parts) if is_cuttable else parts:
        kept.append(part)
        num_chars += len(part) if isinstance(part, str) else _TOKEN_CHARS
        if num_chars >= GROUP_CHARS:
            digest = _digest(digest, kept)
            groups.append(Group(tuple(kept), digest))
            kept, num_chars = [], 0
    if kept:
        groups.append(Group(tuple(kept), _digest(digest, kept)))
    return groups


def _cut(parts: Sequence[Part]) -> list[Part]:
    pieces: list[Part] = []
    for part in parts:
        if isinstance(part, str) and len(part) > PIECE_CHARS:
            pieces.extend(safe_pieces(part))
        else:
            pieces.append(part)
    return pieces


def _digest(before: bytes, parts: Sequence[Part]) -> bytes:
    """Each part with its kind and length in front, so that no two lists read the same."""
    state = blake2b(before, digest_size=DIGEST_BYTES)
    for part in parts:
        if isinstance(part, str):
            raw = part.encode()
            state.update(b"t%d:" % len(raw))
            state.update(raw)
        else:
            state.update(b"c%d:" % part.token_id)
    return state.digest()
