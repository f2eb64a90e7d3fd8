"""Only the seam names a device's own package."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SEAM = ROOT / "shared" / "engine" / "device.py"
DEVICE_PACKAGES = ("torch.cuda", "torch.npu", "torch_npu")


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _names(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Attribute):
            found.add(_dotted(node))
    return found


@pytest.mark.parametrize("room", ["services", "shared"])
def test_nothing_else_names_a_device_package(room: str) -> None:
    guilty = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / room).rglob("*.py"))
        if path != SEAM
        and any(
            name == p or name.startswith(p + ".") for name in _names(path) for p in DEVICE_PACKAGES
        )
    ]
    assert guilty == []


def test_the_seam_would_be_seen() -> None:
    assert "torch.cuda.is_available" in _names(SEAM)
