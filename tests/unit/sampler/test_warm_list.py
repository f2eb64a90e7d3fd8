"""The list of grammars to compile at the start."""

from pathlib import Path

import pytest

from finback.services.sampler.warm_list import read_warm_list
from finback.shared.errors import ConfigError
from finback.shared.wire.messages.generate import GrammarSpec


def test_a_list(tmp_path: Path) -> None:
    path = tmp_path / "warm.jsonl"
    path.write_text(
        '# often asked\n{"kind": "json_object"}\n\n{"kind": "json_schema", "text": {"a": 1}}\n'
    )
    assert read_warm_list(str(path)) == (
        GrammarSpec(kind="json_object"),
        GrammarSpec(kind="json_schema", text='{"a": 1}'),
    )
    assert read_warm_list("") == ()


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("{", "line 1: no JSON"),
        ("[]", "kind"),
        ('{"text": ""}', "kind"),
        ('{"kind": "a", "x": 1}', "'x'"),
    ],
)
def test_what_is_wrong_is_named(line: str, names: str, tmp_path: Path) -> None:
    path = tmp_path / "warm.jsonl"
    path.write_text(line)
    with pytest.raises(ConfigError, match=names):
        read_warm_list(str(path))
    with pytest.raises(ConfigError, match="cannot read"):
        read_warm_list(str(tmp_path / "none"))
