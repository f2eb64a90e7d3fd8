"""What turn 30 of a chat that grows to 200,000 tokens costs the gateway: rendering, encoding, hashing.

    python benchmarks/codec/growing_chat.py [--tokens 200000] [--turns 30] [--rounds 5]

The embedded model's template and vocabulary, mixed text. Each turn is rendered and encoded as the
gateway does it; the last turn is timed in each round (a fresh cache each, least and median of all).
"encode" is everything behind the rendering: digests, look-up, ids of the new text, block hashes.
Beside it: the same turn without a cache. One JSON line goes to results/.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from finback.services.gateway.prompt_encoder import PromptEncoder
from finback.shared.codec.dialogue import Conversation, Turn
from finback.shared.codec.load import load_codec
from finback.shared.codec.prompts.prompt_format import PromptFormat
from finback.shared.models.source import open_source
from support.mixed_text import deepseek_json, mixed

BLOCK_SIZE = 16


def conversation(text: str, num_turns: int) -> list[Turn]:
    """User and assistant turns of equal length, 1 to 9."""
    width = len(text) // num_turns
    turns = []
    for at in range(num_turns):
        said = text[at * width : (at + 1) * width]
        asked = len(said) // 10
        turns += [Turn(role="user", content=said[:asked] or "?")]
        turns += [Turn(role="assistant", content=said[asked:])]
    return turns[:-1]


def timed_turn(
    encoder: PromptEncoder, prompt: PromptFormat, turns: list[Turn]
) -> tuple[dict[str, float], int]:
    """Milliseconds of rendering and of encoding; the prompt's tokens."""
    begun_s = time.perf_counter()
    parts = prompt.render(Conversation(turns=tuple(turns)))
    rendered_s, cpu_s = time.perf_counter(), time.process_time()
    encoded = encoder.encode(parts, "tenant")
    done_s, done_cpu_s = time.perf_counter(), time.process_time()
    cost = {
        "render_ms": 1000 * (rendered_s - begun_s),
        "encode_ms": 1000 * (done_s - rendered_s),
        "encode_cpu_ms": 1000 * (done_cpu_s - cpu_s),
    }
    return cost, encoded.num_tokens


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=200_000)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    codec = load_codec(open_source("embedded").text)
    if codec.prompt is None or not codec.tokenizer.prepare():
        raise SystemExit("the embedded model has no template or no fast encoder")
    text = mixed(options.tokens * 4, deepseek_json())
    ids = codec.tokenizer.encode(text)
    text = codec.tokenizer.decode(ids[: options.tokens])
    turns = conversation(text, options.turns)

    def encoder() -> PromptEncoder:
        return PromptEncoder(
            codec.tokenizer, block_size=BLOCK_SIZE, cluster_key=b"key", model_digest="bench"
        )

    warm: list[dict[str, float]] = []
    cold: list[dict[str, float]] = []
    num_tokens = 0
    for _ in range(options.rounds):
        subject = encoder()
        for at in range(1, len(turns) + 1, 2):
            cost, num_tokens = timed_turn(subject, codec.prompt, turns[:at])
        warm.append(cost)
        cold.append(timed_turn(encoder(), codec.prompt, turns)[0])
    line: dict[str, Any] = {
        "benchmark": "codec_growing_chat",
        "date": time.strftime("%Y-%m-%d"),
        "num_cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
        "num_tokens": num_tokens,
        "num_turns": options.turns,
        "last_turn": _figures(warm),
        "without_cache": _figures(cold),
    }
    print(json.dumps(line))
    with (ROOT / "benchmarks" / "results" / "codec_growing_chat.jsonl").open("a") as out:
        out.write(json.dumps(line) + "\n")


def _figures(costs: list[dict[str, float]]) -> dict[str, float]:
    found = {}
    for key in costs[0]:
        values = [cost[key] for cost in costs]
        found[f"{key}_min"] = round(min(values), 2)
        found[f"{key}_median"] = round(statistics.median(values), 2)
    return found


if __name__ == "__main__":
    main()
