"""Every test that docs/deepseek-v4.md names is there."""

import ast
import re
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[3]
NAMED: Final = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def named_tests() -> list[tuple[str, str]]:
    page = (ROOT / "docs" / "deepseek-v4.md").read_text(encoding="utf-8")
    return sorted(set(NAMED.findall(page)))


def test_the_page_names_tests() -> None:
    assert len(named_tests()) > 10


@pytest.mark.parametrize(("path", "name"), named_tests())
def test_a_named_test_exists(path: str, name: str) -> None:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    assert name in {node.name for node in tree.body if isinstance(node, functions)}
