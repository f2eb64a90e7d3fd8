"""For every test of workers: a loaded machine is no cache that is too slow to wait for."""

import pytest

from finback.shared.engine import arrival


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps wait for blocks longer than they would; tests of that wait set their own."""
    monkeypatch.setattr(arrival, "MAX_WAIT_S", 20.0)
