"""JSON schemas as Lark rules, in which numbers of any size are exact.

The compiler keeps the numbers of a JSON schema as float64. So the parts of a schema that lead to a
number from 2^53 on become Lark rules here, and all other parts stay JSON schemas:

    {"type": "array", "items": {"anyOf": [{"const": 9007199254740993}, {"type": "string"}]}}

    start_0: "9007199254740993"
    start_1: %json {"type": "string"}
    start_2: start_0 | start_1
    …

Where a schema cannot become rules, as beside `allOf`, bounds are tightened to the next number that
a float64 holds, and a literal that it does not hold is refused.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, Final, NamedTuple

from api_server.protocol.fields import errors_of
from api_server.protocol.json_schema import SchemaWork, listed_types, type_of
from proto.errors import InvalidRequestError
from proto.messages.grammar import GrammarSource, decoded

Schema = Mapping[str, Any] | bool

_ESCAPES: Final = r'"\bfnrt'
_OPTIONS: Final = {"whitespace_pattern": r"[ ]|\n[ ]{0,24}", "json_allowed_escapes": _ESCAPES}
"""The white space and escapes that structured output admits."""
_COMPACT_OPTIONS: Final = {"whitespace_flexible": False, "json_allowed_escapes": _ESCAPES}
_BLANK: Final = r"/([ ]|\n[ ]{0,24})?/"
_COMMA: Final = '","'
_COLON: Final = '":"'
_OPEN_LIST: Final = '"["'
_CLOSE_LIST: Final = '"]"'
_OPEN_OBJECT: Final = '"{"'
_CLOSE_OBJECT: Final = '"}"'
_NAME: Final = r'/"(\\["\\bfnrt]|[^"\\\x00-\x1F\x7F])*"/'

_MAYBE_LARGE: Final = re.compile(r"[0-9]{16}|[0-9][eE]")
_MIN_LARGE: Final = 1 << 53
"""From here on a float64 does not hold every integer, and nothing but integers."""
_MAX_INTEGER: Final = (1 << 63) - 1024
"""The largest float64 below 2^63: the compiler keeps integers in 64 bits."""
_MAX_NUMBER: Final = 10**18
"""The compiler builds no ranges of numbers beyond about 1e18, and none of integers that is open at
the far end."""
_MAX_BOUND: Final = 10**64
"""Each digit of a bound takes three of the compiler's 250 levels of a regular expression."""

_LOWER: Final = ("minimum", "exclusiveMinimum")
_UPPER: Final = ("maximum", "exclusiveMaximum")
_LITERALS: Final = frozenset({"enum", "const"})
_DEFINITIONS: Final = frozenset({"$defs", "definitions"})
_SCHEMA_MAPS: Final = frozenset({"properties", "patternProperties"})
_SCHEMA_LISTS: Final = frozenset({"allOf", "anyOf", "prefixItems"})
_SCHEMAS: Final = frozenset({"items", "additionalProperties"})
_OF_TYPE: Final[Mapping[str, frozenset[str]]] = {
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "boolean": frozenset(),
    "null": frozenset(),
    "number": frozenset({*_LOWER, *_UPPER, "multipleOf"}),
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
}
"""Type → keywords that restrict values of this type only."""


class _Bound(NamedTuple):
    """An end of a range of numbers."""

    value: int | float
    is_exclusive: bool

    @property
    def is_large(self) -> bool:
        return abs(self.value) >= _MIN_LARGE


def json_rules(name: str, schema: Schema, work: SchemaWork, *, compact: bool = False) -> list[str]:
    """Return Lark rules for JSON that conforms to a schema; the first one has this name.

    work: of the request's schemas. compact: JSON without white space.
    Raises InvalidRequestError for a schema that no text satisfies, for a large number where it
    cannot be exact, and for one that takes too much work.
    """
    if schema is False:
        raise InvalidRequestError("no text satisfies the schema false")
    options = _COMPACT_OPTIONS if compact else _OPTIONS
    if not isinstance(schema, bool) and has_large_numbers(schema):
        return _RuleWriter(name, schema, options, work).write()
    rule = f"{name}: {_json_piece({} if schema is True else schema, options)}"
    work.take_bytes(rule)
    return [rule]


