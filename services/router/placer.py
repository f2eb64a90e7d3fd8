"""Places one request: who holds its prompt, who has room, who knows the conversation. No I/O."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final
from zlib import crc32

from finback.services.router.admission import Limits, has_room, refusal
from finback.services.router.fleet import Fleet
from finback.services.router.fleet_book import FleetBook
from finback.services.router.load_book import LoadBook, Open
from finback.services.router.notes import Note, PlacementNotes, depths
from finback.services.router.policy import (
    MAX_LOCAL_TOKENS,
    Placement,
    Question,
    choose,
)
from finback.services.router.prefix_index import PrefixIndex, Segments
from finback.services.router.reach import ReachBook
from finback.services.router.sessions import SessionTable
from finback.shared.errors import Unavailable
from finback.shared.wire.messages.control import InstanceRecord
from finback.shared.wire.messages.route import RouteRequest

# A placement is believed until its blocks should have been heard of.
_NOTE_SLACK_S: Final = 5.0
_NOTE_MAX_S: Final = 60.0
Records = Callable[[], Iterable[InstanceRecord]]


# Not frozen: see `Reach`.
@dataclass(slots=True, kw_only=True)
class Decision:
    """`reach_blocks`: of the prompt, at the instance that computes: device, host, file."""

    placement: Placement
    reason: str
    kind: str
    reach_blocks: list[int]

    @property
    def decode_computes_tokens(self) -> int:
        """What the gateway passes on to prefill; see `RouteReply`."""
        return MAX_LOCAL_TOKENS if self.placement.is_local else 0


class Placer:
    """All that a router knows, and what it makes of it."""

    def __init__(self, *, max_age_s: float, max_queue: int, max_blocks: int) -> None:
        self.loads = LoadBook(max_age_s=max_age_s)
        self.fleets = FleetBook(self.loads)
        self.index = PrefixIndex(max_blocks)
        self.reaches = ReachBook(self.index)
        self.notes = PlacementNotes()
        self.sessions = SessionTable()
        self.limits = Limits(max_queue=max_queue)

    def place(
        self,
        request: RouteRequest,
        keys: Sequence[int],
        segments: Segments | None,
        records: Records,
        now_s: float,
    ) -> Decision:
        """Choose and take note; see `decide`."""
        noted = self.notes.look(keys)
        decision = self.decide(request, keys, segments, noted, records, now_s)
        self.remember(request, decision.placement, keys, noted, now_s)
        return decision

    def remember(
        self,
        request: RouteRequest,
        placement: Placement,
        keys: Sequence[int],
        noted: Sequence[tuple[Note, int]],
        now_s: float,
    ) -> None:
        """Count a placement as load, and its blocks as soon held."""
        self._note(request, placement, now_s)
        self._note_blocks(placement, keys, noted, now_s)

    def decide(
        self,
        request: RouteRequest,
        keys: Sequence[int],
        segments: Segments | None,
        noted: Sequence[tuple[Note, int]],
        records: Records,
        now_s: float,
    ) -> Decision:
        """Choose; nothing is remembered. `noted`: own placements with the same beginning.
        `segments` None: the index is not to be trusted yet; then load and `noted` count.

        Raises `Overloaded`, `InvalidRequest` or `Unavailable` when there is no place.
        """
        fleet = self.fleets.fleet(request.model, records, now_s)
        self._refuse(fleet, request, records, now_s)
        held = depths(noted, now_s)
        reach = self.reaches.of(fleet).reach(segments or [], held)
        question = Question(
            num_prompt_tokens=request.num_prompt_tokens,
            num_choices=request.num_choices,
            max_queue=self.limits.max_queue,
            excluded=frozenset(request.exclude),
            kept=self._kept(fleet, request, now_s),
            spread=crc32(request.request_id.encode()),
        )
        found = choose(fleet, question, reach)
        if found is None:
            raise Unavailable(
                f"no prefill and decode instance free for {request.model}", reason="no_instance"
            )
        row = fleet.row_of[(found.decode if found.is_local else found.prefill).instance]
        reason = found.reason(request.num_prompt_tokens)
        if segments is None:
            reason += ", by load and own placements only: the index is not rebuilt yet"
        return Decision(
            placement=found,
            reason=reason,
            kind="unsynced" if segments is None else found.kind,
            reach_blocks=reach.blocks[:, row].tolist(),
        )

    def _refuse(self, fleet: Fleet, request: RouteRequest, records: Records, now_s: float) -> None:
        sizes = {
            "num_prompt_tokens": request.num_prompt_tokens,
            "num_choices": request.num_choices,
        }
        if has_room(fleet, self.limits, **sizes, excluded=request.exclude):
            return
        self.fleets.refresh_all()
        fleet = self.fleets.fleet(request.model, records, now_s)
        workers = [w for w in fleet.workers if w.instance not in request.exclude]
        refused = refusal(workers, self.limits, **sizes)
        if refused is not None:
            raise refused

    def _kept(self, fleet: Fleet, request: RouteRequest, now_s: float) -> str:
        """The instance that knows the conversation, if it still lives the same life."""
        known = self.sessions.find(request.tenant, request.session, now_s)
        if known is None:
            return ""
        row = fleet.row_of.get(known[0])
        return known[0] if row is not None and fleet.workers[row].epoch == known[1] else ""

    def _note_blocks(
        self,
        found: Placement,
        keys: Sequence[int],
        noted: Sequence[tuple[Note, int]],
        now_s: float,
    ) -> None:
        prefill, decode = found.prefill, found.decode
        until_s = now_s + min(_NOTE_MAX_S, found.cost_s + _NOTE_SLACK_S)
        computes = (decode,) if found.is_local else (decode, prefill)
        holders = dict.fromkeys((w.instance, w.epoch) for w in computes)
        self.notes.note(keys, noted, holders, until_s, now_s)

    def _note(self, request: RouteRequest, found: Placement, now_s: float) -> None:
        prefill, decode = found.prefill, found.decode
        self.sessions.note(request.tenant, request.session, decode.instance, decode.epoch, now_s)
        placement = Open(
            prefill=decode.instance if found.is_local else prefill.instance,
            decode=decode.instance,
            num_tokens=request.num_prompt_tokens - found.num_hit_tokens,
            num_choices=request.num_choices,
            placed_s=now_s,
            attempt=request.attempt,
        )
        self.loads.placed(request.request_id, placement)
        self.fleets.placed(placement)
