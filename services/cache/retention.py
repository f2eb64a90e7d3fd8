"""For how long blocks are kept, by what they are and whose. Pure; times are wall-clock seconds."""

import math
from dataclasses import dataclass, replace
from typing import Final

from finback.shared.errors import InvalidRequest
from finback.shared.lanes.arena_format import BlockKind, SlotHeader, TrafficClass

# How stale the last use in a header may be, as a share of the block's retention, and at most.
_TOUCH_SHARE: Final = 8
_TOUCH_S: Final = 60.0

CLASSES: Final = {
    "batch": TrafficClass.BATCH,
    "chat": TrafficClass.CHAT,
    "agent": TrafficClass.AGENT,
}
KINDS: Final = {"block": BlockKind.BLOCK, "state": BlockKind.STATE}


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Seconds by class; 0: no time is promised, the block stays while there is room."""

    agent_s: int = 3 * 86_400
    chat_s: int = 7 * 86_400
    batch_s: int = 0
    state_s: int = 180
    max_s: int = 30 * 86_400

    def seconds(
        self, kind: BlockKind, traffic_class: TrafficClass, asked_s: float | None = None
    ) -> int:
        """For what is stored now; what a request asks for goes first, up to `max_s`."""
        if asked_s is not None:
            if not math.isfinite(asked_s) or asked_s < 0:
                raise InvalidRequest("retention_s must be 0 or more", param="retention_s")
            return min(math.ceil(asked_s), self.max_s)
        if kind is BlockKind.STATE:
            return self.state_s
        by_class = (self.batch_s, self.chat_s, self.agent_s)
        return by_class[traffic_class]


def traffic_class(name: str) -> TrafficClass:
    """The class of that name; InvalidRequest names those there are."""
    try:
        return CLASSES[name]
    except KeyError:
        known = ", ".join(CLASSES)
        raise InvalidRequest(
            f"traffic_class must be one of {known}, not {name[:40]!r}", param="traffic_class"
        ) from None


def block_kind(name: str) -> BlockKind:
    """The kind of that name; InvalidRequest names those there are."""
    try:
        return KINDS[name]
    except KeyError:
        known = ", ".join(KINDS)
        raise InvalidRequest(
            f"kind must be one of {known}, not {name[:40]!r}", param="kind"
        ) from None


def is_expired(header: SlotHeader, wall_s: float) -> bool:
    """Whether a kept block's time is over; a pinned one's never is."""
    return 0.0 < header.expiry_s <= wall_s and not header.is_pinned


def touched(header: SlotHeader, wall_s: float) -> SlotHeader | None:
    """The header after a use now: its time begins anew. None if that need not be written yet."""
    retention_s = header.label.retention_s if header.label else 0
    step_s = min(_TOUCH_S, retention_s / _TOUCH_SHARE) if retention_s else _TOUCH_S
    if abs(wall_s - header.used_s) < step_s:
        return None
    expiry_s = wall_s + retention_s if retention_s else 0.0
    return replace(header, used_s=wall_s, expiry_s=expiry_s)


def stored_again(
    header: SlotHeader, traffic_class: TrafficClass, retention_s: int, wall_s: float
) -> SlotHeader:
    """The header when the block is offered once more: the longer time and the higher class win."""
    label = header.label
    if label is None:
        return header
    longest = max(label.retention_s, retention_s)
    label = replace(
        label,
        traffic_class=max(label.traffic_class, traffic_class),
        retention_s=longest,
    )
    expiry_s = max(header.expiry_s, wall_s + longest) if longest else 0.0
    return replace(header, label=label, used_s=wall_s, expiry_s=expiry_s)


def clamped(header: SlotHeader, wall_s: float) -> SlotHeader | None:
    """The header after the wall clock went back: nothing is kept longer than from now on.

    None if it is right already.
    """
    retention_s = header.label.retention_s if header.label else 0
    expiry_s = min(header.expiry_s, wall_s + retention_s)
    used_s = min(header.used_s, wall_s)
    if (expiry_s, used_s) == (header.expiry_s, header.used_s):
        return None
    return replace(header, expiry_s=expiry_s, used_s=used_s)
