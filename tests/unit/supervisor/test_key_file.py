"""Keys are shown once, kept hashed, and stay in the list when revoked."""

import hashlib
from pathlib import Path

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
