"""`finback keys` and `finback usage`: options to fields, and what is shown."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from finback.services.supervisor import cli_keys, cli_usage, key_file
from finback.shared.clock import unix_s
from finback.shared.errors import ConfigError
from finback.shared.usage_store import UsageCounts, UsageKey, UsageStore

NOTHING: dict[str, Any] = dict.fromkeys(
    ("tenant", "rpm", "tpm", "concurrency", "expires", "scopes", "models", "traffic_class")
)


def test_options_that_were_given_become_fields() -> None:
    assert cli_keys.values_of(**NOTHING) == {}
    given = {**NOTHING, "rpm": "60", "tpm": "default", "concurrency": "0", "scopes": ["usage"]}
    values = cli_keys.values_of(**given)
    assert values == {
        "requests_per_min": 60,
        "tokens_per_min": None,
        "max_concurrency": 0,
        "scopes": ("usage",),
    }
    assert cli_keys.values_of(**{**NOTHING, "expires": "never"}) == {"expires": 0}
    in_a_day = cli_keys.values_of(**{**NOTHING, "expires": "1d"})["expires"]
    assert 0 <= unix_s() + 86_400 - in_a_day < 60


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("rpm", "-1", "requests_per_min must be"),
        ("tpm", "many", "tokens_per_min must be"),
        ("concurrency", "9" * 30, "max_concurrency must be"),
        ("expires", "soon", "--expires: 'soon' is no length of time"),
    ],
)
def test_options_that_cannot_be(option: str, value: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        cli_keys.values_of(**{**NOTHING, option: value})


def test_a_key_is_shown_once_and_its_hash_never(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {"tenant": "acme", "requests_per_min": 5, "models": ("m",)}
    cli_keys.create(tmp_path, "n", values, as_json=True)
    made = json.loads(capsys.readouterr().out)
    digest = key_file.read(tmp_path / "api_keys.jsonl")[0].hash
    cli_keys.set_(tmp_path, made["id"], {"tokens_per_min": 0})
    cli_keys.list_(tmp_path, as_json=False)
    shown = capsys.readouterr().out
    assert "5 requests/min  any number of tokens/min  models m" in shown
    cli_keys.list_(tmp_path, as_json=True)
    shown += capsys.readouterr().out
    assert made["key"] not in shown
    assert digest not in shown + json.dumps(made)


def test_usage_by_the_hour_and_in_sum(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = UsageStore(tmp_path / "usage.sqlite")
    now_h = int(unix_s() // 3600 * 3600)
    for hours_ago, tenant in ((0, "a"), (1, "a"), (2, "b"), (30, "a")):
        key = UsageKey(
            hour_s=now_h - 3600 * hours_ago, tenant=tenant, model="m", outcome="completed"
        )
        store.add({key: UsageCounts(num_requests=1, num_prompt_tokens=7, num_completion_tokens=5)})

    def shown(**options: Any) -> str:
        given = {"tenant": None, "since": "24h", "as_json": False, "as_csv": False, **options}
        assert cli_usage.usage(tmp_path, **given) == 0
        return capsys.readouterr().out

    rows = json.loads(shown(as_json=True))
    assert [(row["tenant"], row["prompt_tokens"]) for row in rows] == [("b", 7), ("a", 7), ("a", 7)]
    assert len(json.loads(shown(as_json=True, tenant="a", since="3d"))) == 3
    first = next(csv.DictReader(io.StringIO(shown(as_csv=True))))
    assert (first["tenant"], first["outcome"]) == ("b", "completed")
    line = next(line for line in shown().splitlines() if line.startswith("a"))
    assert line.split() == ["a", "m", "completed", "2", "14", "0", "10"]
    with pytest.raises(ConfigError, match="--since"):
        shown(since="yesterday")
