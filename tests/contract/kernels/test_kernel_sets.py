"""The lower sets of CPU kernels, in processes of their own: the set is chosen once a process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from finback.kernels import cpu_features
from finback.kernels.host import cpu_reason

if cpu_reason() is not None:
    pytest.skip(f"CPU kernels: {cpu_reason()}", allow_module_level=True)

HERE = Path(__file__).parent
HASWELL = "+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+popcnt,+movbe,+sse4.2,+cx16,+64bit"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["avx2", "avx512"])
def test_products_of_a_lower_set(name: str) -> None:
    missing = cpu_features.missing_features(name, cpu_features.usable_flags())
    if missing:
        pytest.skip(f"the processor lacks {', '.join(missing)}")
    if cpu_features.chosen().name == name:
        pytest.skip(f"{name} is the set of this process; the other tests run it")
    env = dict(os.environ, FINBACK_CPU_KERNELS=name)
    if name == "avx2":
        # Not only narrow shapes: no instruction that such a processor lacks.
        env |= {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": HASWELL}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    # Every kind of weights, many row counts.
    command += [str(HERE / "test_cpu_matrix.py"), "-k", "rows or pairs"]
    done = subprocess.run(
        command,
        cwd=HERE.parents[2],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout[-2000:]
    assert "passed" in done.stdout


def test_a_set_that_is_not_there_gives_its_reason() -> None:
    code = "from finback.kernels.host import cpu_reason; print(cpu_reason())"
    env = dict(os.environ, FINBACK_CPU_KERNELS="sse9")
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert "FINBACK_CPU_KERNELS is 'sse9'; use auto" in done.stdout
