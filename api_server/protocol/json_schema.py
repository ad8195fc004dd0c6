"""JSON schemas and regular expressions of requests, in the form that the grammar compiler takes.

Start at `rewrite_schema`. The compiler (llguidance) implements most of JSON Schema 2020-12. This
file translates older drafts, replaces constraints that the compiler would refuse by equal or
stricter ones, and removes constraints that no grammar of it can express. Removed keywords are
returned, so that the answer can name them; every other constraint holds for every answer.
The compiler keeps numbers as float64: bounds from 2^53 on are tightened to one that it holds, and
literals that it does not hold are refused. A few hundred bytes can stand for a schema of any size,
so what is rewritten counts against a `SchemaWork`.
`ecmascript_regex` gives classes such as ``\\d`` the meaning that JSON Schema gives them.
"""

import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar
from urllib.parse import unquote

from api_server.turns import WorkThread
from proto.errors import InvalidRequestError, OverloadedError
from proto.messages.grammar import MAX_GRAMMAR_BYTES, num_parts

JsonSchema = dict[str, Any] | bool

SUPPORTED_FORMATS: Final = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
"""Values of `format` that the compiler enforces; JSON Schema lets a validator ignore all others."""

_YEAR: Final = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
"""1 to 9999; programming languages have no year 0."""
_LEAP_YEAR: Final = (
    "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
)
_DATE: Final = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_TIME: Final = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?"
    "(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_DATE_PATTERNS: Final = {"date": f"^{_DATE}$", "date-time": f"^{_DATE}[tT]{_TIME}$"}

_ANNOTATIONS: Final = frozenset(
    {"$comment", "default", "deprecated", "description", "example", "examples", "title"}
    | {"readOnly", "writeOnly"}
)
_INEXPRESSIBLE: Final = frozenset(
    {"if", "then", "else", "contains", "minContains", "maxContains", "unevaluatedItems"}
    | {"$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor"}
)
_SIZES: Final = frozenset(
    {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"}
)
_COUNTS: Final = frozenset({"minProperties", "maxProperties"})
_TYPES: Final = ("null", "boolean", "object", "array", "number", "string", "integer")
_TYPE_NAMES: Final = f"one of {', '.join(_TYPES)}, or a list of these"
_KINDS: Final[Mapping[str, Callable[[Any], bool]]] = {
    "an object": lambda value: isinstance(value, dict),
    "a list": lambda value: isinstance(value, list),
    "a list of strings": lambda value: (
        isinstance(value, list) and all(isinstance(part, str) for part in value)
    ),
    "a string": lambda value: isinstance(value, str),
    "a number": lambda value: isinstance(value, int | float),
    "a whole number": lambda value: (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and value >= 0
        and value % 1 == 0
    ),
    "a number above 0": lambda value: (
        isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    ),
    _TYPE_NAMES: lambda value: (
        value in _TYPES
        or (isinstance(value, list) and value != [] and all(part in _TYPES for part in value))
    ),
}
_KIND_OF: Final = {
    **dict.fromkeys(("properties", "patternProperties", "$defs", "definitions"), "an object"),
    **dict.fromkeys(("dependencies", "dependentRequired", "dependentSchemas"), "an object"),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems", "enum"), "a list"),
    "required": "a list of strings",
    **dict.fromkeys(("$ref", "format", "pattern"), "a string"),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), "a number"),
    **dict.fromkeys(_SIZES, "a whole number"),
    "multipleOf": "a number above 0",
    "type": _TYPE_NAMES,
}
"""Keyword → kind of its value, where this pass relies on it."""
_COMPOSITION: Final = ("$ref", "allOf", "anyOf", "oneOf")
_BESIDE_REFERENCE: Final = frozenset({"$ref", "$id", "$anchor", "$defs", "definitions"})
_OLD_DRAFT: Final = re.compile(r"draft-0[3467]\b")
_PLAIN_ID_DRAFT: Final = re.compile(r"draft-0[34]\b")
_DEFINITION: Final = re.compile(r"#/(?:\$defs|definitions)/[^/%~]+")
"""A reference to a definition of the document, which keeps its place."""
_INDEX: Final = re.compile("[0-9]{1,9}")
_CONTROL: Final = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f\ud800-\udfff]")
"""All but those with an escape of their own, which are the only escapes that answers use."""
_UNBOUNDED: Final = 1e300
"""A bound from here on excludes no number that a client could read."""
_MIN_LARGE: Final = 1 << 53
"""From here on a float64 does not hold every integer, and nothing but integers."""
_MAX_INTEGER: Final = (1 << 63) - 1024
"""The largest float64 below 2^63: the compiler keeps integers in 64 bits."""
_MAX_NUMBER: Final = 10**18
"""The compiler builds no ranges of numbers beyond about 1e18, and none of integers that is open at
the far end."""
_LOWER: Final = ("minimum", "exclusiveMinimum")
_UPPER: Final = ("maximum", "exclusiveMaximum")
_MAX_DEPENDENCIES: Final = 4
"""Each doubles the alternatives of an object."""
_MAX_COUNTED_PROPERTIES: Final = 16
"""Optional properties of an object that are counted: each is an alternative of the object."""
MAX_STEPS: Final = 100_000
"""Of the schemas of a request, about 0.05 s. Of the SDKs' schemas one of 64 KiB takes 30,000."""
_STEPS_OF_SLICE: Final = 2_000
_PAUSE_SECONDS: Final = 0.001
_STEPS_OF_SCHEMA: Final = 16
_MAX_PLACE: Final = 200
"""Characters of a JSON pointer in an error."""
_MAX_COMPARISONS: Final = 10_000
"""Of two branches of `oneOf`, or of two properties in them."""


