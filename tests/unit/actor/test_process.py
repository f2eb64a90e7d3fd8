"""What a service says of itself before it starts."""

import argparse

import pytest

from finback.services.router.service import Router
from finback.shared.actor import process


def test_help_lists_what_the_caller_reads_itself(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--roles", help="comma-separated roles")
    with pytest.raises(SystemExit) as ended:
        process.run(Router, argv=["--help"], options=(parser,))
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "--roles" in said and "--config" in said
