"""What a key allows, from its line in the file. Pure.

Limits belong to the tenant: where its keys' lines differ, the strictest holds.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from finback.shared.errors import PermissionDenied

# `inference`: ask models. `usage`: read every tenant's usage. `admin`: everything.
SCOPES: Final = frozenset({"inference", "usage", "admin"})
TRAFFIC_CLASSES: Final = frozenset({"chat", "agent", "batch"})
# What every key may see, each for its own tenant.
_FREE_ENDPOINTS: Final = frozenset({"models", "models.retrieve", "usage"})
_LIMITS: Final = ("requests_per_min", "tokens_per_min", "max_concurrency")


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """0: no limit. None: as the settings say."""

    requests_per_min: int | None = None
    tokens_per_min: int | None = None
    max_concurrency: int | None = None

    def stricter(self, other: "TenantLimits") -> "TenantLimits":
        """Of each limit the smaller one that was given."""
        values = {name: _least(getattr(self, name), getattr(other, name)) for name in _LIMITS}
        return TenantLimits(**values)

    def or_else(self, other: "TenantLimits") -> "TenantLimits":
        """Of each limit the one that was given here, else the other's."""
        return TenantLimits(
            **{
                name: getattr(other, name) if mine is None else mine
                for name in _LIMITS
                for mine in (getattr(self, name),)
            }
        )

    @property
    def is_unlimited(self) -> bool:
        """Is there nothing to keep to."""
        return not (self.requests_per_min or self.tokens_per_min or self.max_concurrency)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """`expires`: Unix seconds, 0: never. `models` empty: all."""

    key_id: str = ""
    tenant: str = ""
    scopes: frozenset[str] = frozenset({"inference"})
    models: frozenset[str] = frozenset()
    expires: int = 0
    traffic_class: str = "chat"
    limits: TenantLimits = field(default_factory=TenantLimits)

    def may(self, scope: str) -> bool:
        """Whether the key has this scope."""
        return scope in self.scopes or "admin" in self.scopes

    def check_endpoint(self, endpoint: str) -> None:
        """Raises `PermissionDenied` if the key is not for this."""
        if endpoint not in _FREE_ENDPOINTS and not self.may("inference"):
            held = ", ".join(sorted(self.scopes)) or "none"
            raise PermissionDenied(
                f"This API key may not ask models: it has the scope {held}, not inference.",
                reason="scope",
            )

    def check_model(self, *names: str) -> None:
        """Raises `PermissionDenied` unless the key is for a model under one of its `names`."""
        if self.models and not self.models & set(names):
            raise PermissionDenied(
                f"This API key may not use the model {names[0]!r}.",
                param="model",
                reason="model_not_allowed",
            )


OPEN: Final = Grant(scopes=frozenset({"admin"}))


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyLine:
    """One line of the file."""

    digest: str
    is_revoked: bool
    grant: Grant


def read_line(line: str) -> KeyLine | None:
    """A line as written by `finback keys`, today or before keys had tenants; None: broken."""
    try:
        record = json.loads(line)
        return KeyLine(
            digest=str(record["hash"]).lower(),
            is_revoked=bool(record.get("revoked")),
            grant=_grant(record),
        )
    except (ValueError, KeyError, AttributeError, TypeError):
        return None


def grants_of(lines: Iterable[KeyLine]) -> Mapping[str, Grant]:
    """Hash to grant of the keys that are not revoked, each with its tenant's limits."""
    grants: dict[str, Grant] = {}
    for line in lines:
        if line.is_revoked:
            grants.pop(line.digest, None)
        else:
            grants[line.digest] = line.grant
    limits: dict[str, TenantLimits] = {}
    for grant in grants.values():
        limits[grant.tenant] = grant.limits.stricter(limits.get(grant.tenant, TenantLimits()))
    return {digest: replace(g, limits=limits[g.tenant]) for digest, g in grants.items()}


def _grant(record: Mapping[str, Any]) -> Grant:
    key_id = str(record["id"])
    scopes = frozenset(record.get("scopes") or ("inference",))
    traffic_class = record.get("traffic_class") or "chat"
    if not scopes <= SCOPES or traffic_class not in TRAFFIC_CLASSES:
        raise ValueError("unknown scope or class")
    return Grant(
        key_id=key_id,
        tenant=str(record.get("tenant") or key_id),
        scopes=scopes,
        models=frozenset(record.get("models") or ()),
        expires=int(record.get("expires") or 0),
        traffic_class=traffic_class,
        limits=TenantLimits(**{name: _limit(record.get(name)) for name in _LIMITS}),
    )


def _limit(value: object) -> int | None:
    if value is not None and (not isinstance(value, int) or value < 0):
        raise ValueError("a limit must be a whole number")
    return value


def _least(one: int | None, other: int | None) -> int | None:
    """The smaller limit; 0 is none at all, and thus the largest."""
    if one is None or other is None:
        return other if one is None else one
    return min(one, other) if one and other else one or other