class SchemaWork:
    """What the schemas of one request may cost while they are rewritten; not thread-safe.

    A step is about half a microsecond: a value in JSON that is read, or 16 characters.
    has_pauses: sleep after each millisecond of work for as long, in a thread beside others, so
    that those need not wait for the interpreter lock.
    """

    def __init__(self, steps: int = MAX_STEPS, *, has_pauses: bool = False) -> None:
        self._steps = steps
        self._num_bytes = MAX_GRAMMAR_BYTES  # of rules
        self._has_pauses = has_pauses
        self._steps_of_slice = 0
        self.is_used_up = False

    def take_steps(self, steps: int) -> None:
        """Raise InvalidRequestError if fewer steps are left."""
        self._steps -= steps
        if self._steps < 0:
            self.is_used_up = True
            raise InvalidRequestError(
                "the schema is too complex: use fewer branches, references or properties"
            )
        self._steps_of_slice += steps
        if self._has_pauses and self._steps_of_slice > _STEPS_OF_SLICE:
            self._steps_of_slice = 0
            time.sleep(_PAUSE_SECONDS)

    def take_bytes(self, rule: str) -> None:
        """Raise InvalidRequestError if a rule is longer than what is left."""
        self._num_bytes -= len(rule)
        if self._num_bytes < 0:
            self.is_used_up = True
            raise InvalidRequestError(
                f"the schema makes a grammar of more than {MAX_GRAMMAR_BYTES} bytes"
            )

    def read(self, value: Any) -> None:
        """Count the values of JSON. Raises InvalidRequestError if they are too many or too deep."""
        self.take_steps(num_parts(value, self._steps))


QUICK_STEPS: Final = 6_000
"""Of `SchemaWork`, about 3 ms."""
MAX_WAITING: Final = 64
"""Requests of a tenant whose large schemas wait for the thread."""
_thread: Final = WorkThread("grammars")

Written = TypeVar("Written")


async def write_grammar(make: Callable[[SchemaWork], Written]) -> Written:
    """Return what `make` returns; it is called again on a thread if it takes long.

    Raises what `make` raises, ClientDisconnect, and OverloadedError if too many requests of the
    tenant wait.
    """
    work = SchemaWork(QUICK_STEPS)
    try:
        return make(work)
    except InvalidRequestError:
        if not work.is_used_up:
            raise
    if _thread.num_waiting() >= MAX_WAITING:
        raise OverloadedError("too many large schemas of this client wait to become grammars")
    return await _thread.run(make, SchemaWork(has_pauses=True))


def rewrite_schema(schema: Any, work: SchemaWork) -> tuple[JsonSchema, list[str]]:
    """Return a schema for the compiler, and the keywords that it leaves out, sorted.

    work: of the request's schemas. Raises InvalidRequestError for a
    schema that no text satisfies, for one whose constraints the compiler would change, naming the
    keyword and its place in the schema, and for one that takes too much work.
    """
    work.read(schema)
    rewriter = _Rewriter(schema, work)
    try:
        rewritten = rewriter.rewrite_document()
    except InvalidRequestError as error:
        place = rewriter.place
        if work.is_used_up or not place:
            raise
        place = place.encode(
            errors="backslashreplace"
        ).decode()  # half a surrogate pair is no UTF-8
        raise type(error)(f"at #{place}: {error.message}") from None
    if rewritten is False:
        raise InvalidRequestError("no text satisfies the schema")
    return ({} if rewritten is True else rewritten), sorted(rewriter.removed)


