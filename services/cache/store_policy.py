"""The settings of the store in one place, and what is worth keeping at all. Pure."""

from dataclasses import dataclass, field
from typing import Final

from finback.services.cache.retention import Retention
from finback.shared.config import StackConfig
from finback.shared.lanes.arena_format import BlockKind, TrafficClass

_SKETCH_NAMES: Final = 65_536  # of one of the two halves


@dataclass(frozen=True, slots=True, kw_only=True)
class StorePolicy:
    """What the store goes by. Bytes are those of whole slots; 0: no limit."""

    retention: Retention = field(default_factory=Retention)
    arena_bytes: int = 2**30
    state_bytes: int = 2**27
    tenant_bytes: int = 0
    min_prefix_blocks: int = 0
    is_batch_kept: bool = True
    is_kept_on_second_sight: bool = False


def store_policy(config: StackConfig) -> StorePolicy:
    """The policy that the settings ask for."""
    return StorePolicy(
        retention=Retention(
            agent_s=round(config.cache_retention_agent_s),
            chat_s=round(config.cache_retention_chat_s),
            batch_s=round(config.cache_retention_batch_s),
            state_s=round(config.cache_retention_state_s),
            max_s=round(config.cache_retention_max_s),
        ),
        arena_bytes=config.arena_bytes,
        state_bytes=config.cache_state_bytes or config.arena_bytes // 8,
        tenant_bytes=config.cache_tenant_bytes,
        min_prefix_blocks=config.cache_min_prefix_blocks,
        is_batch_kept=config.cache_keep_batch,
        is_kept_on_second_sight=config.cache_second_sight,
    )


class SeenBefore:
    """Names that were offered lately. Bounded: two halves, the older is dropped when one is full.

    A name counts as seen if one of 64 bits of its hash was; what is forgotten is merely stored a
    time later.
    """

    def __init__(self, half: int = _SKETCH_NAMES) -> None:
        self._half = half
        self._young: set[bytes] = set()
        self._old: set[bytes] = set()

    def add(self, digest: bytes) -> bool:
        """Remember a name; True if it was known."""
        mark = digest[:8]
        is_known = mark in self._young or mark in self._old
        self._young.add(mark)
        if len(self._young) >= self._half:
            self._young, self._old = set(), self._young
        return is_known


def is_class_wanted(policy: StorePolicy, kind: BlockKind, traffic_class: TrafficClass) -> bool:
    """Whether anything of that class is kept."""
    return (
        kind is BlockKind.STATE or traffic_class is not TrafficClass.BATCH or policy.is_batch_kept
    )


def is_prefix_wanted(policy: StorePolicy, kind: BlockKind, prompt_blocks: int) -> bool:
    """Whether a prompt of so many full blocks is long enough."""
    return kind is BlockKind.STATE or prompt_blocks >= policy.min_prefix_blocks
