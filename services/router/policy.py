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

from finback.services.router.fleet import Fleet, Floats, Int32s, Ints, Sides, Worker

# No place for the prompt's blocks means preemption: taken only if nothing else is there.
NO_BLOCKS_S: Final = 30.0
# More than a full queue: taken only if all queues are.
FULL_QUEUE_S: Final = 1_000.0
HAND_OVER_S: Final = 0.004  # reserve, the first ticket, its acknowledgement
MAX_LOCAL_TOKENS: Final = 256
"""Decode computes up to so many prompt tokens itself; they take rows of running answers' steps."""
MAX_FRESH_TOKENS: Final = 32
"""The same for a prompt of which decode's host holds nothing."""
# A conversation stays with its instance as long as it costs no more than this above the best.
AFFINITY_S: Final = 0.25
AFFINITY_SHARE: Final = 0.5
_TIE_S: Final = 1e-9
Pair = tuple[float, int, int, bool]
"""(cost, prefill row, decode row, is local)."""


# Not frozen, as all that is made for every request: freezing trebles what making one costs.
@dataclass(slots=True)
class Reach:
    """`blocks` [3, num_workers]: leading blocks of the prompt that each worker can use from its
    device pool, from there or its host's memory, from there or its host's files: none is shorter
    than the one before."""

    blocks: Int32s

    @classmethod
    def nothing(cls, num_workers: int) -> "Reach":
        return cls(np.zeros((3, num_workers), dtype=np.int32))


@dataclass(slots=True, kw_only=True)
class Question:
    """What is to be placed. `kept`: the decode instance that knows the conversation."""

    num_prompt_tokens: int
    num_choices: int = 1
    max_queue: int = 2**30
    excluded: frozenset[str] = frozenset()
    kept: str = ""
    spread: int = 0


@dataclass(slots=True, kw_only=True)
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
    """Columns in seconds: all is computed at decode, or one side of a hand-over.

    `local`: as `whole` where decode may compute what it lacks; None: nowhere.
    """

    whole: Floats
    prefill: Floats
    decode: Floats
    local: Floats | None


def choose(fleet: Fleet, question: Question, reach: Reach) -> Placement | None:
    """The pair of least cost (or the conversation's, if it costs little more); None: no pair."""
    if not len(fleet):
        return None
    tokens = _reach_tokens(fleet, question, reach)
    costs = _costs(fleet, question, reach, tokens)
    sides = fleet.sides(question.excluded)
    both, pairs = _candidates(sides, costs, question.spread)
    found = _cheapest([*both, *(pair for group in pairs for pair in group)], question.spread)
    if found is None:
        return None
    is_kept = False
    kept = fleet.row_of.get(question.kept) if question.kept else None
    if kept is not None and fleet.is_decode[kept] and question.kept not in question.excluded:
        own = _kept(fleet, sides, costs, pairs, kept, question.spread)
        if own is not None and own[0] <= found[0] + max(AFFINITY_S, AFFINITY_SHARE * found[0]):
            is_kept, found = True, own
    cost_s, prefill, decode, is_local = found
    computes = decode if is_local else prefill
    device, host, file = tokens[:, computes].tolist()
    return Placement(
        prefill=fleet.workers[prefill],
        decode=fleet.workers[decode],
        cost_s=cost_s,
        queue_s=float(fleet.queue_s[computes]),
        device_tokens=device,
        host_tokens=host - device,
        file_tokens=file - host,
        num_candidates=sides.num_pairs,
        is_local=is_local,
        is_kept=is_kept,
    )


def _reach_tokens(fleet: Fleet, question: Question, reach: Reach) -> Ints:
    """[3, num_workers]; the last token is always computed: it gives the first answer."""
    tokens: Ints = np.minimum(
        reach.blocks * fleet.block_sizes, max(0, question.num_prompt_tokens - 1)
    )
    return tokens


