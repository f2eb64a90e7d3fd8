"""`finback grammar check`: what the sampler's own code says of a grammar, in a process of its own."""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from finback.shared.errors import ConfigError

KINDS: Final = ("json_schema", "lark", "regex", "choice", "structural_tag")
_BY_SUFFIX: Final[Mapping[str, str]] = {
    ".json": "json_schema",
    ".lark": "lark",
    ".regex": "regex",
    ".re": "regex",
    ".txt": "regex",
}
_MODULE: Final = "finback.services.sampler.check"
MAX_BYTES: Final = 2**20
MAX_TEXT_CHARS: Final = 65_536
# Samples and texts take long at most; whatever is wrong, the command ends.
_TIMEOUT_S: Final = 600.0
_MAX_SHOWN_CHARS: Final = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What to do with the grammar. `texts`: files, or what they would hold."""

    model: str
    is_lenient: bool
    num_samples: int
    seed: int
    max_tokens: int
    texts: tuple[str, ...]


def check(file: Path, kind: str, asked: Asked, *, as_json: bool) -> int:
    """Exit code 1: the grammar is refused, or a text is none of its answers."""
    source = _read(file)
    found_kind = kind_of(file, kind, source)
    texts = [_text(text) for text in asked.texts]
    told = ask(
        {
            "model": asked.model,
            "kind": found_kind,
            "text": source.rstrip("\n") if found_kind == "regex" else source,
            "strictness": "lenient" if asked.is_lenient else "strict",
            "num_samples": asked.num_samples,
            "seed": asked.seed,
            "max_tokens": asked.max_tokens,
            "texts": texts,
        }
    )
    if "error" in told:
        raise ConfigError(told["error"])
    if as_json:
        sys.stdout.write(json.dumps({"kind": found_kind, **told}, indent=2) + "\n")
    else:
        _show(found_kind, told, texts)
    return 0 if is_good(told) else 1


def kind_of(file: Path, kind: str, source: str) -> str:
    """As it is given, or by the suffix; a JSON file may be a structural tag, or list choices."""
    if kind:
        if kind not in KINDS:
            raise ConfigError(f"--kind {kind}: it is one of {', '.join(KINDS)}")
        return kind
    found = _BY_SUFFIX.get(file.suffix.lower())
    if found is None:
        raise ConfigError(f"{file}: say what it is with --kind ({', '.join(KINDS)})")
    if found == "json_schema":
        try:
            value = json.loads(source)
        except (ValueError, RecursionError):
            return found  # whose fault is then told
        if isinstance(value, list):
            return "choice"
        if isinstance(value, dict) and value.get("type") == "structural_tag":
            return "structural_tag"
    return found


def ask(asked: dict[str, Any]) -> dict[str, Any]:
    """What the sampler's code says. Raises `ConfigError` if it ends without a word."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", _MODULE],
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"the grammar was not checked within {_TIMEOUT_S:g} s") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ConfigError(f"the grammar cannot be checked: {last[:300]}")
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def is_good(told: Mapping[str, Any]) -> bool:
    """Is the grammar accepted, and is all that came of it right."""
    return (
        "refused" not in told
        and all(text["is_whole"] for text in told["texts"])
        and not any("error" in sample for sample in told["samples"])
    )


def _read(file: Path) -> str:
    if str(file) == "-":
        return sys.stdin.read(MAX_BYTES)
    try:
        raw = file.read_bytes()
        if len(raw) > MAX_BYTES:
            raise ConfigError(f"{file} has {len(raw)} bytes; {MAX_BYTES} are the limit")
        return raw.decode()
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8 (byte {error.start})") from None


def _text(given: str) -> str:
    try:
        is_file = Path(given).is_file()
    except (OSError, ValueError):  # too long for a name, or none
        is_file = False
    text = _read(Path(given)) if is_file else given
    if len(text) > MAX_TEXT_CHARS:
        raise ConfigError(f"--text: {len(text)} characters; {MAX_TEXT_CHARS} are the limit")
    return text


# -- for people


def _show(kind: str, told: Mapping[str, Any], texts: list[str]) -> None:
    write = sys.stdout.write
    if "refused" in told:
        refused = told["refused"]
        write(f"{kind}: refused\n")
        for name in ("pointer", "reason"):
            if refused[name] not in ("", kind):
                write(f"  {'where' if name == 'pointer' else 'what'}: {refused[name]}\n")
        write(f"  why: {refused['text']}\n")
        return
    widened = told["widened"]
    write(f"{kind}: accepted, {'wider than it says' if widened else 'exact'}\n")
    for pointer in widened:
        write(f"  not enforced: {pointer}\n")
    for pointer, made in told["rewritten"]:
        write(f"  said otherwise: {pointer} -> {_said(made)}\n")
    if len(told["rewritten"]) < told["num_rewritten"]:
        write(f"  said otherwise: {told['num_rewritten'] - len(told['rewritten'])} more\n")
    write(
        f"  {told['num_bytes'] / 1024:.0f} KiB, {told['num_engine_chars']} characters for"
        f" {told['engine']}\n  compiled in {told['compile_ms']:.1f} ms; slowest of its first masks"
        f" {told['max_mask_ms']:.2f} ms: masks in {_PLACES[told['placement']]}\n"
    )
    for sample in told["samples"]:
        cut = "" if sample["is_whole"] else f"  (cut after {sample['num_tokens']} tokens)"
        write(f"sample: {sample['text']}{cut}\n")
        if "error" in sample:
            write(f"  error: {sample['error']}\n")
    for text, judged in zip(texts, told["texts"], strict=True):
        write(f"text {_shown(text)}: {_judged(judged, text)}\n")


_PLACES: Final = {"shared": "a worker shared with others", "own": "a worker of its own"}


def _said(made: list[Any]) -> str:
    if not made:
        return "nothing (it says nothing here, or others say it)"
    shown = " and ".join(json.dumps(part, ensure_ascii=False) for part in made)
    return shown if len(shown) <= _MAX_SHOWN_CHARS else shown[:_MAX_SHOWN_CHARS] + " ..."


def _shown(text: str) -> str:
    return json.dumps(text if len(text) <= 60 else text[:57] + "...", ensure_ascii=False)


def _judged(judged: Mapping[str, Any], text: str) -> str:
    if judged["is_whole"]:
        return "a whole answer"
    where = f"line {judged['line']}, column {judged['column']} (character {judged['num_chars']})"
    if not judged["is_spelled"] and not judged["at_end"]:
        return f"the vocabulary cannot spell {text[judged['num_chars']]!r}, {where}"
    may = ", ".join(item if len(item) > 1 else repr(item) for item in judged["next"])
    if judged["at_end"]:
        return f"the beginning of an answer; what may follow: {may}"
    return f"no answer from {where} on: {text[judged['num_chars']]!r}, where may follow: {may}"
