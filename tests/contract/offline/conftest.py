"""One tiny model for all tests of the offline API."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from finback.shared.offline.llm import LLM
from support.tiny_llm import save_tiny, tiny_llm


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(tiny_path: Path) -> Iterator[LLM]:
    """Shared by a module's tests: leave it idle."""
    with tiny_llm(tiny_path, deterministic=True) as made:
        yield made
