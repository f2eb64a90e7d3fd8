"""A rendered prompt to its ids and block hashes; what was encoded before is not encoded again."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from finback.shared.codec.encode_cache import Border, EncodeCache, Encoded, Hit
from finback.shared.codec.fast_encoder import joined
from finback.shared.codec.prompt_groups import Group, Part, grouped
from finback.shared.codec.tokenizer import Tokenizer
from finback.shared.kv import block_hash
from finback.shared.kv.forget_scope import ForgetScope

# Shorter prompts are encoded in less time than remembering them is worth.
_MIN_TOKENS: Final = 256


class PromptEncoder:
    """Encodes for one model. Thread-safe."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        block_size: int,
        cluster_key: bytes,
        model_digest: str,
        cache: EncodeCache | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._block_size = block_size
        self._key = cluster_key
        self._digest = model_digest
        self._cache = cache or EncodeCache()

    def encode(self, parts: Sequence[Part], tenant: str) -> Encoded:
        """The prompt of a tenant; beginnings are shared with his own earlier prompts only."""
        salt = self._salt(tenant)
        groups = grouped(parts, salt=salt, is_cuttable=self._tokenizer.is_cuttable)
        hit = self._cache.find([group.digest for group in groups])
        if hit is not None and hit.num_groups == len(groups):
            return self._beginning(hit)
        made = self._continued(groups, hit, tenant)
        if made.num_tokens >= _MIN_TOKENS:
            self._cache.keep(made, hit)
        return made

    def hashed(self, token_ids: Sequence[int], tenant: str) -> Encoded:
        """A prompt that came as ids."""
        data = np.asarray(token_ids, dtype="<i4").tobytes()
        return Encoded(token_ids=data, block_hashes=self._hashes(b"", data, tenant), borders=())

    def forget(self, scope: ForgetScope) -> int:
        """Drop what is remembered of prompts with any of these blocks; returns how many."""
        return self._cache.forget(lambda prompt: _is_covered(prompt, scope))

    def _salt(self, tenant: str) -> bytes:
        return f"{self._digest}/{tenant}".encode()

    def _continued(self, groups: list[Group], hit: Hit | None, tenant: str) -> Encoded:
        fresh = groups[hit.num_groups if hit is not None else 0 :]
        ids = self._tokenizer.encode_parts([part for group in fresh for part in group.parts])
        borders = list(hit.prompt.borders[: hit.num_groups]) if hit is not None else []
        at, num_tokens = 0, hit.num_tokens if hit is not None else 0
        for group in fresh:
            num_tokens += sum(map(len, ids[at : at + len(group.parts)]))
            at += len(group.parts)
            borders.append(Border(group.digest, num_tokens))
        known = memoryview(hit.prompt.token_ids)[: 4 * hit.num_tokens] if hit is not None else b""
        data = b"".join((known, joined(ids).astype("<i4", copy=False).tobytes()))
        hashes = self._hashes(self._known_hashes(hit) if hit is not None else b"", data, tenant)
        return Encoded(
            token_ids=data, block_hashes=hashes, borders=tuple(borders), cache_salt=tenant
        )

    def _beginning(self, hit: Hit) -> Encoded:
        return Encoded(
            token_ids=hit.prompt.token_ids[: 4 * hit.num_tokens],
            block_hashes=self._known_hashes(hit),
            borders=hit.prompt.borders[: hit.num_groups],
        )

    def _known_hashes(self, hit: Hit) -> bytes:
        num_blocks = hit.num_tokens // self._block_size
        return hit.prompt.block_hashes[: block_hash.HASH_BYTES * num_blocks]

    def _hashes(self, known: bytes, data: bytes, tenant: str) -> bytes:
        """All block hashes of `data`, of whose first blocks they are known."""
        width = block_hash.HASH_BYTES
        parent = known[-width:] or block_hash.prompt_root(
            self._key, tenant.encode(), self._block_size
        )
        rest = data[4 * self._block_size * (len(known) // width) :]
        return known + b"".join(block_hash.extend_all(parent, rest, self._block_size, self._key))


def _is_covered(prompt: Encoded, scope: ForgetScope) -> bool:
    salt, width = prompt.cache_salt.encode(), block_hash.HASH_BYTES
    hashes = prompt.block_hashes
    names = [hashes[at : at + width] for at in range(0, len(hashes), width)]
    return any(scope.covers(name, salt) for name in names or [b""])
