"""The named workloads: the same request lists for every engine, from fixed seeds. Pure.

`latency nano prefill decode agent` are one stream, a mix of lengths, long prompts, many short
streams, and conversations over shared prefixes; prompts are uniform token ids, so that no text is
easier than another. `chat` is in `chat_load`.
"""

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from finback.shared.errors import ConfigError

# Ids 10 to 10,000: below 10 many vocabularies keep special tokens, and every vocabulary of today is
# larger than the upper end, so that the lists do not depend on the model.
FIRST_ID: Final = 10
LAST_ID: Final = 10_000
# By name, how many requests the whole list has.
SIZES: Final = {"latency": 1, "nano": 256, "decode": 512, "prefill": 16, "agent": 32}
FIXED: Final = tuple(SIZES)
# Two ids at the front of every prompt set a repetition's prefixes apart from all others'.
NUM_MARKED: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request. `num_shared`: leading prompt ids that other requests of the list have too.

    `due_s`: when it arrives, counted from the start; 0 for lists that are there at once.
    """

    prompt: tuple[int, ...]
    num_tokens: int
    num_shared: int = 0
    due_s: float = 0.0


def workload(name: str, vocab_size: int) -> list[Request]:
    """The whole list of a fixed workload. Raises `ConfigError` for a name that is none."""
    if name not in FIXED:
        raise ConfigError(f"workload must be one of {', '.join(FIXED)}, chat; not {name!r}")
    draw = random.Random(0)
    last = min(vocab_size - 1, LAST_ID)
    if last < FIRST_ID:
        raise ConfigError(f"vocab_size must be above {FIRST_ID}, not {vocab_size}")

    def ids(count: int) -> tuple[int, ...]:
        return tuple(draw.randint(FIRST_ID, last) for _ in range(count))

    return _LISTS[name](draw, ids)


_Ids = Callable[[int], tuple[int, ...]]


def _latency(draw: random.Random, ids: _Ids) -> list[Request]:
    return [Request(prompt=ids(128), num_tokens=256)]


def _nano(draw: random.Random, ids: _Ids) -> list[Request]:
    # The prompt is drawn before the number of tokens: the order of draws is part of the list.
    found = []
    for _ in range(256):
        prompt = ids(draw.randint(100, 1024))
        found.append(Request(prompt=prompt, num_tokens=draw.randint(100, 1024)))
    return found


def _prefill(draw: random.Random, ids: _Ids) -> list[Request]:
    return [Request(prompt=ids(8192), num_tokens=1) for _ in range(16)]


def _decode(draw: random.Random, ids: _Ids) -> list[Request]:
    return [Request(prompt=ids(128), num_tokens=256) for _ in range(512)]


def _agent(draw: random.Random, ids: _Ids) -> list[Request]:
    prefixes = [ids(6144) for _ in range(4)]
    return [
        Request(prompt=prefixes[at % 4] + ids(128), num_tokens=64, num_shared=6144)
        for at in range(32)
    ]


_LISTS: Final[dict[str, Callable[[random.Random, _Ids], list[Request]]]] = {
    "latency": _latency,
    "nano": _nano,
    "prefill": _prefill,
    "decode": _decode,
    "agent": _agent,
}


def scaled(requests: Sequence[Request], scale: float) -> list[Request]:
    """Every length times `scale` (at most 1), but 1 token at least: the shared prefix, the rest and the answer alike."""
    if scale == 1.0:
        return list(requests)
    return [_scaled(request, scale) for request in requests]


def _scaled(request: Request, scale: float) -> Request:
    shared = round(request.num_shared * scale)
    own = max(1, round((len(request.prompt) - request.num_shared) * scale))
    rest = request.prompt[request.num_shared :]
    return Request(
        prompt=request.prompt[:shared] + rest[:own],
        num_tokens=max(1, round(request.num_tokens * scale)),
        num_shared=shared,
        due_s=request.due_s,
    )


def marked(requests: Sequence[Request], mark: Sequence[int]) -> list[Request]:
    """The list with its prompts' first ids replaced, so that no earlier prefix can be hit.

    All prompts get the same mark: what they share among themselves they still share. A prompt
    keeps its length; one that is shorter than the mark takes the mark's beginning.
    """
    return [
        Request(
            prompt=(*mark[: len(item.prompt)], *item.prompt[len(mark) :]),
            num_tokens=item.num_tokens,
            num_shared=item.num_shared,
            due_s=item.due_s,
        )
        for item in requests
    ]


def digest(requests: Sequence[Request]) -> str:
    """SHA-256 of the prompts and token counts: two runs with one digest did the same work."""
    plain = [[list(item.prompt), item.num_tokens] for item in requests]
    return hashlib.sha256(json.dumps(plain, separators=(",", ":")).encode()).hexdigest()
