"""What a mask costs inside the service: a sequence advances by a token and gets its next mask.

    python benchmarks/grammar/masks.py [--schemas 150]

Valid instances of jsonschemabench's real-world schemas are followed token by token, through the code
that a worker runs for a row (`Sequences.answer`), and the engine's own call beside it. For the embedded
model's vocabulary and DeepSeek's. The hop to the service is not in it (benchmarks/grammar/hostile.py
has that). One JSON line a vocabulary goes to results/.
"""

import argparse
import json
import sys
import time
from array import array
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from grammar.compile import percentiles, record, schemas, vocabularies

from finback.services.sampler.compiler import Vocabulary, compile_grammar
from finback.services.sampler.sequences import Sequences
from finback.shared.errors import InvalidRequest
from finback.shared.wire.messages.generate import GrammarSpec
from finback.shared.wire.messages.sampler import MaskRow


def follow(
    vocabulary: Vocabulary, schema: object, instance: object, ours: list[float], engine: list[float]
) -> None:
    """One instance; adds microseconds of each token."""
    spec = GrammarSpec(kind="json_schema", text=json.dumps(schema))
    start = compile_grammar(vocabulary, spec, "").start
    ids = vocabulary.tokenizer.greedy_tokenize(json.dumps(instance, ensure_ascii=False))
    sequences, bare = Sequences(vocabulary), start.deep_copy()
    for position in range(min(len(ids), 400)):
        told = ids[position - 1 : position] if position else []
        row = MaskRow(
            request_id="r",
            choice=0,
            grammar_id="",
            position=max(0, position - 1),
            token_ids=array("i", told).tobytes(),
        )
        began = time.perf_counter()
        mask = sequences.answer(("d", 1, "r", 0), row, start, 0.0)
        ours.append((time.perf_counter() - began) * 1e6)
        if mask.error:
            del ours[-1]
            return  # its members stand in another order than the schema's
        began = time.perf_counter()
        if told:
            bare.consume_token(told[0])
        bare.compute_bitmask()
        engine.append((time.perf_counter() - began) * 1e6)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--schemas", type=int, default=150)
    options = parser.parse_args()
    for name, vocabulary in vocabularies().items():
        ours: list[float] = []
        engine: list[float] = []
        for _, schema, valid in schemas()[: options.schemas]:
            for instance in valid[:1]:
                try:
                    follow(vocabulary, schema, instance, ours, engine)
                except InvalidRequest:
                    continue
        record(
            {
                "benchmark": "grammar_masks",
                "vocabulary": name,
                "num_tokens": vocabulary.vocab_size,
                "num_masks": len(ours),
                "mask_us": percentiles(ours),
                "engine_us": percentiles(engine),
            }
        )


if __name__ == "__main__":
    main()
