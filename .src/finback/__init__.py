"""Finback: a complete LLM inference service as actors on NATS; `LLM` is its engine alone.

Importing this package imports nothing else: the names below are looked up when they are used.
"""

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from finback.shared.offline.llm import LLM
    from finback.shared.offline.outputs import Completion, CompletionChunk, LLMStats, TokenLogprobs
    from finback.shared.offline.params import SamplingParams

__all__ = [
    "LLM",
    "Completion",
    "CompletionChunk",
    "LLMStats",
    "SamplingParams",
    "TokenLogprobs",
]

_HOMES: Final = {
    "LLM": "llm",
    "Completion": "outputs",
    "CompletionChunk": "outputs",
    "LLMStats": "outputs",
    "TokenLogprobs": "outputs",
    "SamplingParams": "params",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"finback.shared.offline.{_HOMES[name]}"), name)
