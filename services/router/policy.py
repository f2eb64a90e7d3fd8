"""Which pair of instances gets a request. Pure.

The cost of a pair, in prompt tokens that would have to be computed before this request's first
token: its own prompt less the longer prefix that one of the two holds, what waits at prefill, and
what decode is busy with, weighed. A co-hosted instance only pairs with itself.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

# A running sequence slows each step a little; a waiting one has to be finished first.
RUNNING_TOKENS: Final = 16
WAITING_TOKENS: Final = 128
# No place for the prompt's blocks means preemption: taken only if nothing else is there.
NO_BLOCKS_TOKENS: Final = 16_384
# An instance that has stopped reporting is chosen only if all have.
STALE_TOKENS: Final = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """An instance and what it is busy with, this router's unreported placements included.

    `kv_kind`: only equal ones can hand blocks to each other. Tokens and blocks as last reported.
    """

    instance: str
    epoch: int
    is_prefill: bool
    is_decode: bool
    kv_kind: str = ""
    block_size: int = 64
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    tokens_per_s: float = 0.0
    is_stale: bool = False

    @property
    def is_cohosted(self) -> bool:
        return self.is_prefill and self.is_decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A choice. `num_hit_tokens`: of the prompt, expected to be cached there."""

    prefill: Worker
    decode: Worker
    cost_tokens: int
    num_hit_tokens: int
    num_candidates: int

    @property
    def reason(self) -> str:
        """For the trace and the reply: what spoke for this pair."""
        d = self.decode
        return (
            f"cost {self.cost_tokens} tokens, best of {self.num_candidates}: "
            f"hit {self.num_hit_tokens} tokens, "
            f"decode {d.num_running} running {d.num_waiting} waiting {d.num_free_blocks} blocks free"
        )


def choose(
    workers: Sequence[Worker],
    *,
    num_prompt_tokens: int,
    hit_blocks: Mapping[str, int],
    exclude: Iterable[str] = (),
) -> Placement | None:
    """The pair of least cost, or None if there is no pair.

    `hit_blocks`: per instance, how many leading blocks of the prompt it is thought to hold. Looks
    at each worker once: the pair's cost is a sum but for the longer of two hits, and the smaller of
    `a - x + b` and `a + b - y` is found by two separate minima.
    """
    excluded = frozenset(exclude)
    live = [w for w in workers if w.instance not in excluded]
    prompt = num_prompt_tokens
    found: list[tuple[Worker, Worker]] = [(w, w) for w in live if w.is_cohosted]
    num_candidates = len(found)
    by_kind: dict[str, tuple[list[Worker], list[Worker]]] = {}
    for worker in live:
        if not worker.is_cohosted:
            sides = by_kind.setdefault(worker.kv_kind, ([], []))
            sides[0 if worker.is_prefill else 1].append(worker)
    for prefills, decodes in by_kind.values():
        if not prefills or not decodes:
            continue
        num_candidates += len(prefills) * len(decodes)

        def by_load_p(w: Worker) -> tuple[int, str]:
            return prefill_load(w), w.instance

        def by_net_p(w: Worker) -> tuple[int, str]:
            return prefill_load(w) - hit_tokens(w, hit_blocks, prompt), w.instance

        def by_load_d(w: Worker) -> tuple[int, str]:
            return decode_load(w, prompt), w.instance

        def by_net_d(w: Worker) -> tuple[int, str]:
            return decode_load(w, prompt) - hit_tokens(w, hit_blocks, prompt), w.instance

        found.append((min(prefills, key=by_net_p), min(decodes, key=by_load_d)))
        found.append((min(prefills, key=by_load_p), min(decodes, key=by_net_d)))
    if not found:
        return None
    cost, _, _, prefill, decode = min(
        ((pair_cost(p, d, hit_blocks, prompt), p.instance, d.instance, p, d) for p, d in found),
        key=lambda item: item[:3],
    )
    hit = max(hit_tokens(prefill, hit_blocks, prompt), hit_tokens(decode, hit_blocks, prompt))
    return Placement(
        prefill=prefill,
        decode=decode,
        cost_tokens=cost,
        num_hit_tokens=hit,
        num_candidates=num_candidates,
    )


def pair_cost(
    prefill: Worker, decode: Worker, hit_blocks: Mapping[str, int], num_prompt_tokens: int
) -> int:
    """Tokens, as described above."""
    hit = max(
        hit_tokens(prefill, hit_blocks, num_prompt_tokens),
        hit_tokens(decode, hit_blocks, num_prompt_tokens),
    )
    load = prefill_load(prefill) + decode_load(decode, num_prompt_tokens)
    return num_prompt_tokens - hit + load


def hit_tokens(worker: Worker, hit_blocks: Mapping[str, int], num_prompt_tokens: int) -> int:
    """Cached prompt tokens; the last one is always computed, since it gives the first answer."""
    blocks = hit_blocks.get(worker.instance, 0)
    return min(blocks * worker.block_size, max(0, num_prompt_tokens - 1))


def prefill_load(worker: Worker) -> int:
    """Tokens that wait before this prompt's turn (with co-hosted roles decode's load has them)."""
    if worker.is_cohosted:
        return 0
    return worker.num_waiting_tokens + (STALE_TOKENS if worker.is_stale else 0)


def decode_load(worker: Worker, num_prompt_tokens: int) -> int:
    """What decode is busy with, in prompt tokens."""
    load = worker.num_running * RUNNING_TOKENS + worker.num_waiting * WAITING_TOKENS
    if worker.is_cohosted:
        load += worker.num_waiting_tokens
    if worker.num_free_blocks < blocks_needed(worker, num_prompt_tokens):
        load += NO_BLOCKS_TOKENS
    return load + (STALE_TOKENS if worker.is_stale else 0)


def blocks_needed(worker: Worker, num_prompt_tokens: int, num_choices: int = 1) -> int:
    """Blocks for the prompt and the first tokens of each choice (full blocks are shared)."""
    return math.ceil(num_prompt_tokens / worker.block_size) + num_choices
