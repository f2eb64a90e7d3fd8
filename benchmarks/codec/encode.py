"""How fast text is encoded, beside the libraries it is measured by, in one run.

    python benchmarks/codec/encode.py [--bytes 1000000] [--rounds 7]

For each vocabulary (the embedded model's, DeepSeek V4's): Hugging Face `tokenizers` with offsets
(`encode`) and without (`encode_batch_fast`), `tiktoken` with the same ranks, deepseek-recipe's own
encoding of one user message, and ours on one thread and on two. All variants take turns, the least
CPU time of a variant counts for "per core", the least wall time for the rest. Ids are compared with
those of `tokenizers` before anything is timed. One JSON line a vocabulary goes to results/.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["RAYON_NUM_THREADS"] = "1"

import deepseek_recipe
import tokenizers

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from finback.shared.codec import fast_encoder, hf_tokenizer
from finback.shared.codec.load import load_tokenizer
from finback.shared.codec.tokenizer import Tokenizer
from finback.shared.models.source import open_source
from support.mixed_text import deepseek_json, mixed

Variant = Callable[[str], list[int]]


def without_added(file: str) -> tokenizers.Tokenizer:
    """The library's tokenizer of a file, with no added tokens: text is text."""
    return tokenizers.Tokenizer.from_str(json.dumps({**json.loads(file), "added_tokens": []}))


def variants_of(ours: Tokenizer, plain: tokenizers.Tokenizer) -> dict[str, Callable[[str], Any]]:
    """What is timed, by name."""
    if not ours.prepare():
        raise SystemExit("this vocabulary has no fast encoder")
    encoder = ours._fast.encoder(0)
    assert encoder is not None
    raw = encoder._encoding

    def on_threads(text: str) -> Any:
        return ours.encode_many([text])[0]

    return {
        "hf_encode": lambda text: plain.encode(text, add_special_tokens=False),
        "hf_batch_fast": lambda text: plain.encode_batch_fast([text], add_special_tokens=False)[0],
        "tiktoken": raw.encode_ordinary,
        "ours_1_thread": encoder.encode,
        "ours_2_threads": on_threads,
    }


def recipe_of(file: str) -> Callable[[str], list[int]]:
    """deepseek-recipe's encoding of one user message, by the same file."""
    tokenizer = deepseek_recipe.Tokenizer.from_str(file)
    encoding = deepseek_recipe.DeepseekV4Encoding().with_tokenizer(tokenizer)

    def encode(text: str) -> list[int]:
        message = deepseek_recipe.UserMessage(text)
        conversation = deepseek_recipe.Conversation([message], thinking_mode=False)
        ids: list[int] = encoding.encode(conversation)
        return ids

    return encode


def check_ids(variants: dict[str, Callable[[str], Any]], text: str) -> int:
    """All ids are those of `tokenizers`. Returns how many there are."""
    expected = variants["hf_encode"](text).ids
    for name in ("ours_1_thread", "ours_2_threads"):
        if variants[name](text).tolist() != expected:
            raise SystemExit(f"{name}: other ids")
    if "recipe" in variants and variants["recipe"](text)[2:-2] != expected:
        raise SystemExit("recipe: other ids")
    return len(expected)


def timed(variants: dict[str, Callable[[str], Any]], text: str, rounds: int) -> dict[str, Any]:
    """Least CPU and wall seconds of each."""
    least = {name: [float("inf")] * 2 for name in variants}
    for _ in range(rounds):
        for name, encode in variants.items():
            cpu_s, wall_s = time.process_time(), time.perf_counter()
            encode(text)
            found = (time.process_time() - cpu_s, time.perf_counter() - wall_s)
            least[name] = [min(pair) for pair in zip(least[name], found, strict=True)]
    return {name: {"cpu_s": cpu, "wall_s": wall} for name, (cpu, wall) in least.items()}


def measure(name: str, variants: dict[str, Callable[[str], Any]], text: str, rounds: int) -> None:
    """One vocabulary: print its table, append its line."""
    num_tokens = check_ids(variants, text)
    found = timed(variants, text, rounds)
    megabytes = len(text.encode()) / 1e6
    print(f"\n{name}: {megabytes:.2f} MB, {num_tokens} tokens, ids equal")
    base = found["hf_encode"]
    for variant, cost in found.items():
        cost["per_core_vs_hf"] = base["cpu_s"] / cost["cpu_s"]
        cost["wall_vs_hf"] = base["wall_s"] / cost["wall_s"]
        print(
            f"  {variant:15} {megabytes / cost['cpu_s']:6.2f} MB/s a core,"
            f" {cost['per_core_vs_hf']:5.2f}x hf a core, {cost['wall_vs_hf']:5.2f}x hf in time"
        )
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    line = {
        "benchmark": "codec_encode",
        "vocabulary": name,
        "commit": commit.stdout.strip(),
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "num_cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
        "num_bytes": len(text.encode()),
        "num_tokens": num_tokens,
        "variants": {
            variant: {key: round(value, 4) for key, value in cost.items()}
            for variant, cost in found.items()
        },
    }
    with (ROOT / "benchmarks" / "results" / "codec_encode.jsonl").open("a") as out:
        out.write(json.dumps(line) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bytes", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    fast_encoder.num_threads = lambda: 2  # type: ignore[assignment]  # whatever this machine has
    deepseek = deepseek_json()
    text = mixed(options.bytes, deepseek)
    ours = load_tokenizer(open_source("embedded").text)
    measure("embedded", variants_of(ours, without_added(ours.to_json())), text, options.rounds)
    ours = hf_tokenizer.build(deepseek, bos_id=0, eos_ids=(1,))
    variants = variants_of(ours, without_added(deepseek)) | {"recipe": recipe_of(deepseek)}
    measure("deepseek-v4", variants, text, options.rounds)


if __name__ == "__main__":
    main()
