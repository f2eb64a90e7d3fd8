"""Keys are shown once, kept hashed, and take effect without a restart."""

from pathlib import Path

import pytest

from finback.shared import api_keys
from finback.shared.errors import ConfigError, NotFound


def test_a_key_is_valid_from_its_making_to_its_revoking(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "keys.json"
    ring = api_keys.KeyRing(path)
    key, record = api_keys.create(path, "tenant a")
    other, _ = api_keys.create(path, "tenant b")
    assert ring.check(key) == record
    assert ring.check(other) is not None
    api_keys.revoke(path, record.key_id)
    assert ring.check(key) is None
    assert ring.check(other) is not None


@pytest.mark.parametrize("key", ["", "fb", "fb-x-y", "Bearer", "fb--", "f" * 10000, "fb-\x00-ä"])
def test_anything_else_is_refused(tmp_path: Path, key: str) -> None:
    path = tmp_path / "keys.json"
    _, record = api_keys.create(path, "a")
    ring = api_keys.KeyRing(path)
    assert ring.check(key) is None
    assert ring.check(f"fb-{record.key_id}-guess") is None


def test_only_hashes_are_kept_and_only_for_the_owner(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    key, _ = api_keys.create(path, "a")
    assert key.split("-", 2)[2] not in path.read_text()
    assert path.stat().st_mode & 0o077 == 0


def test_what_cannot_be_done_is_said(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    with pytest.raises(NotFound, match="no API key with id 'x'"):
        api_keys.revoke(path, "x")
    path.write_text("{")
    with pytest.raises(ConfigError, match="cannot read API keys"):
        api_keys.read(path)
