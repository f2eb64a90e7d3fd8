"""The blocks of a prompt that an operator has as text: their names, as gateways and workers make them."""

import json
from pathlib import Path
from typing import Any

import httpx

from finback.services.supervisor import locate
from finback.services.supervisor.ask import message_of
from finback.services.supervisor.cache_desk import CacheDesk
from finback.shared.errors import ConfigError, Unavailable
from finback.shared.kv.cache_salt import cache_salt_of


def token_ids(found: locate.Running, path: Path, key: str | None) -> list[int]:
    """The ids of a prompt (text), or of chat messages (a JSON list), as the gateway makes them."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    body: dict[str, Any] = {"prompt": text}
    if text.lstrip().startswith("["):
        try:
            body = {"messages": json.loads(text)}
        except ValueError as error:
            raise ConfigError(f"{path} is neither a text nor a JSON list: {error}") from None
    sent = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        reply = httpx.post(f"{found.state.http}/tokenize", json=body, headers=sent, timeout=60.0)
    except httpx.HTTPError as error:
        raise Unavailable(f"{found.state.http}: {error or type(error).__name__}") from error
    if reply.status_code != 200:
        raise Unavailable(message_of(reply.content, f"HTTP {reply.status_code}"))
    ids: list[int] = reply.json()["tokens"]
    return ids


def chains_of(
    desk: CacheDesk, ids: list[int], tenant: str, cache_salt: str
) -> list[tuple[str, bytes]]:
    """(salt, hashes) of a tenant's prompt for every kind of pool in the stack."""
    cache_salt = cache_salt_of(tenant, cache_salt)
    found = [(spec.salt, desk.chain(ids, spec, cache_salt)) for spec in desk.specs()]
    if not found:
        raise ConfigError("no worker of this stack tells what its blocks fit")
    if not any(hashes for _, hashes in found):
        raise ConfigError(f"{len(ids)} tokens are less than a block; there is nothing to name")
    return found
