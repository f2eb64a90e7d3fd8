"""A stack with API keys that are made and changed while it runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import anthropic
import httpx
import openai

from finback.services.supervisor import key_file
from support.gateway_stack import GatewayStack

BODY: Final[dict[str, Any]] = {
    "model": "gpt-4o",
    "messages": [{"role": "user", "content": "one two three"}],
    "max_tokens": 4,
}


class Shop:
    """A stack, and keys that are made while it runs."""

    def __init__(self, stack: GatewayStack, keys: Path) -> None:
        self.stack = stack
        self.keys = keys
        self.clients: list[openai.OpenAI | anthropic.Anthropic] = []

    def key(self, **values: Any) -> str:
        return key_file.create(self.keys, "n", **values)[0]

    def id_of(self, key: str) -> str:
        return key.split("-")[1]

    def client(self, key: str) -> openai.OpenAI:
        made = openai.OpenAI(base_url=f"{self.stack.url}/v1", api_key=key, max_retries=0)
        self.clients.append(made)
        return made

    def ask(self, key: str, url: str = "", **more: Any) -> httpx.Response:
        return httpx.post(
            f"{url or self.stack.url}/v1/chat/completions",
            json={**BODY, **more},
            headers={"authorization": f"Bearer {key}"},
            timeout=30,
        )

    def usage(self, key: str, **query: str) -> dict[str, Any]:
        reply = httpx.get(
            f"{self.stack.url}/v1/usage", headers={"authorization": f"Bearer {key}"}, params=query
        )
        assert reply.status_code == 200, reply.text
        found: dict[str, Any] = reply.json()
        return found

    @contextmanager
    def stream(self, key: str, url: str = "") -> Iterator[Iterator[str]]:
        """The lines of a stream that goes on until it is left."""
        with httpx.Client(timeout=30) as client:
            sent = client.stream(
                "POST",
                f"{url or self.stack.url}/v1/chat/completions",
                json={**BODY, "stream": True, "ignore_eos": True, "max_tokens": 6000},
                headers={"authorization": f"Bearer {key}"},
            )
            with sent as reply:
                yield reply.iter_lines()
