"""Which pair of instances gets a request. Pure: columns in, a placement out.

The cost of a pair is the estimated time to the first token, in seconds:

- at prefill: the prompt tokens that wait there and this prompt's own, less the cached ones, over
  the tokens a second that it was seen to compute; and the time to read what its host's memory or
  files hold of the prompt;
- on the way: the bytes that decode does not hold in its device pool;
- at decode: what runs and waits there, in the same measure, and a penalty without room for the KV.

A co-hosted instance only pairs with itself, and nothing is handed over. A decode instance that
lacks only a little of the prompt computes that itself (*conditional separation*): a hand-over would
take longer, and prefill would have to have the whole history first.

Since no term depends on both instances, the best pair is the best of each side, found by minima
over columns. Ties go to one of the equals, by `spread`.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from finback.services.router.fleet import Bools, Fleet, Floats, Ints, Worker

# A running sequence slows each step a little; a waiting one has to be finished first.
RUNNING_TOKENS: Final = 16
WAITING_TOKENS: Final = 128
# No place for the prompt's blocks means preemption: taken only if nothing else is there.
NO_BLOCKS_S: Final = 30.0
# More than a full queue: taken only if all queues are.
FULL_QUEUE_S: Final = 1_000.0
# An instance that has stopped reporting is chosen only if all have.
STALE_S: Final = 1_000_000.0
# What reading a block takes, measured coarsely on laptops: host memory, files, another process.
HOST_BYTES_PER_S: Final = 2e9
FILE_BYTES_PER_S: Final = 5e8
HAND_OVER_BYTES_PER_S: Final = 1e9
HAND_OVER_S: Final = 0.004  # reserve, the first ticket, its acknowledgement
MAX_LOCAL_TOKENS: Final = 256
"""Decode computes up to so many prompt tokens itself; they take rows of running answers' steps."""
MAX_FRESH_TOKENS: Final = 32
"""The same for a prompt of which decode's host holds nothing."""
# A conversation stays with its instance as long as it costs no more than this above the best.
AFFINITY_S: Final = 0.25
AFFINITY_SHARE: Final = 0.5
_TIE_S: Final = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """Per worker, leading blocks of the prompt: in the device pool, there or in its host's memory,
    there or in its host's files. So `device <= host <= file`, [num_workers] each."""

    device: Ints
    host: Ints
    file: Ints

    @classmethod
    def nothing(cls, num_workers: int) -> "Reach":
        zero = np.zeros(num_workers, dtype=np.int64)
        return cls(device=zero, host=zero, file=zero)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is to be placed. `kept`: the decode instance that knows the conversation."""

    num_prompt_tokens: int
    num_choices: int = 1
    max_queue: int = 2**30
    excluded: frozenset[str] = frozenset()
    kept: str = ""
    spread: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A choice and what spoke for it; `*_tokens` of the prompt, at the instance that computes.

    `is_local`: decode computes what it lacks, prefill hands nothing over.
    """

    prefill: Worker
    decode: Worker
    cost_s: float
    queue_s: float
    device_tokens: int
    host_tokens: int
    file_tokens: int
    num_candidates: int
    is_local: bool = False
    is_kept: bool = False

    @property
    def num_hit_tokens(self) -> int:
        """Expected not to be computed."""
        return self.device_tokens + self.host_tokens + self.file_tokens

    @property
    def kind(self) -> str:
        """One word for what spoke for it."""
        if self.is_kept:
            return "session"
        counts = (("device", self.device_tokens), ("host", self.host_tokens))
        best = max((*counts, ("file", self.file_tokens)), key=lambda item: item[1])
        return best[0] if best[1] else "load"

    def reason(self, num_prompt_tokens: int) -> str:
        """A sentence for the trace and the reply."""
        named = (("device", self.device_tokens), ("host", self.host_tokens))
        hits = [f"{k} hit {n}" for k, n in (*named, ("file", self.file_tokens)) if n]
        what = " + ".join(hits) if hits else "no hit"
        parts = [f"{what} of {num_prompt_tokens} tokens", f"queue {self.queue_s:.2f} s"]
        parts.append(f"first token in {self.cost_s:.2f} s, best of {self.num_candidates}")
        if self.is_kept:
            parts.append("same instance as the conversation before")
        if self.is_local:
            parts.append("decode computes the rest")
        return ", ".join(parts)


@dataclass(slots=True)
class _Costs:
    """Columns in seconds. `both`: a co-hosted instance; `local`: decode computes what it lacks."""

    prefill: Floats
    decode: Floats
    both: Floats
    local: Floats
    queue: Floats