def with_exact_numbers(source: GrammarSource | None, work: SchemaWork) -> GrammarSource | None:
    """Return a JSON schema with large numbers as Lark, any other source as it is."""
    if source is None or source.kind != "json_schema" or not _MAYBE_LARGE.search(source.source):
        return source
    schema = decoded(source.source)
    if not has_large_numbers(schema):
        return source
    with errors_of(source.field):
        rules = json_rules("start", schema, work, compact=source.compact)
    return GrammarSource("grammar", "\n".join(rules), field=source.field)


def has_large_numbers(schema: Schema) -> bool:
    """Return whether a schema or one of its definitions has a number that float64 may change."""
    return any(map(_has_own_large_number, _parts_within(schema)))


class _RuleWriter:
    """Writes the rules of one schema.

    An expression is the body of a rule; None stands for a schema that no text satisfies.
    """

    def __init__(
        self, name: str, root: Mapping[str, Any], options: Mapping[str, Any], work: SchemaWork
    ) -> None:
        self._name = name
        self._root = root
        self._options = options
        self._work = work
        self._blank = "" if options is _COMPACT_OPTIONS else f"{name.upper()}_BLANK"
        self._rules: list[str] = []
        self._definitions = {
            f"#/{key}/{title}": definition
            for key in _DEFINITIONS & root.keys()
            for title, definition in root[key].items()
        }
        self._large_definitions = self._find_large_definitions()
        self._large_parts = self._find_large_parts()
        self._rule_of_definition: dict[str, str] = {}

    def write(self) -> list[str]:
        parts = list(_parts_within(self._root))
        if any("$ref" in part and part["$ref"] not in self._definitions for part in parts):
            expression = self._json(self._root, "in a schema with a $ref to other than definitions")
        elif any("$id" in part for part in parts if part is not self._root):
            expression = self._json(self._root, "in a schema with an inner $id")
        else:
            expression = self._expression(self._root)
        if expression is None:
            raise InvalidRequestError("no text satisfies the schema")
        rules = [f"{self._name}: {expression}", *self._rules]
        return [*rules, f"{self._blank}: {_BLANK}"] if self._blank else rules

    def _find_large_definitions(self) -> set[str]:
        """Return references to definitions that lead to a large number, maybe by others."""
        large, users = list[str](), dict[str, list[str]]()
        for reference, definition in self._definitions.items():
            for part in _parts_within(definition):
                if _has_own_large_number(part):
                    large.append(reference)
                if "$ref" in part:
                    users.setdefault(part["$ref"], []).append(reference)
        found: set[str] = set()
        while large:
            reference = large.pop()
            if reference not in found:
                found.add(reference)
                large += users.get(reference, [])
        return found

    def _find_large_parts(self) -> set[int]:
        """Return the identities of all parts of the schema that lead to a large number."""
        large: set[int] = set()
        for part in reversed(list(_parts_within(self._root))):  # inner parts before outer ones
            self._work.take_steps(4)
            is_large = _has_own_large_number(part) or part.get("$ref") in self._large_definitions
            if is_large or any(id(inner) in large for inner in _inner_schemas(part)):
                large.add(id(part))
        return large

    def _is_large(self, schema: Any) -> bool:
        """Return whether a schema, with its inner ones from the root, leads to a large number."""
        return isinstance(schema, dict) and (
            id(schema) in self._large_parts
            or _has_own_large_number(schema)
            or schema.get("$ref") in self._large_definitions
            or any(id(inner) in self._large_parts for inner in _inner_schemas(schema))
        )

    def _expression(self, schema: Schema) -> str | None:
        if isinstance(schema, bool) or not self._is_large(schema):
            return self._json(schema)
        keys = schema.keys() - _DEFINITIONS - {"$id"}
        if "$ref" in keys:
            known, write = frozenset({"$ref"}), self._reference
        elif any(map(_is_inexact, _literals_of(schema))):
            known, write = _LITERALS | _OF_TYPE["number"] | {"type"}, self._literals
        elif "anyOf" in keys:
            known, write = frozenset({"anyOf"}), self._any_of
        else:
            known, write = frozenset({"type"}).union(*_OF_TYPE.values()), self._by_type
        return self._json(schema, f"beside {min(keys - known)}") if keys - known else write(schema)

    def _rule(self, schema: Schema) -> str | None:
        """Return the name of a new rule for a schema."""
        expression = self._expression(schema)
        return None if expression is None else self._new_rule(expression)

    def _new_rule(self, expression: str) -> str:
        """Return the name of a new rule."""
        name = f"{self._name}_{len(self._rules)}"
        self._rules.append(f"{name}: {expression}")
        self._work.take_bytes(self._rules[-1])
        return name

    def _json(self, schema: Schema, where: str = "") -> str | None:
        """A part as JSON schema, with the definitions that it refers to.

        where: why it cannot be rules, if it leads to large numbers.
        """
        if schema is False:
            return None
        whole = _rounded({} if schema is True else schema, where)
        if schema is self._root:
            return _json_piece(whole, self._options)
        whole = {key: value for key, value in whole.items() if key not in _DEFINITIONS}
        pending = [whole]
        for one in pending:
            for part in list(_parts_within(one, definitions=False)):
                _, key, title = part.get("$ref", "//").split("/", 2)
                if key and title not in whole.setdefault(key, {}):
                    whole[key][title] = _rounded(self._definitions[part["$ref"]], where)
                    pending.append(whole[key][title])
        return _json_piece(whole, self._options)

    def _reference(self, schema: Mapping[str, Any]) -> str | None:
        reference = schema["$ref"]
        if reference not in self._rule_of_definition:
            index = len(self._rules)
            name = self._rule_of_definition[reference] = f"{self._name}_{index}"
            self._rules.append("")  # before the rules of the definition, which may refer to itself
            expression = self._expression(self._definitions[reference])
            if expression is None:
                raise InvalidRequestError(f"no text satisfies {reference}")
            self._rules[index] = f"{name}: {expression}"
        return self._rule_of_definition[reference]

    def _any_of(self, schema: Mapping[str, Any]) -> str | None:
        return _either([self._rule(branch) for branch in schema["anyOf"]])

    def _literals(self, schema: Mapping[str, Any]) -> str | None:
        """Literals beside a type and bounds: those that satisfy them."""
        values = [value for value in _literals_of(schema) if _is_admitted(value, schema)]
        exact = [value for value in values if not _is_inexact(value)]
        inexact = [self._literal(value) for value in values if _is_inexact(value)]
        return _either([self._rule({"enum": exact}) if exact else None, *inexact])

    def _literal(self, value: Any) -> str:
        """Return the name of a new rule for a literal."""
        if not _is_inexact(value):
            return self._new_rule(_json_piece({"const": value}, self._options))
        if isinstance(value, int):
            return self._new_rule(f'"{value}"')
        if isinstance(value, list):
            opening, members, closing = _OPEN_LIST, list(map(self._literal, value)), _CLOSE_LIST
        else:
            opening, closing = _OPEN_OBJECT, _CLOSE_OBJECT
            members = [f"{self._key(name)} {self._literal(part)}" for name, part in value.items()]
        separated = f" {self._spaced(_COMMA)} ".join(self._spaced(member) for member in members)
        return self._new_rule(f"{self._spaced(opening)} {separated} {closing}")

    def _by_type(self, schema: Mapping[str, Any]) -> str | None:
        writers = {"array": self._array, "number": self._numbers, "object": self._object}
        types = listed_types(schema.get("type", list(_OF_TYPE)))
        rules: list[str | None] = []
        as_json: dict[str, Any] = {"type": []}
        for name in sorted(types - ({"integer"} if "number" in types else set())):
            kind = "number" if name == "integer" else name
            part = {key: schema[key] for key in _OF_TYPE.get(kind, frozenset()) & schema.keys()}
            if kind in writers and self._is_large(part):
                expression = writers[kind]({**part, "type": name})
                rules.append(None if expression is None else self._new_rule(expression))
            else:
                as_json |= {**part, "type": [*as_json["type"], name]}
        if as_json["type"]:
            rules.append(self._rule(as_json))
        return _either(rules)

    def _numbers(self, schema: dict[str, Any]) -> str | None:
        """A range of numbers: the compiler builds the part of it within 2^53."""
        if "multipleOf" in schema:
            return self._json(schema, "beside multipleOf")
        lower, upper = _bound(schema, _LOWER, 1), _bound(schema, _UPPER, -1)
        negative = [bound and _Bound(-bound.value, bound.is_exclusive) for bound in (upper, lower)]
        integers = schema["type"] == "integer"
        rules = [
            self._new_rule(f"/{sign}{pattern}/")
            for sign, pattern in (
                ("-", _large_numbers(*negative, integers=integers)),
                ("", _large_numbers(lower, upper, integers=integers)),
            )
            if pattern
        ]
        small: dict[str, Any] = {"type": schema["type"]}
        for names, bound, edge in ((_LOWER, lower, -_MIN_LARGE), (_UPPER, upper, _MIN_LARGE)):
            if bound is None or bound.value * edge >= edge * edge:  # further out than the edge
                small[names[1]] = edge
            elif bound.is_large:
                return _either(rules)
            else:
                small[names[bound.is_exclusive]] = bound.value
        return _either([self._new_rule(_json_piece(small, self._options)), *rules])

    def _array(self, schema: Mapping[str, Any]) -> str | None:
        """Items in order; where one is optional, so are those after it."""
        least, most = schema.get("minItems", 0), schema.get("maxItems", math.inf)
        rest = self._rule(schema.get("items", True))
        first = list[str]()
        for item in [self._rule(part) for part in schema.get("prefixItems", [])] or [rest]:
            if item is None or len(first) == most:
                most = len(first)
                break
            first.append(item)
        if rest is None:
            most = min(most, len(first))
        if least > most:
            return None
        tail = ""
        if rest is not None and most > len(first):
            further = "" if most == math.inf else int(most) - len(first)
            tail = f"({self._spaced(_COMMA, rest)}){{{max(0, least - len(first))},{further}}}"
        for index in reversed(range(len(first))):
            comma = self._spaced(_COMMA) if index else ""
            expression = f"{comma} {self._spaced(first[index])} {tail}"
            tail = self._new_rule(expression if index < least else f"({expression})?")
        return f"{self._spaced(_OPEN_LIST)} {tail} {_CLOSE_LIST}"

    def _object(self, schema: Mapping[str, Any]) -> str | None:
        """Members in the order of the schema, then any others.

        `first` and `then` are the rules of the members from one on, if none or some came before.
        """
        others, required = schema.get("additionalProperties", True), schema.get("required", [])
        properties = {**schema.get("properties", {})}
        properties |= {name: others for name in required if name not in properties}
        first = then = '""'
        value = self._rule(others)
        if value is not None:
            pair = self._spaced(self._other_names(properties), _COLON, value)
            then = self._new_rule(f"({self._spaced(_COMMA)} {pair})*")
            first = self._new_rule(f"({pair} {then})?")
        for name, member in reversed(properties.items()):
            value = self._rule(member)
            if value is not None:
                pair = f"{self._key(name)} {self._spaced(value)}"
                or_first, or_then = ("", "") if name in required else (f"| {first}", f"| {then}")
                first = self._new_rule(f"{pair} {then} {or_first}")
                then = self._new_rule(f"{self._spaced(_COMMA)} {pair} {then} {or_then}")
            elif name in required:
                return None
        return f"{self._spaced(_OPEN_OBJECT)} {first} {_CLOSE_OBJECT}"

    def _key(self, name: str) -> str:
        return self._spaced(_quoted(_quoted(name)), _COLON)

    def _other_names(self, properties: Mapping[str, Any]) -> str:
        """Return a terminal for names that are none of these."""
        if not properties:
            return _NAME
        taken = " | ".join(_quoted(_quoted(name)) for name in properties)
        terminal = f"{self._name}_{len(self._rules)}".upper()
        self._rules.append(f"{terminal}: {_NAME} & ~({taken})")
        return terminal

    def _spaced(self, *tokens: str) -> str:
        """Return tokens in a row, each with optional white space after it."""
        return " ".join(f"{token} {self._blank}".rstrip() for token in tokens)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json_piece(schema: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


def _either(rules: Sequence[str | None]) -> str | None:
    return " | ".join(rule for rule in rules if rule is not None) or None


def _parts_within(schema: Any, *, definitions: bool = True) -> Iterator[dict[str, Any]]:
    """Yield a schema and all schemas in it. definitions: those in its definitions too."""
    pending = [schema]
    while pending:
        part = pending.pop()
        if isinstance(part, dict):
            yield part
            pending += _inner_schemas(part, definitions=definitions)


def _inner_schemas(schema: Mapping[str, Any], *, definitions: bool = False) -> list[Any]:
    """Return the schemas that are values of a schema's keywords."""
    inner = list[Any]()
    for key, value in schema.items():
        if key in _SCHEMA_MAPS or (definitions and key in _DEFINITIONS):
            inner += value.values()
        elif key in _SCHEMA_LISTS:
            inner += value
        elif key in _SCHEMAS:
            inner.append(value)
    return inner


def _has_own_large_number(schema: Mapping[str, Any]) -> bool:
    return any(map(_is_inexact, _literals_of(schema))) or any(
        _Bound(schema[key], False).is_large for key in (*_LOWER, *_UPPER) if key in schema
    )


def _literals_of(schema: Mapping[str, Any]) -> list[Any]:
    return [*schema.get("enum", []), *([schema["const"]] if "const" in schema else [])]


def _is_inexact(literal: Any) -> bool:
    return _first_inexact_integer(literal) is not None


def _first_inexact_integer(value: Any) -> int | None:
    """Return the first integer in a literal that changes as a float64 or exceeds 63 bits."""
    if isinstance(value, int):
        return None if abs(value) <= _MAX_INTEGER and int(float(value)) == value else value
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((one for one in map(_first_inexact_integer, parts) if one is not None), None)


def _is_admitted(value: Any, schema: Mapping[str, Any]) -> bool:
    """Return whether a literal satisfies the type, the bounds and the literals of a schema."""
    kind = type_of(value)
    is_integer = kind == "number" and value % 1 == 0
    types = listed_types(schema.get("type", kind))
    if kind not in types and not (is_integer and "integer" in types):
        return False
    if "const" in schema and (value != schema["const"] or value not in schema.get("enum", [value])):
        return False
    if kind != "number":
        return True
    lower, upper = _bound(schema, _LOWER, 1), _bound(schema, _UPPER, -1)
    factor = Fraction(str(schema.get("multipleOf", 0)))
    return (
        (lower is None or value > lower.value or (value == lower.value and not lower.is_exclusive))
        and (
            upper is None
            or value < upper.value
            or (value == upper.value and not upper.is_exclusive)
        )
        and (factor == 0 or Fraction(value) % factor == 0)
    )


# Ranges of numbers


def _bound(schema: Mapping[str, Any], names: Sequence[str], sign: int) -> _Bound | None:
    """Return the tighter one of two bounds. names: inclusive, exclusive. sign: 1 for lower ones."""
    found = [_Bound(sign * schema[name], name != names[0]) for name in names if name in schema]
    if not found:
        return None
    value, is_exclusive = max(found)
    if value > _MAX_BOUND:
        raise InvalidRequestError(f"{names[0]}: bounds beyond 1e64 are not supported")
    if value <= -_MAX_BOUND:
        value, is_exclusive = -_MAX_BOUND, False
    value = int(value) if abs(value) >= _MIN_LARGE else value
    return _Bound(sign * value, bool(is_exclusive))


def _large_numbers(lower: _Bound | None, upper: _Bound | None, *, integers: bool) -> str:
    """Return a regular expression of the numbers in a range that are at least 2^53; "" for none."""
    if lower is None or not lower.is_large or lower.value < 0:
        lower = _Bound(_MIN_LARGE, False)
    first = int(lower.value) + lower.is_exclusive
    if upper is None:
        last = None
    elif upper.value < _MIN_LARGE:
        return ""
    else:
        last = int(upper.value) - (upper.is_exclusive or not integers)
    whole = "" if last is not None and last < first else _integers(first, last)
    if integers:
        return whole
    parts = [rf"{whole}(\.[0-9]+)?"] if whole else []
    if lower.is_exclusive and (last is None or last >= lower.value):
        parts.append(rf"{lower.value}\.0*[1-9][0-9]*")
    if upper is not None and not upper.is_exclusive and upper.value >= first:
        parts.append(rf"{upper.value}(\.0+)?")
    return f"({'|'.join(parts)})" if parts else ""


def _integers(first: int, last: int | None) -> str:
    """Return a regular expression of the positive integers from `first` to `last`, None for all."""
    num_digits = len(str(first))
    if last is None:
        last = 10**num_digits - 1
        longer = [f"[1-9][0-9]{{{num_digits},}}"]
    else:
        longer = []
    parts = [
        _same_length(str(max(first, 10 ** (length - 1))), str(min(last, 10**length - 1)))
        for length in range(num_digits, len(str(last)) + 1)
    ]
    return f"({'|'.join(parts + longer)})"


def _same_length(first: str, last: str) -> str:
    """Return a regular expression of the numbers between two that have as many digits."""
    if first == last:
        return first
    start, stop, rest = int(first[0]), int(last[0]), len(first) - 1
    if start == stop:
        return first[0] + _same_length(first[1:], last[1:])
    parts = []
    if first[1:].strip("0"):
        parts.append(first[0] + _same_length(first[1:], "9" * rest))
        start += 1
    if last[1:].strip("9"):
        parts.append(last[0] + _same_length("0" * rest, last[1:]))
        stop -= 1
    if start <= stop:
        parts.append(f"[{start}-{stop}]" + f"[0-9]{{{rest}}}" * (rest > 0))
    return f"({'|'.join(parts)})"


# Parts that stay JSON schemas


def _rounded(schema: Any, where: str) -> Any:
    """Return a schema with large bounds tightened to numbers that the compiler keeps.

    Raises InvalidRequestError for a literal or a bound for which there is none.
    """
    if not isinstance(schema, dict):
        return schema
    result = dict(schema)
    for key, value in schema.items():
        if key in _SCHEMA_MAPS | _DEFINITIONS:
            result[key] = {name: _rounded(part, where) for name, part in value.items()}
        elif key in _SCHEMA_LISTS:
            result[key] = [_rounded(part, where) for part in value]
        elif key in _SCHEMAS:
            result[key] = _rounded(value, where)
        elif key in _LITERALS and _is_inexact(value):
            raise InvalidRequestError(
                f"{key}: {_first_inexact_integer(value)} is not supported {where}, only integers "
                "that a float64 holds exactly (all up to 2^53)"
            )
    if _has_own_large_number(schema):
        _round_bounds(result)
    return result


def _round_bounds(schema: dict[str, Any]) -> None:
    """Tighten the bounds of a schema; an exclusive one from 2^53 on becomes inclusive.

    The compiler would add 1 to it as float64.
    """
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
