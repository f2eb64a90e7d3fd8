"""Who may import whom, and which door leads to which library."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("services", "shared", "kernels")
TORCH_FREE = ("gateway", "router", "cache", "sampler", "drafter", "supervisor")


def _modules(*folders: str) -> list[Path]:
    return sorted(p for folder in folders for p in (ROOT / folder).rglob("*.py"))


def _imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, `a.b` for `from a import b` too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _offenders(folders: tuple[str, ...], allowed: tuple[str, ...], *libraries: str) -> set[str]:
    """Files below `folders`, but for `allowed` prefixes, that import one of the libraries."""
    found = set()
    for path in _modules(*folders):
        name = str(path.relative_to(ROOT))
        if name.startswith(allowed):
            continue
        for module in _imports(path):
            if any(module == lib or module.startswith(f"{lib}.") for lib in libraries):
                found.add(f"{name} imports {module}")
    return found


def test_rooms_are_no_packages() -> None:
    assert [room for room in ROOMS if (ROOT / room / "__init__.py").exists()] == []


@pytest.mark.parametrize(
    ("room", "forbidden"),
    [("kernels", ("services", "shared")), ("shared", ("services",))],
)
def test_lower_rooms_know_nothing_of_higher_ones(room: str, forbidden: tuple[str, ...]) -> None:
    libraries = tuple(f"finback.{name}" for name in forbidden)
    assert _offenders((room,), ("\0",), *libraries) == set()


def test_a_service_never_imports_another() -> None:
    names = sorted(p.name for p in (ROOT / "services").iterdir() if p.is_dir())
    found: set[str] = set()
    for name in names:
        others = tuple(f"finback.services.{other}" for other in names if other != name)
        found |= _offenders((f"services/{name}",), ("\0",), *others)
    assert found == set()


@pytest.mark.parametrize(
    ("library", "doors"),
    [
        ("nats", ("shared/actor/nats_bus.py",)),
        ("msgpack", ("shared/wire/codec.py",)),
        ("opentelemetry.sdk", ("shared/telemetry/",)),
        ("opentelemetry.exporter", ("shared/telemetry/",)),
        ("prometheus_client", ("shared/telemetry/",)),
        ("torch.cuda", ("shared/engine/device.py",)),
        ("torch", ("shared/engine/", "shared/models/", "kernels/")),
    ],
)
def test_one_door_a_library(library: str, doors: tuple[str, ...]) -> None:
    assert _offenders(ROOMS, doors, library) == set()


def test_cuda_is_touched_behind_its_door_only() -> None:
    """`torch.cuda` as an attribute as well: `import torch; torch.cuda...`."""
    found = set()
    for path in _modules(*ROOMS):
        if path == ROOT / "shared/engine/device.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Attribute)
                and node.attr == "cuda"
                and isinstance(node.value, ast.Name)
                and node.value.id == "torch"
            ):
                found.add(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert found == set()


@pytest.mark.slow
@pytest.mark.parametrize("service", TORCH_FREE)
def test_torch_free_services_import_no_torch(service: str) -> None:
    folder = ROOT / "services" / service
    modules = sorted(p.stem for p in folder.glob("*.py") if p.stem != "__init__")
    if not modules:
        pytest.skip(f"{service} has no modules")
    imports = "\n".join(f"import finback.services.{service}.{name}" for name in modules)
    code = f"{imports}\nimport sys\nprint([m for m in ('torch', 'numba') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "[]"
