"""One separated stack with drafting for all tests of this folder that do not need their own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.stack import Stack


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    made = Stack(tmp_path_factory.mktemp("stack") / "run")
    made.up("--separate", "--drafting")
    yield made
    made.down()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"
