"""Whose prefix a chain of hashes is: the tenant's, or a part of what the tenant has."""


def cache_salt_of(tenant: str, cache_salt: str | None) -> str:
    """What a prompt's chain begins with: the same for the prompt's hashes and for the engines.

    Lengths are told, so that no tenant can spell another's salt.
    """
    return f"{len(tenant)}:{tenant}:{cache_salt}" if cache_salt else tenant


def is_salt_of(cache_salt: bytes, tenant: str) -> bool:
    """Whether a chain that begins with this is the tenant's, whatever he has separated of it."""
    own = tenant.encode()
    return cache_salt == own or cache_salt.startswith(b"%d:%s:" % (len(tenant), own))
