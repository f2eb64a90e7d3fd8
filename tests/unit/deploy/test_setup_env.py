"""The torch build that the set-up chooses; pip is a script that answers from a table."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]

CPU = ["torch", "sympy", "filelock"]
CUDA = [*CPU, "nvidia-cublas", "triton"]


@pytest.fixture
def setup_env(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("setup_env", ROOT / "deploy" / "setup_env.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "accelerator", lambda: "")
    return module


def pip(tmp_path: Path, default: list[str] | None, cpu_index: list[str] | None) -> list[str]:
    """A pip that would install `default`, or `cpu_index` when asked to look there as well."""

    def report(names: list[str] | None) -> str:
        install = [{"metadata": {"name": name}} for name in names or ()]
        return json.dumps({"install": install}) if names else ""

    script = tmp_path / "pip.py"
    script.write_text(
        f"import sys\nout = {report(cpu_index)!r} if '--extra-index-url' in sys.argv "
        f"else {report(default)!r}\nprint(out)\nsys.exit(not out)\n"
    )
    return [sys.executable, str(script)]


def test_a_default_that_is_a_cpu_build_is_taken(tmp_path: Path, setup_env: ModuleType) -> None:
    arguments, why = setup_env.choose_torch(pip(tmp_path, CPU, CPU))
    assert "--extra-index-url" not in arguments
    assert "CPU build" in why


def test_otherwise_the_index_of_cpu_builds_is_asked(tmp_path: Path, setup_env: ModuleType) -> None:
    arguments, why = setup_env.choose_torch(pip(tmp_path, CUDA, CPU))
    assert arguments[:2] == ["--extra-index-url", setup_env.CPU_INDEX]
    assert setup_env.CPU_INDEX in why


@pytest.mark.parametrize("cpu_index", [CUDA, None])
def test_only_then_the_cuda_build_and_it_is_said(
    tmp_path: Path, setup_env: ModuleType, cpu_index: list[str] | None
) -> None:
    arguments, why = setup_env.choose_torch(pip(tmp_path, CUDA, cpu_index))
    assert "--extra-index-url" not in arguments
    assert "CUDA build" in why


def test_an_accelerator_gets_the_default_build(
    tmp_path: Path, setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup_env, "accelerator", lambda: "NVIDIA")
    assert setup_env.choose_torch(pip(tmp_path, CUDA, CPU)) == (
        ["torch>=2.8"],
        "the default build, for NVIDIA",
    )


def test_a_stamp_follows_its_sources(
    tmp_path: Path, setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup_env, "ROOT", tmp_path)
    source = tmp_path / "kernel.py"
    source.write_text("1")
    stamp = setup_env.Stamp(tmp_path / "stamp", [source])
    assert not stamp.is_current()
    stamp.renew()
    assert setup_env.Stamp(tmp_path / "stamp", [source]).is_current()
    source.write_text("2")
    assert not setup_env.Stamp(tmp_path / "stamp", [source]).is_current()


def test_the_sources_of_the_environment_are_there(setup_env: ModuleType) -> None:
    assert all(source.is_file() for source in setup_env.environment_sources())
