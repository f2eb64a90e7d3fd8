"""References that look for their target on the way that led to them, where all ways lead to one.

Evaluation begins at the document's root. So a `$dynamicRef` whose anchor the root's resource has too
always means that one, and one whose anchor exists once means it; likewise `$recursiveRef`. These are
written as `$ref`, beside one that is there in `allOf`. Others are left as they are, to be refused.
"""

from typing import Any, Final
from urllib.parse import urldefrag

from finback.services.sampler.schema_fault import SchemaFault
from finback.services.sampler.schema_refs import References
from finback.services.sampler.schema_walk import every_schema

_DYNAMIC: Final = ("$dynamicRef", "$recursiveRef")


def with_static_references(root: Any, dialect: int) -> Any:
    """The document, or a copy in which such references are static. `root` is not changed."""
    if dialect < 2019 or not any(
        keyword in schema for _, schema in every_schema(root) for keyword in _DYNAMIC
    ):
        return root
    found = _Anchors(root, dialect)
    targets: dict[int, list[str]] = {}
    for at, schema in every_schema(root):
        refs = [found.static(schema, at, keyword) for keyword in _DYNAMIC if keyword in schema]
        if refs and all(ref is not None for ref in refs):
            targets[id(schema)] = [ref for ref in refs if ref is not None]
    return _copied(root, targets)


def _copied(value: Any, targets: dict[int, list[str]]) -> Any:
    if isinstance(value, list):
        return [_copied(item, targets) for item in value]
    if not isinstance(value, dict):
        return value
    refs = targets.get(id(value))
    made = {
        name: _copied(item, targets)
        for name, item in value.items()
        if refs is None or name not in _DYNAMIC
    }
    if refs is None:
        return made
    if len(refs) == 1 and "$ref" not in made:
        return {"$ref": refs[0], **made}
    made["allOf"] = [*made.get("allOf", []), *({"$ref": ref} for ref in refs)]
    return made


class _Anchors:
    """Where dynamic anchors are."""

    def __init__(self, root: Any, dialect: int) -> None:
        self._root = root
        self._dialect = dialect
        self._references = References(root, dialect)
        self._root_base = self._resource(root)
        # Of each dynamic anchor, and of recursive ones (""), the resources that have it.
        self._having: dict[str, set[str]] = {}
        for _, schema in every_schema(root):
            name = schema.get("$dynamicAnchor")
            if isinstance(name, str) and dialect >= 2020:
                self._having.setdefault(name, set()).add(self._resource(schema))
            if schema.get("$recursiveAnchor") is True and dialect == 2019:
                self._having.setdefault("", set()).add(self._resource(schema))

    def static(self, schema: dict[str, Any], at: str, keyword: str) -> str | None:
        """The reference as a static one, or None."""
        ref = schema[keyword]
        if not isinstance(ref, str) or (keyword == "$dynamicRef") != (self._dialect >= 2020):
            return None
        if keyword == "$recursiveRef" and ref != "#":
            return None
        try:
            target = self._references.resolve(schema, at, keyword)
        except SchemaFault:
            return None
        name = self._anchor_of(target, urldefrag(ref)[1])
        if name is None:
            return ref
        having = self._having.get(name, set())
        if self._root_base not in having:
            return ref if len(having) == 1 else None
        if self._resource(schema) == self._root_base:
            return f"#{name}"
        own = self._root.get("$id") if isinstance(self._root, dict) else None
        return f"{urldefrag(own)[0]}#{name}" if isinstance(own, str) else None

    def _anchor_of(self, target: Any, fragment: str) -> str | None:
        """The dynamic anchor that a reference arrived by; None: it is an ordinary one."""
        if not isinstance(target, dict):
            return None
        if self._dialect == 2019:
            return "" if target.get("$recursiveAnchor") is True else None
        is_dynamic = bool(fragment) and target.get("$dynamicAnchor") == fragment
        return fragment if is_dynamic else None

    def _resource(self, schema: Any) -> str:
        return urldefrag(self._references.base(schema))[0] if isinstance(schema, dict) else ""
