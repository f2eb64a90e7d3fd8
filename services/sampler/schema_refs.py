"""Local references: which schema a `$ref` means. Nothing is ever fetched."""

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from finback.services.sampler.schema_fault import SchemaFault, child
from finback.services.sampler.schema_walk import children

_DEFAULT_BASE = "http://document.invalid/"


class References:
    """The resources and anchors of one document. Schemas are known by identity."""

    def __init__(self, root: Any, dialect: int) -> None:
        self._dialect = dialect
        self._resources: dict[str, Any] = {_DEFAULT_BASE: root}
        self._anchors: dict[str, Any] = {}
        self._bases: dict[int, str] = {}
        self._root = root
        for pointer, schema, base in self._walk():
            self._bases[id(schema)] = base
            self._note(pointer, schema, base)

    def resolve(self, schema: dict[str, Any], pointer: str, keyword: str = "$ref") -> Any:
        """What the `$ref` of `schema` means (or `keyword`'s reference). Raises `SchemaFault`."""
        ref = schema[keyword]
        at = child(pointer, keyword)
        resource, fragment = _absolute(self.base(schema), ref)
        found = self._resources.get(resource)
        if found is None:
            raise SchemaFault(
                f"{ref[:200]!r} is not in this document, and none is fetched",
                pointer=at,
                reason="$ref",
            )
        if not fragment:
            return found
        if not fragment.startswith("/"):
            anchored = self._anchors.get(f"{resource}#{fragment}")
            if anchored is None:
                raise SchemaFault(f"there is no anchor {ref[:200]!r}", pointer=at, reason="$ref")
            return anchored
        return _at(found, fragment, ref, at)

    def base(self, schema: dict[str, Any]) -> str:
        """The address of the resource that a schema lies in."""
        return self._bases.get(id(schema), _DEFAULT_BASE)

    def _walk(self) -> Iterator[tuple[str, dict[str, Any], str]]:
        todo: list[tuple[str, Any, str]] = [("#", self._root, _DEFAULT_BASE)]
        while todo:
            pointer, schema, base = todo.pop()
            if not isinstance(schema, dict):
                continue
            own = self._id_of(schema)
            if own is not None and not own.startswith("#"):
                base = urljoin(base, own)
            yield pointer, schema, base
            todo += [(at, item, base) for at, item in children(schema, pointer)]

    def _id_of(self, schema: dict[str, Any]) -> str | None:
        if self._dialect <= 7 and "$ref" in schema:
            return None  # whatever stands beside a reference means nothing
        own = schema.get("id" if self._dialect == 4 else "$id")
        return own if isinstance(own, str) else None

    def _note(self, pointer: str, schema: dict[str, Any], base: str) -> None:
        own = self._id_of(schema)
        if own is not None and not own.startswith("#"):
            self._resources[urldefrag(base)[0]] = schema
        resource = urldefrag(base)[0]
        if own is not None and self._dialect <= 7 and "#" in own and urldefrag(own)[1]:
            self._anchors[f"{resource}#{urldefrag(own)[1]}"] = schema
        for keyword in ("$anchor", "$dynamicAnchor"):
            name = schema.get(keyword)
            if isinstance(name, str):
                self._anchors[f"{resource}#{name}"] = schema


def _absolute(base: str, ref: str) -> tuple[str, str]:
    """(resource, fragment). A bare fragment stays in its resource, whatever its scheme."""
    if ref.startswith("#"):
        return urldefrag(base)[0], unquote(ref[1:])
    resource, fragment = urldefrag(urljoin(base, ref))
    return resource, unquote(fragment)


def _at(found: Any, fragment: str, ref: str, at: str) -> Any:
    for step in fragment[1:].split("/"):
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and name in found:
            found = found[name]
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            raise SchemaFault(f"{ref[:200]!r} leads nowhere", pointer=at, reason="$ref")
    if not isinstance(found, dict | bool):
        raise SchemaFault(f"{ref[:200]!r} is no schema", pointer=at, reason="$ref")
    return found
