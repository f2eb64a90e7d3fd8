"""Keys are shown once, kept hashed, and stay in the list when revoked."""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from finback.services.supervisor import key_file
from finback.shared.errors import ConfigError


def test_a_key_from_its_making_to_its_revoking(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "keys.jsonl"
    assert key_file.read(path) == []
    key, record = key_file.create(path, "tenant a")
    key_file.create(path, "tenant b")
    assert record.hash == hashlib.sha256(key.encode()).hexdigest()
    assert [r.name for r in key_file.read(path)] == ["tenant a", "tenant b"]
    key_file.revoke(path, record.id)
    assert [r.revoked for r in key_file.read(path)] == [True, False]


def test_only_hashes_are_kept_and_only_for_the_owner(tmp_path: Path) -> None:
    path = tmp_path / "keys.jsonl"
    key, _ = key_file.create(path, "a")
    assert key.split("-", 2)[2] not in path.read_text()
    assert path.stat().st_mode & 0o077 == 0


def test_what_cannot_be_done_is_said(tmp_path: Path) -> None:
    path = tmp_path / "keys.jsonl"
    with pytest.raises(ConfigError, match="no API key with id 'x'"):
        key_file.revoke(path, "x")
    path.write_text("{")
    with pytest.raises(ConfigError, match="cannot read API keys"):
        key_file.read(path)


def test_limits_are_those_of_a_tenant(tmp_path: Path) -> None:
    path = tmp_path / "keys.jsonl"
    _, first = key_file.create(path, "a", tenant="acme", requests_per_min=60)
    _, second = key_file.create(path, "b", tenant="acme")
    _, other = key_file.create(path, "c")
    assert (second.requests_per_min, other.requests_per_min) == (60, None)
    key_file.change(path, second.id, requests_per_min=30, traffic_class="batch")
    found = {record.id: record for record in key_file.read(path)}
    assert [found[key.id].requests_per_min for key in (first, second, other)] == [30, 30, None]
    assert [found[key.id].traffic_class for key in (first, second)] == ["chat", "batch"]


def test_lines_of_before_keys_had_tenants(tmp_path: Path) -> None:
    path = tmp_path / "keys.jsonl"
    old = {"id": "k1", "hash": "00", "name": "n", "created": 5, "revoked": False}
    path.write_text(json.dumps(old) + "\n")
    key_file.change(path, "k1", tokens_per_min=7, scopes=("usage",))
    (record,) = key_file.read(path)
    assert (record.owner, record.tokens_per_min, record.scopes) == ("k1", 7, ("usage",))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"tenant": "a/b"}, "tenant 'a/b'"),
        ({"scopes": ("root",)}, "unknown scope 'root'"),
        ({"traffic_class": "x"}, "unknown class 'x'"),
    ],
)
def test_values_that_mean_nothing(tmp_path: Path, values: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        key_file.create(tmp_path / "keys.jsonl", "a", **values)


def test_keys_made_at_the_same_time_are_all_kept(tmp_path: Path) -> None:
    path = tmp_path / "keys.jsonl"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: key_file.create(path, f"n{i}"), range(24)))
    assert {record.name for record in key_file.read(path)} == {f"n{i}" for i in range(24)}