def choose(fleet: Fleet, question: Question, reach: Reach) -> Placement | None:
    """The pair of least cost (or the conversation's, if it costs little more); None: no pair."""
    if not len(fleet):
        return None
    allowed = np.ones(len(fleet), dtype=np.bool_)
    if question.excluded:
        allowed[fleet.rows(question.excluded)] = False
    costs = _costs(fleet, question, reach)
    found = _best(fleet, costs, allowed, question.spread)
    if found is None:
        return None
    best_s, prefill, decode, is_local = found
    num_candidates = _num_pairs(fleet, allowed)
    kept = fleet.row_of.get(question.kept) if question.kept else None
    is_kept = False
    if kept is not None and allowed[kept] and fleet.is_decode[kept]:
        own = _best(fleet, costs, allowed, question.spread, decode=kept)
        if own is not None and own[0] <= best_s + max(AFFINITY_S, AFFINITY_SHARE * best_s):
            is_kept = True
            best_s, prefill, decode, is_local = own
    computes = decode if is_local else prefill
    tokens = _reach_tokens(fleet, question, reach, computes)
    return Placement(
        prefill=fleet.workers[prefill],
        decode=fleet.workers[decode],
        cost_s=best_s,
        queue_s=float(costs.queue[computes]),
        device_tokens=tokens[0],
        host_tokens=tokens[1] - tokens[0],
        file_tokens=tokens[2] - tokens[1],
        num_candidates=num_candidates,
        is_local=is_local,
        is_kept=is_kept,
    )


def _costs(fleet: Fleet, question: Question, reach: Reach) -> _Costs:
    prompt, size = question.num_prompt_tokens, fleet.block_size
    most = max(0, prompt - 1)  # the last token is always computed: it gives the first answer
    device = np.minimum(reach.device * size, most)
    host = np.minimum(reach.host * size, most)
    file = np.minimum(reach.file * size, most)
    speed, width = fleet.speed, fleet.token_bytes
    own = (prompt - file) / speed
    own += (host - device) * width / HOST_BYTES_PER_S + (file - host) * width / FILE_BYTES_PER_S
    queue = fleet.waiting_tokens / speed
    stale = fleet.is_stale * STALE_S
    busy = (fleet.num_running * RUNNING_TOKENS + fleet.num_waiting * WAITING_TOKENS) / speed
    needed = -(-prompt // size) + question.num_choices
    busy += (fleet.num_free + reach.device < needed) * NO_BLOCKS_S
    busy += (fleet.num_waiting >= question.max_queue) * FULL_QUEUE_S
    busy += stale
    hand_over = HAND_OVER_S + (most - device) * width / HAND_OVER_BYTES_PER_S
    local = busy + queue + own
    is_much = prompt - file > np.where(file > 0, MAX_LOCAL_TOKENS, MAX_FRESH_TOKENS)
    return _Costs(
        prefill=queue + own + stale,
        decode=busy + hand_over,
        both=local,
        local=np.where(is_much, np.inf, local),
        queue=queue,
    )


def _best(
    fleet: Fleet, costs: _Costs, allowed: Bools, spread: int, decode: int | None = None
) -> tuple[float, int, int, bool] | None:
    """(cost, prefill row, decode row, is local) of the cheapest pair, with this decode if given."""
    found: list[tuple[float, int, int, bool]] = []
    ok = allowed
    if decode is not None:
        ok = np.zeros_like(allowed)
        ok[decode] = True
    both = np.flatnonzero(fleet.is_cohosted & ok)
    if len(both):
        row = _least(costs.both, both, spread)
        found.append((float(costs.both[row]), row, row, False))
    for prefills, decodes in fleet.groups:
        givers, takers = prefills[allowed[prefills]], decodes[ok[decodes]]
        if not len(givers) or not len(takers):
            continue
        giver = _least(costs.prefill, givers, spread)
        taker = _least(costs.decode, takers, spread)
        cost_s = float(costs.prefill[giver] + costs.decode[taker])
        found.append((cost_s, giver, taker, False))
        taker = _least(costs.local, takers, spread)
        if costs.local[taker] < cost_s:
            found.append((float(costs.local[taker]), giver, taker, True))
    if not found:
        return None
    least_s = min(item[0] for item in found)
    equal = [item for item in found if item[0] <= least_s + _TIE_S]
    return equal[spread % len(equal)]


def _least(costs: Floats, rows: Ints, spread: int) -> int:
    mine = costs[rows]
    equal = rows[mine <= mine.min() + _TIE_S]
    return int(equal[spread % len(equal)])


def _num_pairs(fleet: Fleet, allowed: Bools) -> int:
    pairs = int(np.count_nonzero(fleet.is_cohosted & allowed))
    for prefills, decodes in fleet.groups:
        pairs += int(np.count_nonzero(allowed[prefills])) * int(np.count_nonzero(allowed[decodes]))
    return pairs


def _reach_tokens(fleet: Fleet, question: Question, reach: Reach, row: int) -> tuple[int, int, int]:
    """Prompt tokens up to which the device, the host and the files reach."""
    most, size = max(0, question.num_prompt_tokens - 1), int(fleet.block_size[row])
    device, host, file = (int(r[row]) * size for r in (reach.device, reach.host, reach.file))
    return min(device, most), min(host, most), min(file, most)
