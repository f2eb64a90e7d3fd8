"""What `format` is enforced as. Where the engine's own check is wider than the format, a pattern is.

Grammars: RFC 3339 (date, time; leap seconds in UTC only, elsewhere they need the offset's arithmetic),
RFC 4291 (IPv6 with a dotted tail), RFC 1123 (host names; no A-labels, whose Punycode would have to be
decoded).
"""

from collections.abc import Mapping
from typing import Any, Final

_LEAP: Final = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29"
_DAY: Final = (
    r"[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE: Final = f"(?:{_DAY}|{_LEAP})"
_TIME: Final = (
    r"(?:(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,20})?"
    r"(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
    r"|23:59:60(?:\.[0-9]{1,20})?(?:[Zz]|[+-]00:00))"
)
_BYTE: Final = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4: Final = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_H16: Final = r"[0-9a-fA-F]{1,4}"
_TAIL: Final = rf"(?:{_H16}:{_H16}|{_IPV4})"


def _ipv6() -> str:
    """The nine forms of RFC 3986's IPv6address: a run of zeros may be left out once."""
    forms = [rf"(?:{_H16}:){{6}}{_TAIL}"]
    for num_before in range(6):
        before = rf"(?:(?:{_H16}:){{0,{num_before - 1}}}{_H16})?" if num_before else ""
        num_after = 5 - num_before
        after = rf"(?:{_H16}:){{{num_after}}}" if num_after else ""
        forms.append(rf"{before}::{after}{_TAIL}")
    forms.append(rf"(?:(?:{_H16}:){{0,5}}{_H16})?::{_H16}")
    forms.append(rf"(?:(?:{_H16}:){{0,6}}{_H16})?::")
    return f"(?:{'|'.join(forms)})"


# A label has 1 to 63 characters; its third and fourth may not both be hyphens, but for A-labels.
_LABEL: Final = (
    r"(?:[a-zA-Z0-9]|[a-zA-Z0-9][a-zA-Z0-9]"
    r"|[a-zA-Z0-9][a-zA-Z0-9-](?:[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,59}[a-zA-Z0-9])?"
    r"|-[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,58}[a-zA-Z0-9])?))"
)
PATTERNS: Final[Mapping[str, str]] = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}[Tt]{_TIME}$",
    "ipv6": f"^{_ipv6()}$",
    "hostname": rf"^{_LABEL}(?:\.{_LABEL})*$",
}
MAX_HOSTNAME_CHARS: Final = 253
# The engine's own check is exact, or narrower in ways that are documented (email, uri).
BY_ENGINE: Final = frozenset({"duration", "email", "ipv4", "uri", "uuid"})
# Defined by the specification, and not enforced here.
UNSUPPORTED: Final = frozenset(
    {
        "idn-email", "idn-hostname", "iri", "iri-reference", "json-pointer", "regex",
        "relative-json-pointer", "uri-reference", "uri-template",
    }
)  # fmt: skip


def format_parts(name: str) -> list[dict[str, Any]]:
    """Schemas that say what a format says; none for one that nobody has defined (an annotation)."""
    if name in BY_ENGINE:
        return [{"format": name}]
    if name not in PATTERNS:
        return []
    length = {"maxLength": MAX_HOSTNAME_CHARS} if name == "hostname" else {}
    return [{"pattern": PATTERNS[name], **length}]
