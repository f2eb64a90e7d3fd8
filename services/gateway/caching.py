"""What a request says about the KV cache: whose blocks may serve it, and how long its own are kept."""

from dataclasses import dataclass
from typing import Annotated, Final, Literal, Protocol, TypeAlias

from pydantic import Field

MAX_CACHE_SALT_CHARS: Final = 128
MAX_CACHE_KEY_CHARS: Final = 512

TrafficClass: TypeAlias = Literal["agent", "chat", "batch"]
Retention: TypeAlias = Literal["in_memory", "in-memory", "24h"]
CacheKey: TypeAlias = Annotated[str, Field(max_length=MAX_CACHE_KEY_CHARS)]
CacheSalt: TypeAlias = Annotated[str, Field(min_length=1, max_length=MAX_CACHE_SALT_CHARS)]

# As long as OpenAI says that prompts stay: in memory up to an hour, else a day.
_RETENTION_S: Final = {"in_memory": 3_600.0, "in-memory": 3_600.0, "24h": 86_400.0}


class CachingFields(Protocol):
    """The fields of a request body that this is about."""

    @property
    def prompt_cache_key(self) -> str | None: ...
    @property
    def prompt_cache_retention(self) -> Retention | None: ...
    @property
    def traffic_class(self) -> TrafficClass | None: ...
    @property
    def cache_salt(self) -> str | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Caching:
    """`traffic_class` empty: the API key's. `retention_s` None: as the traffic class says.

    `session` names the conversation, empty if it has no name. `cache_salt` separates its blocks
    from all others of the tenant.
    """

    traffic_class: str = ""
    retention_s: float | None = None
    session: str = ""
    cache_salt: str = ""


NO_CACHING: Final = Caching()


def caching_of(request: CachingFields, *, conversation: str = "", cache_salt: str = "") -> Caching:
    """`conversation`, `cache_salt`: where the request gives no key or salt of its own."""
    key = request.prompt_cache_key
    retention = request.prompt_cache_retention
    return Caching(
        traffic_class=request.traffic_class or "",
        retention_s=_RETENTION_S[retention] if retention else None,
        session=f"key:{key}" if key else conversation,
        cache_salt=request.cache_salt or cache_salt,
    )
