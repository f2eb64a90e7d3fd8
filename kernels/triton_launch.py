"""What every Triton kernel here shares: whether kernels may overlap, and where Triton is missing.

Programmatic dependent launch (Hopper and later): a kernel may start while the one before it drains;
it fetches its weights first and waits only before it touches what others write. Each kernel of a
chain must wait, since waiting is what makes completion transitive.
"""

import importlib.util
import os
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@cache
def triton_reason() -> str | None:
    """Why Triton kernels cannot run in this process, or None. Imports nothing heavy."""
    return None if importlib.util.find_spec("triton") else "triton is not installed"


@cache
def is_interpreted() -> bool:
    """Do kernels run under Triton's interpreter (TRITON_INTERPRET=1), on the CPU?"""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@cache
def has_dependent_launch(device: "torch.device") -> bool:
    """May a kernel be launched before its predecessor has ended?"""
    if is_interpreted() or os.environ.get("FINBACK_TRITON_PDL", "1") == "0":
        return False
    return device.type == "cuda" and _capability(device) >= (9, 0)


def _capability(device: "torch.device") -> tuple[int, int]:
    import torch

    properties = torch.get_device_module(device).get_device_properties(device)
    return int(properties.major), int(properties.minor)


@cache
def num_multiprocessors(device: "torch.device") -> int:
    """How many programs run at once at least; under the interpreter a small number."""
    if device.type == "cpu":
        return 4
    import torch

    properties = torch.get_device_module(device).get_device_properties(device)
    return int(properties.multi_processor_count)
