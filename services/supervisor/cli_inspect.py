"""`finback models inspect`: what a model is, what it takes, and what is wrong with it."""

import json
import sys
from typing import Any, Final

from finback.services.supervisor.fitting import Fit, fits, places
from finback.shared.errors import ConfigError
from finback.shared.models.inspection import Inspection, inspect_source
from finback.shared.models.source import open_source

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")


def inspect(model: str, *, as_json: bool) -> int:
    """Exit code 1: the model cannot be served, for the reasons told."""
    try:
        found = inspect_source(open_source(model))
    except ConfigError as error:
        return _refused(model, str(error), as_json=as_json)
    here = fits(found, places())
    problems = [*found.problems, *_too_large(here)]
    if as_json:
        told: dict[str, Any] = found.to_json() | {
            "problems": problems,
            "is_servable": not problems,
            "fits": [fit.to_json() for fit in here],
        }
        sys.stdout.write(json.dumps(told, indent=2) + "\n")
    else:
        _show(found, here, problems)
    return 1 if problems else 0


def _refused(model: str, reason: str, *, as_json: bool) -> int:
    if as_json:
        told = {"path": model, "is_servable": False, "problems": [reason]}
        sys.stdout.write(json.dumps(told, indent=2) + "\n")
    else:
        sys.stdout.write(f"{model}\ncannot be served: {reason}\n")
    return 1


def _too_large(here: list[Fit]) -> list[str]:
    if any(fit.num_sequences or fit.kv_tokens for fit in here):
        return []
    least = min(fit.weights_bytes for fit in here)
    most = max(fit.free_bytes for fit in here)
    return [f"weights of {size(least)} do not fit in the {size(most)} that are free here"]


def size(num_bytes: float) -> str:
    """Bytes in the largest unit of which there is one."""
    at = 0
    while num_bytes >= 1024 and at < len(_UNITS) - 1:
        num_bytes, at = num_bytes / 1024, at + 1
    return f"{num_bytes:.0f} {_UNITS[at]}" if at == 0 else f"{num_bytes:.1f} {_UNITS[at]}"


def _show(found: Inspection, here: list[Fit], problems: list[str]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for what, told in _rows(found, here):
        table.add_row(what, Text(told))
    for note in found.notes:
        table.add_row("note", Text(note, style="yellow"))
    for problem in problems:
        table.add_row("cannot be served", Text(problem, style="red"))
    Console(highlight=False).print(table)


def _rows(found: Inspection, here: list[Fit]) -> list[tuple[str, str]]:
    stored = sum(found.formats.values())
    layers = ", ".join(f"{count} {kind}" for kind, count in found.layers.items())
    rows = [
        ("model", f"{found.name}: {found.architecture} ({found.path})"),
        ("layers", layers),
        ("weights", f"{found.num_weights:,} in {size(stored)}"),
        ("formats", ", ".join(f"{kind} {size(of)}" for kind, of in found.formats.items())),
    ]
    if found.draft_stages or found.draft_kind:
        stages = ", ".join(f"{name} {size(of)}" for name, of in found.draft_stages.items())
        rows.append(
            ("draft stages", f"{found.draft_kind or 'unknown'}: {stages or 'not in the files'}")
        )
    rows += [
        ("vocabulary", f"{found.vocab_size:,}" + ("" if found.has_tokenizer else ", no tokenizer")),
        ("context", f"{found.max_model_len:,} tokens, KV in blocks of {found.block_tokens}"),
    ]
    for dtype, kept in found.kept.items():
        told = f"{kept.kv_bytes_per_token:,.0f} B a token"
        if kept.slot_bytes:
            told += (
                f"; state {size(kept.slot_bytes)} a sequence, {size(kept.state_bytes)} a snapshot"
            )
        rows.append((f"KV as {dtype}", told))
    return [*rows, *(_fit_row(fit) for fit in here)]


def _fit_row(fit: Fit) -> tuple[str, str]:
    what = f"{fit.place}"
    told = (
        f"{size(fit.free_bytes)} free; weights as {fit.weights_dtype} {size(fit.weights_bytes)}: "
    )
    if not fit.kv_tokens:
        return what, told + "do not fit"
    return what, told + (
        f"{fit.kv_tokens:,} tokens of {fit.kv_dtype} KV, or "
        f"{fit.num_sequences:,} sequences of {fit.sequence_tokens:,}"
    )