class _Rewriter:
    """One pass over a schema; `removed` collects the keywords that are left out.

    An error leaves `place` where it occurred.
    """

    def __init__(self, root: Any, work: SchemaWork) -> None:
        self._root = root
        self._work = work
        draft = root.get("$schema") if isinstance(root, dict) else None
        draft = draft if isinstance(draft, str) else ""
        self._is_old_draft = _OLD_DRAFT.search(draft) is not None
        self._has_plain_id = _PLAIN_ID_DRAFT.search(draft) is not None
        self._has_resources = _has_nested_id(root, "id" if self._has_plain_id else "$id")
        self._targets: dict[str, Any] = {}  # by reference
        self._moved: dict[int, str] = {}  # target, by its identity -> reference to its new place
        self._num_names = 0
        self._path: list[str] = []  # to the schema that is being rewritten
        self._pointers: dict[str, str] = {}  # reference to a new place -> to the old one
        self._facts: dict[int, _Facts] = {}  # by the identity of the schema
        self._comparisons: dict[tuple[int, int, int], bool] = {}
        self.removed: set[str] = set()

    def rewrite_document(self) -> JsonSchema:
        """Rewrite the root and the targets of its references."""
        root = self.rewrite(self._root)
        targets: dict[str, JsonSchema] = {}
        while len(targets) < len(self._moved):  # a target may contain further references
            for reference in list(self._moved.values())[len(targets) :]:
                self._path = unquote(self._pointers[reference]).split("/")[1:]
                targets[reference.rpartition("/")[2]] = self.rewrite(self._targets[reference])
        if targets and isinstance(root, dict):
            root["$defs"] = {**root.get("$defs", {}), **targets}
        return root

    @property
    def place(self) -> str:
        """JSON pointer to the schema being rewritten, or to the nearest part that the client sent.

        Rewriting nests some parts deeper than they were.
        """
        place, part = "", self._root
        for key in self._path:
            name = key.replace("~1", "/").replace("~0", "~")
            if name == "prefixItems" and isinstance(part, dict) and name not in part:
                key = name = "items"
            if isinstance(part, dict) and name in part:
                part = part[name]
            elif isinstance(part, list) and _INDEX.fullmatch(name) and int(name) < len(part):
                part = part[int(name)]
            else:
                break
            place += f"/{key}"
        return place if len(place) <= _MAX_PLACE else f"…{place[-_MAX_PLACE:]}"

    def rewrite(self, schema: Any) -> JsonSchema:
        """Rewrite a schema and all schemas in it."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise InvalidRequestError(
                f"a JSON schema is an object or a boolean, not {_shown(schema)}"
            )
        self._work.take_steps(_STEPS_OF_SCHEMA + 2 * len(schema))
        schema = {key: value for key, value in schema.items() if key not in _ANNOTATIONS}
        for key in _INEXPRESSIBLE & schema.keys():
            del schema[key]
            self.removed.add(key)
        _check_values(schema)
        for key in _SIZES & schema.keys():
            schema[key] = int(schema[key])
        for apply in (
            self._identifiers,
            self._references,
            self._tuples,
            self._dependencies,
            self._negation,
            self._property_names,
            self._unevaluated,
            self._property_count,
        ):
            schema = apply(schema)
            if isinstance(schema, bool):
                return schema
        rewritten: dict[str, Any] = {}
        for key, value in schema.items():
            rewritten[key] = self._rewrite_value(key, value)
        self._one_of(rewritten)
        self._formats(rewritten)
        self._bounds(rewritten)
        for key in ("enum", "const", "required"):
            _refuse_control_characters(key, rewritten.get(key))
        for key in ("enum", "const"):
            _refuse_inexact_integers(key, rewritten.get(key))
        if rewritten.get("uniqueItems") is False:
            del rewritten["uniqueItems"]
        elif "uniqueItems" in rewritten:
            del rewritten["uniqueItems"]
            self.removed.add("uniqueItems")
        return rewritten

    def _rewrite_value(self, key: str, value: Any) -> Any:
        """The value of one keyword; what is not a schema stays as it is."""
        if key in ("additionalProperties", "items"):
            return self._rewrite_part(value, key)
        if key in ("anyOf", "oneOf", "allOf", "prefixItems"):
            return [self._rewrite_part(part, key, str(at)) for at, part in enumerate(value)]
        if key in ("properties", "$defs", "definitions"):
            self._work.read(list(value))
            return {name: self._rewrite_part(part, key, name) for name, part in value.items()}
        if key == "patternProperties":
            return {
                self._regex(name): self._rewrite_part(part, key, name)
                for name, part in value.items()
            }
        if key == "pattern":
            return self._regex(value)
        self._work.read(value)
        return value

    def _rewrite_part(self, schema: Any, keyword: str, name: str | None = None) -> JsonSchema:
        """Rewrite a schema in the value of a keyword. name: in that value, if it has several."""
        depth = len(self._path)
        self._path.append(keyword)
        if name is not None:
            self._path.append(name.replace("~", "~0").replace("/", "~1"))
        rewritten = self.rewrite(schema)
        del self._path[depth:]
        return rewritten

    def _regex(self, pattern: str) -> str:
        self._work.take_steps(len(pattern))
        regex = ecmascript_regex(pattern)
        self._work.read(regex)
        return regex

    def _identifiers(self, schema: dict[str, Any]) -> JsonSchema:
        """Write `id` of draft 4 and its fragments as in 2020-12, the draft of the result."""
        schema.pop("$schema", None)
        if self._has_plain_id:
            schema.pop("$id", None)
            if isinstance(schema.get("id"), str):
                schema["$id"] = schema.pop("id")
        identifier = schema.get("$id")
        if isinstance(identifier, str) and identifier.startswith("#"):
            del schema["$id"]
            if len(identifier) > 1:
                schema["$anchor"] = identifier[1:]
        return schema

    def _references(self, schema: dict[str, Any]) -> JsonSchema:
        """Move the target of a reference to `$defs`, unless definitions contain it already.

        It may be in a part that has another place after this pass, or that is no schema, such as
        `components`. Keywords beside a reference have no effect before draft 2019-09; later, a
        type that the target has anyway is left out (the compiler refuses it if it is recursive).
        """
        reference = schema.get("$ref")
        if reference is None:
            return schema
        if self._is_old_draft:
            schema = {key: value for key, value in schema.items() if key in _BESIDE_REFERENCE}
        target = self._target(reference)
        target_types = listed_types(target.get("type", [])) if isinstance(target, dict) else set()
        if target_types and target_types <= listed_types(schema.get("type", [])):
            del schema["type"]
        if target is not None and not _DEFINITION.fullmatch(reference):
            if id(target) not in self._moved:
                self._moved[id(target)] = self._new_reference(target)
                self._pointers[self._moved[id(target)]] = reference
            schema["$ref"] = self._moved[id(target)]
        return schema

    def _new_reference(self, target: Any) -> str:
        """Return a reference to a new definition."""
        definitions = self._root.get("$defs", {})
        while (name := f"reference-{self._num_names}") in definitions:
            self._num_names += 1
        self._num_names += 1
        self._targets[f"#/$defs/{name}"] = target
        return f"#/$defs/{name}"

    def _target(self, reference: str) -> Any:
        """The schema that a JSON pointer within the document refers to; None for another place.

        In a document with an inner `$id` a pointer may start there; the compiler follows it.
        """
        if self._has_resources or not reference.startswith("#/"):
            return None
        if reference not in self._targets:
            self._work.take_steps(len(reference))
            self._targets[reference] = self._pointed_at(reference)
        return self._targets[reference]

    def _pointed_at(self, reference: str) -> Any:
        target = self._root
        for part in unquote(reference[2:]).split("/"):
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and _INDEX.fullmatch(part) and int(part) < len(target):
                target = target[int(part)]
            elif isinstance(target, dict) and part in target:
                target = target[part]
            else:
                return None
        return target

    def _tuples(self, schema: dict[str, Any]) -> JsonSchema:
        """`items` with a list, of drafts before 2020-12, is `prefixItems`."""
        if isinstance(schema.get("items"), list):
            prefix, rest = schema.pop("items"), schema.pop("additionalItems", True)
            schema |= {"prefixItems": prefix, "items": rest}
        else:
            schema.pop("additionalItems", None)
        return schema

    def _dependencies(self, schema: dict[str, Any]) -> JsonSchema:
        """A property that requires others: either it is absent, or they apply.

        Covers `dependentRequired`, `dependentSchemas` and `dependencies` of older drafts.
        """
        rules: list[tuple[str, JsonSchema]] = []
        for key in ("dependentRequired", "dependentSchemas", "dependencies"):
            for name, rule in schema.pop(key, {}).items():
                rules.append((name, {"required": rule} if isinstance(rule, list) else rule))
        rules = [(name, rule) for name, rule in rules if rule not in (True, {}, {"required": []})]
        if len(rules) > _MAX_DEPENDENCIES:
            self.removed.add("dependencies")
            return schema
        for name, rule in rules:
            if isinstance(rule, dict):
                _check_values(rule)
            present = {"required": [name]}
            if isinstance(rule, dict) and rule.keys() == {"required"}:
                with_rule: JsonSchema = {"required": [name, *rule["required"]]}
            else:
                with_rule = {"allOf": [present, rule]}
            choice = {"anyOf": [{"properties": {name: False}}, with_rule]}
            schema["allOf"] = [*schema.get("allOf", []), choice]
        return schema

    def _negation(self, schema: dict[str, Any]) -> JsonSchema:
        """`not` of types and of a required property; any other `not` is left out."""
        if "not" not in schema:
            return schema
        negated = schema.pop("not")
        if isinstance(negated, dict):
            _check_values(negated)
        if negated is True or negated == {}:
            return False
        if negated is False:
            return schema
        if isinstance(negated, dict) and negated.keys() == {"type"}:
            excluded = listed_types(negated["type"])
            if "integer" not in excluded or "number" in excluded:
                excluded = excluded | ({"integer"} if "number" in excluded else set())
                allowed = listed_types(schema.get("type", list(_TYPES[:-1])))
                kept = [name for name in _TYPES if name in allowed - excluded]
                if not kept:
                    return False
                schema["type"] = kept
                return schema
        if isinstance(negated, dict) and negated.keys() == {"required"}:
            names = negated["required"]
            if len(names) == 1:
                schema["properties"] = {**schema.get("properties", {}), names[0]: False}
                return False if names[0] in schema.get("required", []) else schema
        self.removed.add("not")
        return schema

    def _property_names(self, schema: dict[str, Any]) -> JsonSchema:
        """`propertyNames` with a pattern or names, where the object has no other properties."""
        if "propertyNames" not in schema:
            return schema
        names = schema.pop("propertyNames")
        if names is True or names == {} or names == {"type": "string"}:
            return schema
        others = {"properties", "patternProperties", *_COMPOSITION} & schema.keys()
        if isinstance(names, dict) and not others:
            names = {key: value for key, value in names.items() if key not in _ANNOTATIONS}
            names.pop("type", None)
            value = schema.get("additionalProperties", True)
            _check_values(names)
            if names.keys() == {"pattern"}:
                schema["patternProperties"] = {names["pattern"]: value}
                schema["additionalProperties"] = False
                return schema
            if names.keys() == {"enum"}:
                schema["properties"] = {
                    name: value for name in names["enum"] if isinstance(name, str)
                }
                schema["additionalProperties"] = False
                return schema
        self.removed.add("propertyNames")
        return schema

    def _unevaluated(self, schema: dict[str, Any]) -> JsonSchema:
        """`unevaluatedProperties` of an object without composition is `additionalProperties`."""
        if "unevaluatedProperties" not in schema:
            return schema
        value = schema.pop("unevaluatedProperties")
        if value is True or "additionalProperties" in schema:
            return schema
        if set(_COMPOSITION) & schema.keys():
            self.removed.add("unevaluatedProperties")
        else:
            schema["additionalProperties"] = value
        return schema

    def _property_count(self, schema: dict[str, Any]) -> JsonSchema:
        """`minProperties` and `maxProperties` beside optional properties, as alternatives.

        The compiler counts the properties of an object only if it must have all that are listed:

            a or b, at least one     has a │ has b │ has neither, but another property
            a or b, at most one      has a and nothing else │ has b … │ has neither, and …

        Other counts are left out. Names that are not listed can be repeated, which no grammar
        prevents, so a minimum that asks for several of them is reported too.
        """
        listed, required = schema.get("properties", {}), schema.get("required", [])
        minimum, maximum = schema.get("minProperties", 0), schema.get("maxProperties", math.inf)
        is_open = schema.get("additionalProperties") is not False or "patternProperties" in schema
        optional = [
            name for name, value in listed.items() if value is not False and name not in required
        ]
        least = len(set(required))
        most = math.inf if is_open else least + len(optional)
        if schema.get("type") == "object" and (minimum > most or maximum < max(minimum, least)):
            return False
        if minimum <= least:
            schema.pop("minProperties", None)
        elif is_open and minimum > least + 1:
            self.removed.add("minProperties")
        if maximum >= most:
            schema.pop("maxProperties", None)
        if not optional:
            return schema
        counts = {name: schema.pop(name) for name in _COUNTS & schema.keys()}
        can_count = len(optional) <= _MAX_COUNTED_PROPERTIES
        for name in [name for name, count in counts.items() if count != least + 1 or not can_count]:
            self.removed.add(name)
            del counts[name]
        if not counts:
            return schema
        alternatives: list[JsonSchema] = []
        for name in optional:
            self._work.take_steps(len(required))
            alternative: dict[str, Any] = {"required": [name]}
            if "maxProperties" in counts:
                members = dict.fromkeys([*required, name], True)
                alternative |= {"properties": members, "additionalProperties": False}
            alternatives.append(alternative)
        without: dict[str, Any] = {"properties": dict.fromkeys(optional, False)}
        if is_open:
            alternatives.append(without | counts)
        elif "minProperties" not in counts:
            alternatives.append(without)
        schema["allOf"] = [*schema.get("allOf", []), {"anyOf": alternatives}]
        return schema

    def _one_of(self, schema: dict[str, Any]) -> None:
        """`oneOf` is `anyOf`; reported unless no text satisfies two branches."""
        branches = schema.get("oneOf")
        if branches is None:
            return
        exclusive = all(
            self._exclude(one, other, 8)
            for at, one in enumerate(branches)
            for other in branches[:at]
        )
        if not exclusive:
            self.removed.add("oneOf")
        del schema["oneOf"]
        if "anyOf" in schema:
            schema["allOf"] = [*schema.get("allOf", []), {"anyOf": branches}]
        else:
            schema["anyOf"] = branches

    def _exclude(self, one: JsonSchema, other: JsonSchema, depth: int) -> bool:
        """Whether it is certain that no value satisfies both schemas."""
        one, other = self._resolved(one), self._resolved(other)
        if one is False or other is False:
            return True
        if depth == 0 or not isinstance(one, dict) or not isinstance(other, dict):
            return False
        compared = (id(one), id(other), depth)
        if compared not in self._comparisons:
            if len(self._comparisons) == _MAX_COMPARISONS:
                return False
            self._comparisons[compared] = False
            self._comparisons[compared] = self._facts_exclude(
                self._facts_of(one), self._facts_of(other), depth
            )
        return self._comparisons[compared]

    def _facts_of(self, schema: dict[str, Any]) -> "_Facts":
        facts = self._facts.get(id(schema))
        if facts is None:
            self._work.read(schema)
            facts = self._facts[id(schema)] = _Facts.of(schema)
        return facts

    def _facts_exclude(self, one: "_Facts", other: "_Facts", depth: int) -> bool:
        sizes = (len(one.names) + len(other.names), len(one.described) + len(other.described))
        num_values = min(len(one.values or ()), len(other.values or ()))
        self._work.take_steps(4 + (sum(sizes) + num_values) // 8)
        if one.types.isdisjoint(other.types):
            return True
        if (
            one.values is not None
            and other.values is not None
            and one.values.isdisjoint(other.values)
        ):
            return True
        if one.types & other.types != {"object"}:
            return False
        return (
            any(
                self._exclude(part, other.described[name], depth - 1)
                for name, part in one.described.items()
                if name in other.described
            )
            or other.lacks_any(one.names)
            or one.lacks_any(other.names)
        )

    def _resolved(self, schema: JsonSchema) -> JsonSchema:
        """The target of a schema that is only a reference within the document."""
        for _ in range(8):
            if not isinstance(schema, dict) or "$ref" not in schema:
                return schema
            reference = schema["$ref"]
            target = self._target(reference) if isinstance(reference, str) else None
            schema = {} if target is None else target
        return {}

    def _formats(self, schema: dict[str, Any]) -> None:
        """Dates become patterns: the compiler admits 29 February in any year."""
        name = schema.get("format")
        if name in _DATE_PATTERNS:
            del schema["format"]
            pattern = {"pattern": _DATE_PATTERNS[name]}
            schema["allOf"] = [*schema.get("allOf", []), pattern]
        elif name is not None and name not in SUPPORTED_FORMATS:
            del schema["format"]
            self.removed.add("format")

    def _bounds(self, schema: dict[str, Any]) -> None:
        """Write exclusive bounds as in 2020-12, and leave out those that no number exceeds.

        `exclusiveMinimum: true` of draft 4 makes `minimum` exclusive. Large bounds are tightened to
        numbers that the compiler keeps.
        """
        for (name, exclusive_name), sign in ((_LOWER, -1), (_UPPER, 1)):
            if isinstance(schema.get(exclusive_name), bool):
                is_exclusive = schema.pop(exclusive_name)
                if is_exclusive and name in schema:
                    schema[exclusive_name] = schema.pop(name)
            for key in (name, exclusive_name):
                if schema.get(key, 0) * sign >= _UNBOUNDED:
                    del schema[key]
        _tighten_large_bounds(schema)


def _has_nested_id(root: Any, name: str) -> bool:
    """Whether a part of a document has an identifier of its own, and so is the root of pointers."""
    parts = list(root.values()) if isinstance(root, dict) else []
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            identifier = part.get(name)
            if isinstance(identifier, str) and not identifier.startswith("#"):
                return True
            parts += part.values()
        elif isinstance(part, list):
            parts += part
    return False


def _check_values(schema: Mapping[str, Any]) -> None:
    """Raise InvalidRequestError for a keyword whose value has a type that it cannot have."""
    for key, value in schema.items():
        kind = _KIND_OF.get(key)
        if kind is not None and not _KINDS[kind](value):
            raise InvalidRequestError(f"{key} must be {kind}, not {_shown(value)}")


def listed_types(types: Any) -> set[str]:
    types = types if isinstance(types, list) else [types]
    return {name for name in types if isinstance(name, str)}


@dataclass(frozen=True, slots=True)
class _Facts:
    """What a schema says of the values that satisfy it.

    schema: kept, because its identity is a key. types: "number" stands for both kinds of numbers.
    values: of `const` or `enum` as JSON; None without them. names: properties that an object must
    have. described: schemas of those by name. listed: all properties, if others are not allowed.
    """

    schema: Mapping[str, Any]
    types: frozenset[str]
    values: frozenset[str] | None
    names: Sequence[str]
    described: Mapping[str, JsonSchema]
    listed: Mapping[str, Any] | None

    @classmethod
    def of(cls, schema: Mapping[str, Any]) -> "_Facts":
        types = listed_types(schema.get("type", list(_TYPES)))
        values = None
        if "const" in schema:
            values = [schema["const"]]
        elif isinstance(schema.get("enum"), list):
            values = schema["enum"]
        if values is not None:
            found = {type_of(value) for value in values}
            types &= found | ({"integer"} if "number" in found else set())
        names, properties = schema.get("required", []), schema.get("properties", {})
        names = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
        properties = properties if isinstance(properties, dict) else {}
        is_closed = schema.get("additionalProperties") is False
        return cls(
            schema,
            frozenset("number" if name == "integer" else name for name in types),
            None if values is None else frozenset(map(_canonical, values)),
            names,
            {name: properties[name] for name in names if name in properties},
            properties if is_closed and "patternProperties" not in schema else None,
        )

    def lacks_any(self, names: Sequence[str]) -> bool:
        """Whether an object that satisfies the schema cannot have all of these properties."""
        return self.listed is not None and any(name not in self.listed for name in names)


def type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    kinds = ((str, "string"), (list, "array"), (dict, "object"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "number")


def _canonical(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True)


def _refuse_control_characters(key: str, value: Any) -> None:
    """Raise InvalidRequestError for strings in `value` that JSON can only spell with ``\\u``."""
    if isinstance(value, str):
        if _CONTROL.search(value):
            raise InvalidRequestError(f"{key}: control characters are not supported")
    elif isinstance(value, list):
        for part in value:
            _refuse_control_characters(key, part)
    elif isinstance(value, dict):
        _refuse_control_characters(key, [*value.keys(), *value.values()])


def _refuse_inexact_integers(key: str, value: Any) -> None:
    """Raise InvalidRequestError for an integer in a literal that the compiler would change."""
    if isinstance(value, int):
        if abs(value) > _MAX_INTEGER or int(float(value)) != value:
            raise InvalidRequestError(
                f"{key}: {_shown(value)} is not supported, only integers within 64 bits that a "
                "float64 holds exactly (all up to 2^53)"
            )
    elif isinstance(value, list):
        for part in value:
            _refuse_inexact_integers(key, part)
    elif isinstance(value, dict):
        _refuse_inexact_integers(key, list(value.values()))


def _tighten_large_bounds(schema: dict[str, Any]) -> None:
    """Tighten bounds from 2^53 on to a float64; an exclusive one becomes inclusive.

    The compiler would add 1 to it as float64. Raises InvalidRequestError for a bound that leaves no
    number that the compiler keeps.
    """
    if all(abs(schema.get(key, 0)) < _MIN_LARGE for key in (*_LOWER, *_UPPER)):
        return
    integers = listed_types(schema.get("type", [])) == {"integer"}
    limit = _MAX_INTEGER if integers else _MAX_NUMBER
    for (name, exclusive_name), sign in ((_LOWER, -1), (_UPPER, 1)):
        for key in (name, exclusive_name):
            if abs(schema.get(key, 0)) < _MIN_LARGE:
                continue
            bound = schema.pop(key)
            if bound * sign < -limit:
                raise InvalidRequestError(f"{key}: bounds beyond {limit:.3g} are not supported")
            tight = sign * limit if bound * sign > limit else int(float(bound))
            if (tight - bound) * sign > 0 or (key != name and tight == bound):
                tight = int(math.nextafter(float(bound), -sign * math.inf))
            other = schema.get(name, tight)
            schema[name] = min(tight, other) if sign > 0 else max(tight, other)
    if integers:
        if schema.get("minimum", 0) >= _MAX_NUMBER:
            schema.setdefault("maximum", _MAX_INTEGER)
        if schema.get("maximum", 0) <= -_MAX_NUMBER:
            schema.setdefault("minimum", -_MAX_INTEGER)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}…"


# Regular expressions

_SPACE: Final = (
    r"\t\n\x0B\x0C\r \x{A0}\x{1680}\x{2000}-\x{200A}"
    r"\x{2028}\x{2029}\x{202F}\x{205F}\x{3000}\x{FEFF}"
)
_CLASSES: Final = {"d": "0-9", "w": "A-Za-z0-9_", "s": _SPACE}


def ecmascript_regex(pattern: str) -> str:
    r"""Rewrite classes of ECMAScript, which JSON Schema uses, for the compiler's regex syntax.

    ``\d`` and ``\w`` are ASCII, ``\s`` is ECMAScript's white space, ``.`` excludes all of its line
    ends, and `[`, `&`, `~` and `-` in a class are characters (the compiler's syntax nests classes
    and has set operators).
    """
    out: list[str] = []
    at, in_class = 0, False
    while at < len(pattern):
        char = pattern[at]
        if char == "\\" and at + 1 < len(pattern):
            letter = pattern[at + 1]
            at += 2
            if letter.lower() not in _CLASSES:
                out.append(char + letter)
                continue
            members = _CLASSES[letter.lower()]
            if in_class and letter.islower():
                out.append(members)
                if pattern[at : at + 1] == "-" and pattern[at + 1 : at + 2] != "]":
                    out.append("\\-")
                    at += 1
            else:
                out.append(f"[{'' if letter.islower() else '^'}{members}]")
            continue
        at += 1
        if in_class:
            in_class = char != "]"
            out.append(f"\\{char}" if char in "[&~" else char)
        elif char == "[":
            if pattern.startswith("^]", at):
                out.append(r"[\s\S]")
                at += 2
                continue
            in_class = True
            out.append(char)
            if pattern[at : at + 1] == "^":
                out.append("^")
                at += 1
        elif char == ".":
            out.append(r"[^\n\r\x{2028}\x{2029}]")
        else:
            out.append(char)
    return "".join(out)


# A schema as a Lark rule within a larger grammar.


_ESCAPES: Final = r'"\bfnrt'
_OPTIONS: Final = {"whitespace_pattern": r"[ ]|\n[ ]{0,24}", "json_allowed_escapes": _ESCAPES}
"""The white space and escapes that structured output admits."""
_COMPACT_OPTIONS: Final = {"whitespace_flexible": False, "json_allowed_escapes": _ESCAPES}


def json_rule(
    name: str, schema: Mapping[str, Any] | bool, work: SchemaWork, *, compact: bool = False
) -> str:
    """Return the Lark rule of this name for JSON that conforms to a rewritten schema.

    work: of the request's schemas. compact: JSON without white space.
    Raises InvalidRequestError for a schema that no text satisfies, and for one that takes too much
    work.
    """
    if schema is False:
        raise InvalidRequestError("no text satisfies the schema false")
    given = {} if schema is True else schema
    options = _COMPACT_OPTIONS if compact else _OPTIONS
    rule = f"{name}: %json {json.dumps({**given, 'x-guidance': options})}"
    work.take_bytes(rule)
    return rule
