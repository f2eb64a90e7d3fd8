"""Encoded prompts that are remembered, so that the next turn of a conversation costs its own text.

A prompt is found by the longest beginning that it shares with a remembered one; see
`prompt_groups.py` for what a beginning is. The memory is bounded, the least recently used goes
first. Salts keep callers apart: nobody can time what another one has sent.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

DEFAULT_BYTES: Final = 8 * 2**20
# What a border costs beside the arrays: its digest, twice referred to, and a pair.
_BORDER_BYTES: Final = 250


@dataclass(frozen=True, slots=True)
class Border:
    """A place in a prompt: the digest of all before it, and how many tokens that is."""

    digest: bytes
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A whole prompt: int32 LE ids, the hashes of its full blocks, and its borders in order.

    `cache_salt` is what the chain of hashes begins with: whose prompt it is.
    """

    token_ids: bytes
    block_hashes: bytes
    borders: tuple[Border, ...]
    cache_salt: str = ""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // 4

    @property
    def num_bytes(self) -> int:
        return len(self.token_ids) + len(self.block_hashes) + _BORDER_BYTES * len(self.borders)


@dataclass(frozen=True, slots=True)
class Hit:
    """`prompt` begins with the first `num_groups` groups that were asked for, `num_tokens` tokens."""

    prompt: Encoded
    num_groups: int
    num_tokens: int


class EncodeCache:
    """Thread-safe."""

    def __init__(self, max_bytes: int = DEFAULT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        # By the digest of the last border, least recently used first.
        self._prompts: OrderedDict[bytes, Encoded] = OrderedDict()
        self._index: dict[bytes, tuple[Encoded, int]] = {}
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """The memory that is in use, about."""
        return self._num_bytes

    def find(self, digests: Sequence[bytes]) -> Hit | None:
        """The longest remembered beginning of the prompt whose groups have these digests."""
        with self._lock:
            for at in range(len(digests) - 1, -1, -1):
                found = self._index.get(digests[at])
                if found is not None:
                    prompt, num_tokens = found
                    self._prompts.move_to_end(prompt.borders[-1].digest)
                    return Hit(prompt, at + 1, num_tokens)
        return None

    def keep(self, prompt: Encoded, hit: Hit | None) -> None:
        """Remember a prompt. It replaces the one it was found by, if it holds most of that."""
        if not prompt.borders or prompt.num_bytes > self._max_bytes:
            return
        with self._lock:
            self._drop(prompt.borders[-1].digest)
            if hit is not None and 2 * hit.num_tokens > hit.prompt.num_tokens:
                self._drop(hit.prompt.borders[-1].digest)
            while self._prompts and self._num_bytes + prompt.num_bytes > self._max_bytes:
                self._drop(next(iter(self._prompts)))
            self._prompts[prompt.borders[-1].digest] = prompt
            self._num_bytes += prompt.num_bytes
            for border in prompt.borders:
                self._index[border.digest] = (prompt, border.num_tokens)

    def forget(self, is_forgotten: Callable[[Encoded], bool]) -> int:
        """Drop prompts; returns how many."""
        with self._lock:
            doomed = [name for name, prompt in self._prompts.items() if is_forgotten(prompt)]
            for name in doomed:
                self._drop(name)
        return len(doomed)

    def _drop(self, last_digest: bytes) -> None:
        prompt = self._prompts.pop(last_digest, None)
        if prompt is None:
            return
        self._num_bytes -= prompt.num_bytes
        for border in prompt.borders:
            holder = self._index.get(border.digest)
            if holder is not None and holder[0] is prompt:
                del self._index[border.digest]
