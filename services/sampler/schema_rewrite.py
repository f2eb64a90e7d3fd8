"""A schema as its author wrote it -> an equal one in the keywords that the engine enforces exactly.

What has no such form is refused, keyword and JSON pointer named, or under `lenient` let go and told
(`widened`). Nothing is ever enforced more loosely in silence. Keywords are replaced where they stand
and additions go to `allOf`'s end, so that pointers into the document stay right.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from finback.services.sampler.ecma_regex import for_engine
from finback.services.sampler.schema_arrays import (
    arrays_or_others,
    containing_arrays,
    unique_arrays,
)
from finback.services.sampler.schema_ends import ALL_TYPES, Endings, types_of
from finback.services.sampler.schema_evaluated import evaluated_members
from finback.services.sampler.schema_fault import SchemaFault, child, dialect_of
from finback.services.sampler.schema_formats import UNSUPPORTED, format_parts
from finback.services.sampler.schema_negate import (
    all_of,
    any_of,
    is_all_of_type,
    may_meet,
    negate,
)
from finback.services.sampler.schema_refs import References
from finback.services.sampler.schema_walk import MANY, NAMED, ONE

# Keywords that this module takes out, putting something equal elsewhere.
_DROPPED: Final = frozenset(
    {
        "$comment", "$recursiveAnchor", "contentEncoding", "contentMediaType", "contentSchema",
        "default", "deprecated", "description", "examples", "readOnly", "title", "writeOnly",
        "x-guidance", "$vocabulary",
    }
)  # fmt: skip
_APPLICATORS: Final = frozenset(
    {"$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf", "if", "not",
     "dependentSchemas", "dependencies", "contains"}
)  # fmt: skip
_COUNTS: Final = frozenset({"maxItems", "minItems", "maxLength", "minLength", "maxProperties"})
_MAX_BRANCHES: Final = 64  # of `oneOf`, each compared with every other


class Rewriter:
    """One document. `widened` grows by what is let go, `rewritten` by what is said otherwise:
    (pointer, what is in its place)."""

    def __init__(self, root: Any, *, is_lenient: bool) -> None:
        self._root = root
        self._dialect = dialect_of(root)
        self._is_lenient = is_lenient
        self._references = References(root, self._dialect)
        self._endings = Endings(self._references, self._dialect)
        self.widened: list[str] = []
        self.rewritten: list[tuple[str, list[Any]]] = []

    @property
    def endings(self) -> Endings:
        """Which of the document's schemas end."""
        return self._endings

    @property
    def dialect(self) -> int:
        """The draft it is written in."""
        return self._dialect

    def run(self) -> Any:
        """The equal schema. Raises `SchemaFault`."""
        return self._schema(self._root, "#")

    # -- one schema

    def _schema(self, schema: Any, at: str) -> Any:
        if not isinstance(schema, dict):
            return schema
        if "$ref" in schema:
            self._references.resolve(schema, at)
            if self._dialect <= 7:
                schema = self._beside_ref(schema)
        if at != "#" and not self._endings.ends(schema, at):
            return False
        out: dict[str, Any] = {}
        added: list[Any] = []
        for keyword, value in schema.items():
            rule = _RULES.get(keyword)
            if rule is not None:
                made = rule(self, schema, value, child(at, keyword))
                self.rewritten.append((child(at, keyword), made))
                if any(part is False for part in made):
                    return self._empty(child(at, keyword), keyword, is_root=at == "#")
                added += [part for part in made if part is not True and part != {}]
            elif keyword == "$dynamicAnchor":
                out.setdefault("$anchor", value)  # all that it is without a dynamic reference
            elif keyword not in _DROPPED:
                out[keyword] = self._value(keyword, value, child(at, keyword))
        self._settle_bounds(out)
        self._settle_unevaluated(schema, out, at)
        if added:
            out["allOf"] = [*out.get("allOf", []), *added]
        return out

    def _empty(self, at: str, keyword: str, *, is_root: bool) -> bool:
        if is_root:
            raise SchemaFault("this lets no value be", pointer=at, reason=keyword)
        return False

    def _beside_ref(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Up to draft 7 only a reference counts, and what others may refer to."""
        kept = ("$ref", "definitions", "$defs", "$schema")
        return {name: schema[name] for name in kept if name in schema}

    def _value(self, keyword: str, value: Any, at: str) -> Any:
        """A keyword's value with the schemas in it rewritten."""
        if keyword == "pattern":
            return for_engine(value)
        if keyword == "patternProperties":
            return {for_engine(n): self._schema(v, child(at, n)) for n, v in value.items()}
        if keyword in NAMED:
            return {name: self._schema(item, child(at, name)) for name, item in value.items()}
        if keyword in MANY and isinstance(value, list):
            return [self._schema(item, child(at, i)) for i, item in enumerate(value)]
        if keyword in _COUNTS:
            return int(value)  # 2.0 is an integer to JSON Schema, not to the engine
        return self._schema(value, at) if keyword in ONE else value

    def _give_up(self, at: str, keyword: str, why: str) -> list[Any]:
        if not self._is_lenient:
            raise SchemaFault(why, pointer=at, reason=keyword)
        self.widened.append(at)
        return []

    def _resolve(self, schema: dict[str, Any]) -> Any:
        return self._references.resolve(schema, "#")

    def _negated(self, schema: Any) -> Any:
        return negate(schema, self._resolve)

    # -- keywords that are replaced

    def _not(self, _: dict[str, Any], value: Any, at: str) -> list[Any]:
        negated = self._negated(value)
        if negated is None:
            return self._give_up(at, "not", "the complement of this schema cannot be expressed")
        return [self._schema(negated, at)]

    def _one_of(self, schema: dict[str, Any], value: list[Any], at: str) -> list[Any]:
        """Branches that exclude each other as they are, or with the others' complements.

        For all types of values at once, or where that cannot be said, for each type.
        """
        if len(value) > _MAX_BRANCHES:
            return self._one_of_given_up(value, at)
        ours = [self._schema(branch, child(at, index)) for index, branch in enumerate(value)]
        made = self._one_of_in(value, ours, ALL_TYPES, at)
        if made is not None:
            return [any_of(made)]
        parts = []
        for name in sorted(types_of(schema)):
            of_type = self._one_of_in(value, ours, frozenset({name}), at)
            if of_type is None:
                return self._one_of_given_up(value, at)
            parts += [_of_type(part, name) for part in of_type]
        return [any_of(parts)]

    def _one_of_in(
        self, value: list[Any], ours: list[Any], types: frozenset[str], at: str
    ) -> list[Any] | None:
        """For values of some types, schemas of which one must hold; None: that cannot be said."""
        if len(types) == 1:
            (name,) = types
            if sum(is_all_of_type(branch, name, self._resolve) for branch in value) > 1:
                return []  # whatever it is, it is right by two
        branches = []
        for index, branch in enumerate(value):
            if not may_meet(branch, {"type": sorted(types)}, self._resolve):
                continue
            others = [o for i, o in enumerate(value) if i != index]
            others = [o for o in others if may_meet(branch, o, self._resolve, types=types)]
            excluded = [self._negated(other) for other in others]
            if any(part is None for part in excluded):
                return None
            branches.append(all_of([ours[index], *(self._schema(part, at) for part in excluded)]))
        return branches

    def _one_of_given_up(self, value: list[Any], at: str) -> list[Any]:
        self._give_up(at, "oneOf", "its branches may be right at once, which cannot be excluded")
        return [any_of([self._schema(branch, child(at, i)) for i, branch in enumerate(value)])]

    def _if(self, schema: dict[str, Any], value: Any, at: str) -> list[Any]:
        then, otherwise = schema.get("then", True), schema.get("else", True)
        if then in (True, {}) and otherwise in (True, {}):
            return []
        negated = self._negated(value)
        if negated is None:
            return self._give_up(at, "if", "the complement of this condition cannot be expressed")
        holds = all_of([self._schema(value, at), self._schema(then, _beside(at, "then"))])
        fails = all_of([self._schema(negated, at), self._schema(otherwise, _beside(at, "else"))])
        return [any_of([holds, fails])]

    def _nothing(self, _: dict[str, Any], __: Any, ___: str) -> list[Any]:
        return []

    def _dependent(self, _: dict[str, Any], value: dict[str, Any], at: str) -> list[Any]:
        """Either the member is not there, or what depends on it is right."""
        parts = []
        for name, needed in value.items():
            absent = {"properties": {name: False}}
            if isinstance(needed, list):
                present: Any = {"required": needed}
            else:
                present = self._schema(needed, child(at, name))
            parts.append(any_of([absent, present]))
        return parts

    def _unique_items(self, schema: dict[str, Any], value: bool, at: str) -> list[Any]:
        if not value or schema.get("maxItems", 2) < 2:
            return []
        items = schema.get("items")
        if isinstance(items, dict) and "$ref" in items:
            items = self._resolve(items)
        arrays = unique_arrays(schema, items, self._dialect)
        if arrays is None:
            return self._give_up(
                at, "uniqueItems", "that items of many values differ cannot be enforced"
            )
        return [any_of(arrays_or_others(schema, arrays))]

    def _property_names(self, schema: dict[str, Any], value: Any, at: str) -> list[Any]:
        if value is False:
            return [{"maxProperties": 0}]
        if value is True or (set(value) <= {"type"} and value.get("type", "string") == "string"):
            return []
        pattern = _name_pattern(value)
        names = [value["const"]] if "const" in value else value.get("enum")
        if pattern is not None:
            only: dict[str, Any] = {"patternProperties": {for_engine(pattern): True}}
        elif names is not None and set(value) <= {"type", "enum", "const"}:
            only = {"properties": {name: True for name in names if isinstance(name, str)}}
        else:
            return self._give_up(at, "propertyNames", "only a pattern or names can be enforced")
        return [{**only, "additionalProperties": False}]

    def _min_properties(self, schema: dict[str, Any], value: float, at: str) -> list[Any]:
        """The engine counts a name that comes twice as two."""
        if value <= len(set(schema.get("required") or ())):
            return []
        if value > 1:
            return self._give_up(
                at, "minProperties", "that many different members are not enforced"
            )
        return [{"minProperties": int(value)}]

    def _contains(self, schema: dict[str, Any], value: Any, at: str) -> list[Any]:
        if schema.get("minContains") == 0 and "maxContains" not in schema:
            return []
        if value is False:
            return [{"type": ["object", "string", "number", "boolean", "null"]}]
        if value in (True, {}):
            bounds = {"minItems": max(1, int(schema.get("minContains", 1)))}
            if "maxContains" in schema:
                bounds["maxItems"] = int(schema["maxContains"])
            return [bounds]
        negated = self._negated(value)
        arrays = containing_arrays(
            schema,
            self._schema(value, at),
            None if negated is None else self._schema(negated, at),
            self._dialect,
        )
        if arrays is None:
            return self._give_up(
                at, "contains", "that some item of a long array is right cannot be enforced"
            )
        return [any_of(arrays_or_others(schema, arrays))]

    def _format(self, _: dict[str, Any], value: str, at: str) -> list[Any]:
        if value in UNSUPPORTED:
            return self._give_up(at, "format", f"the format {value!r} cannot be enforced")
        parts = format_parts(value)
        if not parts:
            self.widened.append(at)  # an annotation by the specification, but who wrote it is told
        return parts

    def _dynamic_ref(self, _: dict[str, Any], __: Any, at: str) -> list[Any]:
        keyword = at.rsplit("/", 1)[-1]
        return self._give_up(at, keyword, f"{keyword} is not supported")

    # -- keywords that depend on their neighbours

    def _settle_bounds(self, out: dict[str, Any]) -> None:
        """Draft 4's exclusive bounds are switches."""
        if self._dialect != 4:
            return
        for bound, switch in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
            is_exclusive = out.pop(switch, False)
            if is_exclusive and bound in out:
                out[switch] = out.pop(bound)

    def _settle_unevaluated(self, schema: dict[str, Any], out: dict[str, Any], at: str) -> None:
        """As `additionalProperties` and `items`, where no condition stands beside them."""
        value = out.pop("unevaluatedItems", True)
        if value not in (True, {}):
            self._unevaluated_items(schema, out, value, child(at, "unevaluatedItems"))
        value = out.pop("unevaluatedProperties", True)
        if value not in (True, {}):
            self._unevaluated_members(schema, out, value, child(at, "unevaluatedProperties"))

    def _unevaluated_items(
        self, schema: dict[str, Any], out: dict[str, Any], value: Any, at: str
    ) -> None:
        if _APPLICATORS & set(schema) or self._dialect <= 7:
            self._give_up(at, "unevaluatedItems", "it is not supported beside other schemas")
        elif isinstance(out.get("items"), list):
            out.setdefault("additionalItems", value)
        else:
            out.setdefault("items", value)

    def _unevaluated_members(
        self, schema: dict[str, Any], out: dict[str, Any], value: Any, at: str
    ) -> None:
        found = evaluated_members(schema, self._resolve, own="unevaluatedProperties")
        if found is None or self._dialect <= 7:
            self._give_up(at, "unevaluatedProperties", "it is not supported beside conditions")
        elif not found.is_all and "additionalProperties" not in out:
            out["properties"] = {**dict.fromkeys(found.names, True), **out.get("properties", {})}
            patterns = {for_engine(pattern): True for pattern in found.patterns}
            if patterns:
                out["patternProperties"] = {**patterns, **out.get("patternProperties", {})}
            out["additionalProperties"] = value


def _of_type(schema: Any, name: str) -> Any:
    """The values of one type; in the schema itself, because the engine merges no cycles."""
    if isinstance(schema, dict) and "$ref" not in schema:
        if "type" not in schema:
            return {"type": name, **schema}
        if types_of(schema) == {name}:
            return schema
    return all_of([{"type": name}, schema])


def _name_pattern(names: dict[str, Any]) -> str | None:
    """Names told by one pattern, or by their length."""
    if set(names) <= {"type", "pattern"}:
        pattern = names.get("pattern")
        return pattern if isinstance(pattern, str) else None
    if set(names) <= {"type", "minLength", "maxLength"}:
        high = names.get("maxLength")
        return rf"^[\s\S]{{{int(names.get('minLength', 0))},{'' if high is None else int(high)}}}$"
    return None


def _beside(at: str, keyword: str) -> str:
    return f"{at.rsplit('/', 1)[0]}/{keyword}"


_Rule = Callable[[Rewriter, dict[str, Any], Any, str], list[Any]]
_RULES: Final[Mapping[str, _Rule]] = {
    "not": Rewriter._not,
    "oneOf": Rewriter._one_of,
    "if": Rewriter._if,
    "then": Rewriter._nothing,
    "else": Rewriter._nothing,
    "dependencies": Rewriter._dependent,
    "dependentRequired": Rewriter._dependent,
    "dependentSchemas": Rewriter._dependent,
    "uniqueItems": Rewriter._unique_items,
    "propertyNames": Rewriter._property_names,
    "contains": Rewriter._contains,
    "minContains": Rewriter._nothing,
    "maxContains": Rewriter._nothing,
    "format": Rewriter._format,
    "minProperties": Rewriter._min_properties,
    "$dynamicRef": Rewriter._dynamic_ref,
    "$recursiveRef": Rewriter._dynamic_ref,
}
