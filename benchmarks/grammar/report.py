"""What becomes of each keyword: writes the table of docs/structured-output.md.

    python benchmarks/grammar/report.py [--check]

Runs the official JSON Schema test suite and the real-world schemas of jsonschemabench (both in
../shared/data) through the sampler's analysis and engine. `--check` only compares.
"""

import argparse
import collections
import gzip
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from finback.shared.errors import InvalidRequest
from support.schema_suite import SUITE, is_generable, matcher_of, suite_files, verdicts

PAGE = ROOT / "docs" / "structured-output.md"
START, END = "<!-- table: benchmarks/grammar/report.py -->", "<!-- end of table -->"
BENCH = SUITE.parents[1] / "jsonschemabench" / "sample.jsonl.gz"


def suite_table() -> list[str]:
    """A line a file of the suite, the drafts together."""
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    reasons: dict[str, set[str]] = collections.defaultdict(set)
    for path in suite_files():
        name = "/".join(path.relative_to(SUITE).parts[1:]).removesuffix(".json")
        for _, verdict in verdicts(path):
            counts[name][verdict.outcome] += 1
            if verdict.outcome == "refused":
                reasons[name].add(verdict.detail.split(":")[0][:40])
    head = "| keyword | exact | narrower | wider | refused | refused for |\n| --- | --: | --: | --: | --: | --- |"
    lines = [head]
    for name in sorted(counts):
        count = counts[name]
        cells = [str(count[key] or "") for key in ("exact", "narrow", "wide", "refused")]
        why = ", ".join(sorted(reasons[name])[:4])
        lines.append(f"| {name} | {' | '.join(cells)} | {why} |")
    total: collections.Counter[str] = sum(counts.values(), collections.Counter())
    cells = [str(total[key]) for key in ("exact", "narrow", "wide", "refused")]
    return [*lines, f"| **all** | {' | '.join(cells)} | |"]


def bench_table() -> list[str]:
    """Real-world schemas: accepted, and why not."""
    accepted, reasons, wrong = 0, collections.Counter[str](), 0
    with gzip.open(BENCH, "rt", encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            try:
                matcher = matcher_of(record["schema"])
            except InvalidRequest as error:
                reasons[(error.reason or "?").split(" at #")[0][:60]] += 1
                continue
            accepted += 1
            invalid = [test["data"] for test in record["tests"] if not test["valid"]]
            wrong += any(is_generable(matcher, value, num_orders=1) for value in invalid)
    num = accepted + reasons.total()
    why = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())
    told = (
        f"Of {num} real-world schemas (a sample of jsonschemabench) {accepted} are accepted; from"
        f" {wrong} an invalid instance can be generated. Refused: {why}."
    )
    return [told]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    page = PAGE.read_text(encoding="utf-8")
    before, after = page.split(START)[0], page.split(END)[1]
    table = "\n".join([*suite_table(), "", *bench_table()])
    made = f"{before}{START}\n{table}\n{END}{after}"
    if options.check and made != page:
        raise SystemExit(
            "docs/structured-output.md is out of date: run benchmarks/grammar/report.py"
        )
    PAGE.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()
