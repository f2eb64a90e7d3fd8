"""Triton kernels on a device where there is one, else under the interpreter, on the CPU.

The interpreter must be chosen before Triton is first imported.
"""

import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch

_HERE = Path(__file__).parent
_HAS_TRITON = importlib.util.find_spec("triton") is not None
_HAS_DEVICE = torch.cuda.is_available()

if _HAS_TRITON and not _HAS_DEVICE and "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"


def _reason() -> str | None:
    if not _HAS_TRITON:
        return "triton is not installed (pip install 'finback[cuda]'; over 600 MB unpacked)"
    if not _HAS_DEVICE and os.environ.get("TRITON_INTERPRET") != "1":
        return "Triton was imported before its interpreter could be chosen; run this folder alone"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip this folder, with the reason, where its kernels cannot run."""
    reason = _reason()
    for item in items:
        if reason and _HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))
