"""Where the key of block hashes comes from."""

from pathlib import Path

import pytest

from finback.services.supervisor.run_dir import RunDir
from finback.shared.config import StackConfig
from finback.shared.errors import ConfigError
from finback.shared.kv.cluster_key import cluster_key, new_key


def test_the_supervisor_keeps_one_key_for_a_run_directory(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    path = run_dir.keep_cluster_key(StackConfig())
    assert Path(path).stat().st_mode & 0o777 == 0o600
    key = cluster_key(StackConfig(cluster_key_file=path))
    assert len(key) == 32
    assert run_dir.keep_cluster_key(StackConfig()) == path
    assert cluster_key(StackConfig(cluster_key_file=path)) == key


def test_a_given_key_is_used(tmp_path: Path) -> None:
    text = new_key()
    run_dir = RunDir(tmp_path)
    assert cluster_key(StackConfig(cluster_key=text)) == bytes.fromhex(text)
    path = run_dir.keep_cluster_key(StackConfig(cluster_key=text))
    assert cluster_key(StackConfig(cluster_key_file=path)) == bytes.fromhex(text)
    assert run_dir.keep_cluster_key(StackConfig(cluster_key_file="/own/key")) == "/own/key"
    assert cluster_key(StackConfig()) == b""


@pytest.mark.parametrize("text", ["", "00", "zz" * 32, "00" * 33])
def test_a_bad_key_stops_the_start(tmp_path: Path, text: str) -> None:
    path = tmp_path / "key"
    path.write_text(text)
    with pytest.raises(ConfigError, match="64 hex digits"):
        cluster_key(StackConfig(cluster_key_file=str(path)))
    with pytest.raises(ConfigError, match="No such file"):
        cluster_key(StackConfig(cluster_key_file=str(tmp_path / "none")))
