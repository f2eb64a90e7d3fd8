"""The official JSON Schema test suite against what the sampler makes of its schemas.

`../shared/data/json-schema-test-suite` beside the clone. For each schema that is accepted, every valid
instance must be generable and no invalid one. An instance is written canonically (no blanks needed,
integers without a point), with its members in some order: the schema's order counts, and the file's
may be another, so all orders of small objects are tried.
"""

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from llguidance import LLMatcher

from finback.services.sampler.compiler import Vocabulary, load_grammar
from finback.services.sampler.grammar_source import read_source
from finback.shared.errors import InvalidRequest
from finback.shared.wire.messages.generate import GrammarSpec
from support.grammar_walk import vocabulary

SUITE: Final = Path(__file__).resolve().parents[3] / "shared/data/json-schema-test-suite/tests"
DRAFTS: Final = ("draft7", "draft2019-09", "draft2020-12")
_DRAFT7: Final = "http://json-schema.org/draft-07/schema#"
_MAX_ORDERS: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`outcome`: exact, narrow (a valid instance cannot be generated), wide (an invalid one can be),
    or refused. `detail`: which instances, or the reason."""

    outcome: str
    detail: str = ""


@cache
def _vocabulary() -> Vocabulary:
    return vocabulary()


def suite_files(pattern: str = "*.json") -> list[Path]:
    """All files of the suite, the optional ones too."""
    folders = ("", "optional/", "optional/format/")
    return [
        path for draft in DRAFTS for folder in folders
        for path in sorted((SUITE / draft).glob(f"{folder}{pattern}"))
    ]  # fmt: skip


def verdicts(path: Path) -> Iterator[tuple[str, Verdict]]:
    """(description, verdict) of each schema of a file."""
    draft = path.relative_to(SUITE).parts[0]
    for case in json.loads(path.read_text(encoding="utf-8")):
        yield case["description"], _verdict(case, draft)


def matcher_of(schema: Any) -> LLMatcher:
    """Raises `InvalidRequest`."""
    source = read_source(GrammarSpec(kind="json_schema", text=json.dumps(schema)))
    matcher = load_grammar(_vocabulary(), source.text)
    problem = matcher.get_error() or "; ".join(matcher.get_grammar_warnings())
    if problem:
        raise InvalidRequest(problem, reason=problem.splitlines()[0][:80])
    return matcher


def _verdict(case: dict[str, Any], draft: str) -> Verdict:
    schema = case["schema"]
    if draft == "draft7" and isinstance(schema, dict) and "$schema" not in schema:
        schema = {"$schema": _DRAFT7, **schema}
    try:
        matcher = matcher_of(schema)
    except InvalidRequest as error:
        return Verdict(outcome="refused", detail=(error.reason or "").split(" at #")[0])
    wrong = [t for t in case["tests"] if is_generable(matcher, t["data"]) != t["valid"]]
    if not wrong:
        return Verdict(outcome="exact")
    is_wide = any(not test["valid"] for test in wrong)
    detail = "; ".join(test["description"] for test in wrong)
    return Verdict(outcome="wide" if is_wide else "narrow", detail=detail)


def is_generable(matcher: LLMatcher, value: Any, num_orders: int = _MAX_ORDERS) -> bool:
    """Is some spelling of `value` a whole answer."""
    for written in (_canonical(value), value):
        orders = _orders(written) if num_orders > 1 else iter([written])
        for ordered in itertools.islice(orders, num_orders):
            for is_ascii in (False, True):
                if _is_answer(matcher, json.dumps(ordered, ensure_ascii=is_ascii)):
                    return True
    return False


def _is_answer(start: LLMatcher, text: str) -> bool:
    matcher = start.deep_copy()
    taken = all(matcher.consume_token(value) for value in text.encode("utf-8", "surrogatepass"))
    return taken and bool(matcher.is_accepting())


def _canonical(value: Any) -> Any:
    if isinstance(value, float) and abs(value) < 1e300 and value == int(value):
        return int(value)
    if isinstance(value, dict):
        return {name: _canonical(item) for name, item in value.items()}
    return [_canonical(item) for item in value] if isinstance(value, list) else value


def _orders(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for names in itertools.islice(itertools.permutations(value), 60):
            few = [list(itertools.islice(_orders(value[name]), 6)) for name in names]
            for items in itertools.islice(itertools.product(*few), 60):
                yield dict(zip(names, items, strict=True))
    elif isinstance(value, list):
        few = [list(itertools.islice(_orders(item), 6)) for item in value]
        yield from (list(items) for items in itertools.islice(itertools.product(*few), 60))
    else:
        yield value
