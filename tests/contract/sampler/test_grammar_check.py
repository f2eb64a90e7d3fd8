"""`finback grammar check` through the sampler's real desks and workers."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from finback.services.supervisor import cli_grammar
from finback.shared.errors import ConfigError
from support.stack import finback

SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 3},
        "b": {"enum": ["x", "y"]},
        "c": {"not": {"type": "string"}},
    },
    "required": ["a", "c"],
    "additionalProperties": False,
}


def ask(kind: str, text: str, **more: Any) -> dict[str, Any]:
    plain = {"model": "embedded", "strictness": "strict", "max_tokens": 300}
    return cli_grammar.ask({**plain, "kind": kind, "text": text, **more})


def test_what_is_accepted_is_explained_drawn_and_judged() -> None:
    texts = ['{"a": 3, "c": null}', '{"a": 3,\n "d": 1}', '{"a": 4', '{"a": 2, "c": 1}', ""]
    told = ask("json_schema", json.dumps(SCHEMA), num_samples=20, seed=7, texts=texts)
    assert "refused" not in told and told["widened"] == []
    assert [pointer for pointer, _ in told["rewritten"]] == ["#/properties/c/not"]
    assert told["engine"] == "llguidance" and told["num_bytes"] > 0 and told["compile_ms"] > 0
    whole = [sample["text"] for sample in told["samples"] if sample["is_whole"]]
    assert len(whole) >= 15 and not any("error" in sample for sample in told["samples"])
    for text in whole:
        jsonschema.validate(json.loads(text), SCHEMA)
    whole_text, broken, begun, low, empty = told["texts"]
    assert whole_text == {"is_whole": True}
    assert (broken["line"], broken["column"], broken["num_chars"]) == (2, 3, 11)
    assert broken["next"] == ["b", "c"] and not broken["at_end"]
    assert begun["at_end"] and "," in begun["next"]
    assert low["num_chars"] == 7  # a 2 may go on as 20, but not end
    assert empty["next"][-1] == "{" and empty["at_end"]


def test_samples_are_the_seeds(tmp_path: Path) -> None:
    first, again = (ask("regex", "[a-z]{3,9}", num_samples=3, seed=5) for _ in range(2))
    assert first["samples"] == again["samples"]
    assert len({sample["text"] for sample in first["samples"]}) == 3


def test_the_command(tmp_path: Path) -> None:
    file, text = tmp_path / "schema.json", tmp_path / "answer.txt"
    file.write_text(json.dumps(SCHEMA))
    text.write_text('{"a": 30, "c": []}')
    done = finback("grammar", "check", str(file), "--text", str(text), "--sample", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("json_schema: accepted, exact\n")
    assert "said otherwise: #/properties/c/not ->" in done.stdout
    assert done.stdout.count("\nsample: ") == 2 and "a whole answer" in done.stdout
    done = finback("grammar", "check", str(file), "--text", '{"a": 1}')
    assert done.returncode == 1
    assert "no answer from line 1, column 8 (character 7) on: '}'" in done.stdout


def test_refusals_and_lenience(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps({"properties": {"a": {"not": {"pattern": "b"}}}}))
    done = finback("grammar", "check", str(file))
    assert done.returncode == 1
    assert "where: #/properties/a/not\n  what: not\n" in done.stdout
    done = finback("grammar", "check", str(file), "--lenient", "--json")
    told = json.loads(done.stdout)
    assert done.returncode == 0 and told["widened"] == ["#/properties/a/not"]
    assert told["rewritten"] == [] and told["kind"] == "json_schema"


def test_budgets_are_the_service_s() -> None:
    told = ask("json_schema", json.dumps({"type": "string", "minLength": 200_000}))
    assert told["refused"]["pointer"] == "#/minLength"
    told = ask("lark", "start: " + " | ".join(f'"w{i}"' for i in range(20_000)))
    assert "items" in told["refused"]["text"]


@pytest.mark.parametrize(
    ("name", "source", "kind"),
    [
        ("a.json", "{}", "json_schema"),
        ("a.json", '["x", "y"]', "choice"),
        ("a.json", '{"type": "structural_tag"}', "structural_tag"),
        ("a.json", "{", "json_schema"),
        ("a.LARK", "start: A", "lark"),
        ("a.regex", "a+", "regex"),
        ("a.txt", "a+", "regex"),
    ],
)
def test_kinds_by_file(name: str, source: str, kind: str) -> None:
    assert cli_grammar.kind_of(Path(name), "", source) == kind
    assert cli_grammar.kind_of(Path(name), "regex", source) == "regex"


def test_bad_usage_is_named(tmp_path: Path) -> None:
    asked = cli_grammar.Asked(
        model="embedded", is_lenient=False, num_samples=0, seed=0, max_tokens=1, texts=()
    )
    binary, odd = tmp_path / "a.json", tmp_path / "a.grammar"
    binary.write_bytes(b"\xff\xfe")
    odd.write_text("a")
    for file, kind, wanted in (
        (tmp_path / "none.json", "", "cannot be read: No such file"),
        (binary, "", "is not UTF-8"),
        (odd, "", "say what it is with --kind"),
        (odd, "ebnf", "--kind ebnf: it is one of json_schema"),
    ):
        with pytest.raises(ConfigError, match=wanted):
            cli_grammar.check(file, kind, asked, as_json=False)
    done = finback("grammar", "check", str(odd), "--kind", "regex", "--model", "/no/model.gguf")
    assert done.returncode == 2 and "/no/model.gguf" in done.stderr
