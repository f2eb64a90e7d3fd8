"""Which cached prefixes are to be forgotten: all, a tenant's, or blocks by name. Pure."""

from dataclasses import dataclass

from finback.shared.kv.block_hash import HASH_BYTES
from finback.shared.kv.cache_salt import is_salt_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetScope:
    """Any one of these is enough; none of them means everything."""

    tenant: str | None = None
    hashes: frozenset[bytes] = frozenset()

    @property
    def is_all(self) -> bool:
        """Whether nothing is spared."""
        return self.tenant is None and not self.hashes

    def covers(self, block_hash: bytes, cache_salt: bytes) -> bool:
        """Whether a block is meant; `cache_salt` is what its chain begins with."""
        if self.is_all or block_hash in self.hashes:
            return True
        return self.tenant is not None and is_salt_of(cache_salt, self.tenant)


EVERYTHING = ForgetScope()


def forget_scope(tenant: str | None, hashes: bytes) -> ForgetScope:
    """From what travels: hashes joined, 32 bytes each. ValueError if they are no whole number."""
    if len(hashes) % HASH_BYTES:
        raise ValueError(f"{len(hashes)} bytes are no whole number of {HASH_BYTES}-byte hashes")
    names = (hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES))
    return ForgetScope(tenant=tenant, hashes=frozenset(names))
