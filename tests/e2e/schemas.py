"""Random JSON schemas over a listed set of keywords, with bounded strings, arrays and recursion.

type string     minLength, maxLength, enum, pattern, format (date, uuid, ipv4)
type integer    minimum, maximum, exclusiveMinimum, exclusiveMaximum, multipleOf
type number     minimum, maximum
type boolean, null
type array      items, prefixItems, minItems, maxItems
type object     properties, required, additionalProperties (false)
anyOf, const, enum, title, description
$ref            to $defs, and from there on to the next link of a chain of four
"""

import random
from typing import Any

Schema = dict[str, Any]

WORDS = ("name", "age", "city", "tags", "price", "ok", "note", "kind", "size", "left", "größe")
PATTERNS = ("^[A-Z]{2}[0-9]{3}$", "^(red|green|blue)$", "^[a-z]{1,8}( [a-z]{1,8}){0,2}$")
FORMATS = ("date", "uuid", "ipv4")
"""Of bounded length, which an address of a mailbox has not."""
KEYWORDS = (
    *("minLength", "maxLength", "enum", "pattern", "format", "const", "anyOf", "$ref", "$defs"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "type"),
    *("items", "prefixItems", "minItems", "maxItems", "properties", "required"),
    *("additionalProperties", "title", "description"),
)
CHAIN = 4
"""Links of what refers to its like: how deep an answer can get."""
DEEPEST = 3


def schemas(count: int, seed: int = 0) -> list[Schema]:
    """Random schemas; together they use every keyword."""
    draw = random.Random(seed)
    return [document(draw) for _ in range(count)]


def document(draw: random.Random) -> Schema:
    """A random schema of an object, with the definitions that it refers to."""
    root = _object(draw, 0)
    definitions: Schema = {"part": _object(draw, DEEPEST - 1)}
    for link in range(CHAIN):
        definitions[f"chain_{link}"] = _link(link)
    for name in draw.sample(("part", "chain_0"), draw.randrange(3)):
        root["properties"][f"its_{name}"] = {"$ref": f"#/$defs/{name}"}
        root["$defs"] = definitions
    return root


def _link(number: int) -> Schema:
    """A link of a chain; the last one has no next."""
    following: Schema = {
        "next": {
            "type": "array",
            "items": {"$ref": f"#/$defs/chain_{number + 1}"},
            "maxItems": 1,
        }
    }
    return {
        "type": "object",
        "properties": {
            "id": {"type": "integer", "minimum": 0, "maximum": 9},
            **(following if number + 1 < CHAIN else {}),
        },
        "required": ["id"],
        "additionalProperties": False,
    }


def any_schema(draw: random.Random, depth: int) -> Schema:
    simple = [_string, _string, _integer, _number, _boolean, _null, _const, _enum]
    deep = [_object, _array, _any_of]
    return draw.choice(simple if depth >= DEEPEST else simple + deep)(draw, depth + 1)


def _string(draw: random.Random, depth: int) -> Schema:
    return draw.choice(
        (
            {"type": "string", "maxLength": draw.randrange(1, 20)},
            {"type": "string", "minLength": 2, "maxLength": draw.randrange(2, 12)},
            {"type": "string", "enum": draw.sample(WORDS, 3)},
            {"type": "string", "pattern": draw.choice(PATTERNS)},
            {"type": "string", "format": draw.choice(FORMATS)},
        )
    )


def _integer(draw: random.Random, depth: int) -> Schema:
    low = draw.randrange(-50, 50)
    return draw.choice(
        (
            {"type": "integer", "minimum": low, "maximum": low + draw.randrange(1000)},
            {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + 12},
            {"type": "integer", "minimum": 0, "maximum": 100, "multipleOf": 5},
        )
    )


def _number(draw: random.Random, depth: int) -> Schema:
    low = draw.randrange(-10, 10)
    return {"type": "number", "minimum": low, "maximum": low + draw.choice((0.5, 3, 100))}


def _boolean(draw: random.Random, depth: int) -> Schema:
    return {"type": "boolean", "description": "whether it is so"}


def _null(draw: random.Random, depth: int) -> Schema:
    return {"type": "null"}


def _const(draw: random.Random, depth: int) -> Schema:
    return {"const": draw.choice((1, "fixed", None, True, [1, "a"], {"a": 2}))}


def _enum(draw: random.Random, depth: int) -> Schema:
    return {"enum": draw.sample([1, 2.5, "three", None, False, "größe"], 3)}


def _array(draw: random.Random, depth: int) -> Schema:
    if draw.random() < 0.2:
        parts = [any_schema(draw, depth) for _ in range(2)]
        return {"type": "array", "prefixItems": parts, "items": False, "minItems": 2}
    return {
        "type": "array",
        "items": any_schema(draw, depth),
        "minItems": draw.randrange(2),
        "maxItems": draw.randrange(1, 4),
    }


def _object(draw: random.Random, depth: int) -> Schema:
    names = draw.sample(WORDS, draw.randrange(1, 5))
    return {
        "type": "object",
        "title": "A thing",
        "properties": {name: any_schema(draw, depth) for name in names},
        "required": draw.sample(names, draw.randrange(len(names) + 1)),
        "additionalProperties": False,
    }


def _any_of(draw: random.Random, depth: int) -> Schema:
    return {"anyOf": [any_schema(draw, depth) for _ in range(draw.randrange(2, 4))]}