def _costs(fleet: Fleet, question: Question, reach: Reach, tokens: Ints) -> _Costs:
    prompt = question.num_prompt_tokens
    own = prompt * fleet.token_s
    own += fleet.queue_s
    own -= np.einsum("tw,tw->w", tokens, fleet.saved_s)
    busy = fleet.busy_s
    if not fleet.is_roomy(prompt, question.num_choices, question.max_queue):
        busy = busy + _crowded(fleet, question, reach)
    whole = busy + own
    if not fleet.groups:
        return _Costs(whole, own, busy, whole)
    own += fleet.stale_s
    hand_over = max(0, prompt - 1) - tokens[0]
    decode = hand_over * fleet.hand_over_token_s
    decode += HAND_OVER_S
    decode += busy
    return _Costs(whole, own, decode, _local(prompt, tokens[2], whole))


def _local(prompt: int, file: Ints, whole: Floats) -> Floats | None:
    """What it costs where decode may compute what it lacks."""
    if prompt - int(file[file.argmax()]) > MAX_LOCAL_TOKENS:
        return None
    limit = np.where(file > 0, MAX_LOCAL_TOKENS, MAX_FRESH_TOKENS)
    local: Floats = np.where(prompt - file > limit, np.inf, whole)
    return local


def _crowded(fleet: Fleet, question: Question, reach: Reach) -> Floats:
    """Penalties, in seconds, for workers without room."""
    needed = -(-question.num_prompt_tokens // fleet.block_size) + question.num_choices
    penalty: Floats = (fleet.num_free + reach.blocks[0] < needed) * NO_BLOCKS_S
    penalty += (fleet.num_waiting >= question.max_queue) * FULL_QUEUE_S
    return penalty


def _candidates(sides: Sides, costs: _Costs, spread: int) -> tuple[list[Pair], list[list[Pair]]]:
    """The cheapest of those that do both, and of each group of separate ones (see `_pairs`)."""
    both: list[Pair] = []
    if len(sides.both):
        row = _least(costs.whole, sides.both, spread)
        both.append((float(costs.whole[row]), row, row, False))
    return both, [_group(givers, takers, costs, spread) for givers, takers in sides.groups]


def _group(givers: Ints, takers: Ints, costs: _Costs, spread: int) -> list[Pair]:
    giver = _least(costs.prefill, givers, spread)
    taker = _least(costs.decode, takers, spread)
    alone = taker if costs.local is None else _least(costs.local, takers, spread)
    return _pairs(costs, giver, taker, alone)


def _pairs(costs: _Costs, giver: int, taker: int, alone: int) -> list[Pair]:
    """Handed over to `taker`; and computed at `alone`, where that is quicker."""
    cost_s = float(costs.prefill[giver] + costs.decode[taker])
    found = [(cost_s, giver, taker, False)]
    if costs.local is not None and costs.local[alone] < cost_s:
        found.append((float(costs.local[alone]), giver, alone, True))
    return found


def _kept(
    fleet: Fleet, sides: Sides, costs: _Costs, pairs: list[list[Pair]], row: int, spread: int
) -> Pair | None:
    """What it costs to stay at this decode: its group's best prefill is known already."""
    if fleet.is_cohosted[row]:
        return (float(costs.whole[row]), row, row, False)
    kind = fleet.kinds[row]
    for (givers, _), found in zip(sides.groups, pairs, strict=True):
        if fleet.kinds[givers[0]] == kind:
            return _cheapest(_pairs(costs, found[0][1], row, row), spread)
    return None


def _cheapest(found: list[Pair], spread: int) -> Pair | None:
    if len(found) < 2:
        return found[0] if found else None
    least_s = min(item[0] for item in found)
    equal = [item for item in found if item[0] <= least_s + _TIE_S]
    return equal[spread % len(equal)]


def _least(costs: Floats, rows: Ints, spread: int) -> int:
    mine = costs if len(rows) == len(costs) else costs[rows]
    at = mine.argmin()
    equal = (mine <= mine[at] + _TIE_S).nonzero()[0]
    return int(rows[equal[spread % len(equal)]])
