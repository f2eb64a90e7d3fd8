"""Every subject, built here and nowhere else.

`<prefix>.v1.<service>.<verb>` reaches any instance through a queue group,
`<prefix>.v1.<service>.<instance>.<verb>` one instance. `stream`, `event` and `api` are reserved.
"""

import re
from dataclasses import dataclass
from typing import Final

RESERVED: Final = frozenset({"stream", "event", "api"})
_TOKEN: Final = re.compile(r"^[a-z0-9][a-z0-9_-]*\Z")


def _token(value: str) -> str:
    if not _TOKEN.match(value):
        raise ValueError(f"not a subject token: {value!r}")
    return value


@dataclass(frozen=True, slots=True)
class Subjects:
    """The subjects under one prefix (`FINBACK_SUBJECT_PREFIX`, `finback` by default)."""

    prefix: str = "finback"

    def __post_init__(self) -> None:
        for part in self.prefix.split("."):
            _token(part)

    def service(self, service: str, verb: str) -> str:
        """Any instance of `service` may answer (queue group `service`)."""
        return f"{self.prefix}.v1.{_token(service)}.{_token(verb)}"

    def instance(self, service: str, instance: str, verb: str) -> str:
        """Exactly this instance answers."""
        return f"{self.prefix}.v1.{_token(service)}.{_token(instance)}.{_token(verb)}"

    def stream(self, gateway: str, decode: str) -> str:
        """Tokens of one decode instance for one gateway."""
        return f"{self.prefix}.v1.stream.{_token(gateway)}.{_token(decode)}"

    def streams_for(self, gateway: str) -> str:
        """The wildcard that a gateway subscribes to once."""
        return f"{self.prefix}.v1.stream.{_token(gateway)}.*"

    def event(self, service: str, noun: str) -> str:
        """A past fact, for whoever listens."""
        return f"{self.prefix}.v1.event.{_token(service)}.{_token(noun)}"

    def api(self, endpoint: str) -> str:
        """The public request API: `chat.completions`, `models`, ..."""
        for part in endpoint.split("."):
            _token(part)
        return f"{self.prefix}.v1.api.{endpoint}"
