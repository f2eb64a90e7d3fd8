"""Who asks."""

from dataclasses import dataclass, field

from finback.services.gateway.error_envelope import Dialect
from finback.services.gateway.grant import OPEN, Grant


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """A request's id, whose it is, and what its key allows (everything without keys).

    `headers`: what is found out on the way and belongs into the answer's head, whichever it will be.
    """

    request_id: str
    tenant: str = ""
    grant: Grant = OPEN
    dialect: Dialect = "openai"
    headers: dict[str, str] = field(default_factory=dict)
