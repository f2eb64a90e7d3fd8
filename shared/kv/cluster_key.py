"""The cluster's secret, the key of all block hashes: who lacks it cannot tell prompts from hashes.

64 hex digits, by the environment or in a file that only its owner reads.
"""

import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Final

from finback.shared.errors import ConfigError

if TYPE_CHECKING:
    from finback.shared.config import StackConfig

KEY_BYTES: Final = 32


def new_key() -> str:
    """A fresh secret, as it is written."""
    return secrets.token_hex(KEY_BYTES)


def cluster_key(config: "StackConfig") -> bytes:
    """The secret, 32 bytes; empty where none is set (a lone service in a test)."""
    text, where = config.cluster_key, "cluster_key"
    if not text and config.cluster_key_file:
        text, where = _read(config.cluster_key_file), f"cluster key file {config.cluster_key_file}"
    if not text:
        return b""
    try:
        key = bytes.fromhex(text.strip())
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise ConfigError(f"{where} must hold {2 * KEY_BYTES} hex digits (openssl rand -hex 32)")
    return key


def _read(path: str) -> str:
    try:
        text = Path(path).read_text(encoding="ascii", errors="replace")
    except OSError as error:
        raise ConfigError(f"cannot read cluster key file {path}: {error.strerror}") from None
    return text or "empty"
