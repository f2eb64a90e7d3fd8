"""Random answers along the masks of real-world schemas, without a model, each checked.

    python benchmarks/grammar/walks.py [--draws 7] [--tokens 400] [--seed 0] [--keep]

As `generations.py`, but tokens are drawn as `finback grammar check --sample` draws them, which ends most
answers: what a model seldom writes is written, too. All schemas of the sample that are accepted.
"""

import argparse
import collections
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from grammar.compile import record
from grammar.generations import Case, accepted_cases, judged

from finback.services.sampler.check_walk import WalkTokens, choose
from finback.services.sampler.compiler import Vocabulary, compile_grammar
from finback.services.sampler.model_vocabulary import load_engine_tokenizer
from finback.shared.codec.load import load_tokenizer
from finback.shared.models.source import open_source
from finback.shared.wire.messages.generate import GrammarSpec
from finback.shared.wire.messages.sampler import Mask


def draw(
    vocabulary: Vocabulary, tokens: WalkTokens, start: Any, seed: int, max_tokens: int
) -> tuple[str, str]:
    """(text, `stop`, `length` or what went wrong) of one answer."""
    rng, matcher = random.Random(seed), start.deep_copy()
    ids: list[int] = []
    reason = "length"
    while len(ids) < max_tokens:
        mask = Mask(
            request_id="",
            choice=0,
            position=len(ids),
            bitmask=vocabulary.bitmask(matcher),
            is_accepting=matcher.is_accepting(),
        )
        token_id = choose(rng, tokens, mask, len(ids))
        if token_id in tokens.eos_ids:
            reason = "stop"
            break
        ids.append(token_id)
        if not matcher.consume_token(token_id) or matcher.get_error():
            reason = f"error: {matcher.get_error()}"
            break
    return tokens.tokenizer.decode(ids), reason


def walk_all(options: argparse.Namespace, cases: list[Case]) -> list[dict[str, Any]]:
    """What each answer of each schema is."""
    vocabulary = Vocabulary(*load_engine_tokenizer("embedded"))
    tokens = WalkTokens(
        load_tokenizer(open_source("embedded").text), vocabulary.vocab_size, vocabulary.eos_ids
    )
    rows = []
    for number, case in enumerate(cases):
        spec = GrammarSpec(kind="json_schema", text=json.dumps(case.schema))
        start = compile_grammar(vocabulary, spec, "").start
        for at in range(options.draws):
            seed = options.seed + number * options.draws + at
            text, reason = draw(vocabulary, tokens, start, seed, options.tokens)
            row = {"schema": case.name, "seed": seed} | judged(case, text, reason)
            rows.append(row)
            if row["outcome"] == "invalid":
                sys.stderr.write(json.dumps(row) + "\n")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=7, help="answers a schema")
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="add the result to results/")
    options = parser.parse_args()
    cases = accepted_cases(most=10_000)
    began_s = time.perf_counter()
    rows = walk_all(options, cases)
    counts = collections.Counter(row["outcome"] for row in rows)
    summary: dict[str, Any] = {
        "benchmark": "grammar_walks",
        "num_answers": len(rows),
        "num_schemas": len(cases),
        "num_schemas_finished": len({r["schema"] for r in rows if r["outcome"] == "valid"}),
        "max_tokens": options.tokens,
        "seconds": round(time.perf_counter() - began_s),
        **{kind: counts[kind] for kind in ("valid", "cut", "invalid")},
    }
    record(summary) if options.keep else print(json.dumps(summary))
    raise SystemExit(1 if counts["invalid"] else 0)


if __name__ == "__main__":
    main()
