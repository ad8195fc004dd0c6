"""JSON schemas of at most 64 KiB that cost seconds, gigabytes or a stack where work has no limit.

Some multiply, some are compared pair by pair, some have odd values or numbers without end.
"""

from collections.abc import Iterator
from typing import Any

Schema = Any


def _objects(*parts: Schema) -> Schema:
    return {"type": "object", "properties": {f"p{at}": part for at, part in enumerate(parts)}}


def branches_that_refer_to_each_other() -> Schema:
    names = [f"p{at}" for at in range(8)]

    def part(own: str) -> Schema:
        members = {name: {"$ref": f"#/$defs/{own}"} for name in names}
        return {"type": "object", "required": names, "properties": members}

    branches = [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]
    return {"$defs": {"a": part("a"), "b": part("b")}, "oneOf": branches}


def thousands_of_branches() -> Schema:
    return {"oneOf": [{"type": "object"}] * 3_000}


def branches_with_long_lists() -> Schema:
    return {"oneOf": [{"enum": list(range(100 * at, 100 * at + 100))} for at in range(100)]}


def branches_with_many_names() -> Schema:
    names = [f"p{at}" for at in range(60)]
    described = {name: {"type": ["object", "null"]} for name in names}
    branch = {"required": names, "properties": described}
    return {"oneOf": [{"type": "object", **branch}] * 15}


def names_that_repeat_a_schema() -> Schema:
    schema: Schema = {"type": "string"}
    for _ in range(28):
        schema = {"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": schema}
    return schema


def encoded_references() -> Schema:
    target = "components"
    big = {"type": "object", "properties": {f"p{at}": {"type": "string"} for at in range(800)}}
    references = []
    for at in range(1_000):
        letters = [f"%{ord(one):02x}" if at >> bit & 1 else one for bit, one in enumerate(target)]
        references.append({"$ref": f"#/{''.join(letters)}/a"})
    return {"components": {"a": big}, "anyOf": references}


def references_into_references() -> Schema:
    """Each of the parts of a tree is the target of a reference, and so are all parts around it."""
    tree: Schema = {"type": "object", "properties": {f"p{at}": {} for at in range(500)}}
    path, references = "#/x", [{"$ref": "#/x"}]
    for _ in range(28):
        tree = {"properties": {"a": tree}}
        path += "/properties/a"
        references.append({"$ref": path})
    return {"x": tree, "anyOf": references}


def names_like_moved_definitions() -> Schema:
    return {"$defs": {f"reference-{'-' * at}": {} for at in range(300)}, "type": "object"}


def a_long_name_like_a_moved_definition() -> Schema:
    return {"$defs": {"reference" + "-" * 60_000: {}}, "type": "object"}


def counted_properties() -> Schema:
    optional = {f"o{at}": {} for at in range(16)}
    required = [f"r{at}" for at in range(6_000)]
    return {"type": "object", "properties": optional, "required": required, "maxProperties": 6_001}


def dependencies_within_dependencies() -> Schema:
    schema: Schema = {"required": ["z"]}
    for _ in range(9):
        schema = {"dependentSchemas": {"a": schema}, "dependencies": {"b": schema}}
    return schema


def long_classes() -> Schema:
    return {"type": "string", "pattern": "\\s" * 20_000}


def a_long_pattern() -> Schema:
    return {"type": "string", "pattern": "[" * 60_000}


def repeated_patterns() -> Schema:
    return {"type": "string", "pattern": "((((a{1,1000}){1,1000}){1,1000}){1,1000}){1,1000}b"}


def many_patterns() -> Schema:
    return {"type": "object", "patternProperties": {f"^a{at}.*b+$": {} for at in range(2_500)}}


def overlapping_patterns() -> Schema:
    return {"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{at}}}"} for at in range(30)]}


def large_numbers() -> Schema:
    return {"enum": [2**60 + at for at in range(2_500)]}


def large_numbers_in_tuples() -> Schema:
    part: Schema = {"const": 2**60 + 1}
    for _ in range(9):
        part = {"type": "array", "prefixItems": [part, part]}
    return part


def large_numbers_beside_definitions() -> Schema:
    definitions = {f"d{at}": {"$ref": f"#/$defs/d{at + 1}"} for at in range(800)}
    definitions["d800"] = {"type": "string"}
    parts = [{"type": "array", "items": {"$ref": "#/$defs/d0"}} for _ in range(500)]
    return {"$defs": definitions, **_objects({"const": 2**60 + 1}, *parts)}


def large_numbers_at_every_level() -> Schema:
    part: Schema = {"anyOf": [{"const": 2**60 + at} for at in range(1_500)]}
    for _ in range(55):
        part = {"type": "array", "items": part}
    return part


def endless_numbers() -> Schema:
    large = 10**300
    return _objects(
        {"type": "string", "minLength": large},
        {"type": "string", "maxLength": 1e300},
        {"type": "array", "minItems": large, "maxItems": large},
        {"type": "array", "items": {"const": 2**60 + 1}, "maxItems": large},
        {"type": "object", "minProperties": large},
        {"type": "integer", "multipleOf": large},
        {"type": "number", "multipleOf": 1e-300},
        {"enum": [10**4000, 2**60 + 1], "multipleOf": 1e-300},
    )


def references_in_a_row() -> Schema:
    definitions: dict[str, Schema] = {}
    for at in range(1_500):
        definitions[f"d{at}"] = {"$ref": f"#/$defs/d{at + 1}"}
    definitions["d1500"] = {"type": "object"}
    return {"$defs": definitions, "oneOf": [{"$ref": "#/$defs/d0"}, {"$ref": "#/$defs/d1"}]}


def references_in_a_circle() -> Schema:
    return {
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"allOf": [{"$ref": "#/$defs/a"}] * 30}},
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/a"}, "y": {"$ref": "#"}, "z": {"$ref": "#/"}},
    }


def many_objects_at_once() -> Schema:
    return {"allOf": [_objects({"type": "string"}, {"type": "integer"})] * 400}


def unions_of_references() -> Schema:
    """Each definition has the next one twice: 2^16 ways from the first to the last."""
    definitions: dict[str, Schema] = {
        f"d{at}": {"anyOf": [{"$ref": f"#/$defs/d{at + 1}"}] * 2} for at in range(16)
    }
    definitions["d16"] = {"type": ["string", "null"]}
    return {"$defs": definitions, **_objects({"$ref": "#/$defs/d0"})}


def unions_of_themselves() -> Schema:
    itself = {"$ref": "#/$defs/a"}
    return {"$defs": {"a": {"anyOf": [itself] * 4}}, **_objects(itself)}


def intersections_of_themselves() -> Schema:
    itself = {"$ref": "#/$defs/a"}
    return {"$defs": {"a": {"allOf": [itself] * 6}}, **_objects(itself)}


def definitions_for_every_property() -> Schema:
    definitions = {f"d{at}": {"type": "string", "maxLength": at + 1} for at in range(600)}
    parts = [{"type": "array", "items": {"$ref": "#/$defs/d0"}}] * 600
    return {"$defs": definitions, **_objects(*parts)}


def many_properties() -> Schema:
    return _objects(*[{"type": "string"}] * 2_000)


def deep_nesting() -> Schema:
    schema: Schema = {"type": "string"}
    for level in range(38):
        schema = {"anyOf": [schema]} if level % 2 else {"items": schema}
    return schema


def small_parts() -> Schema:
    return {"enum": [[]] * 15_000}


def odd_names() -> Schema:
    return {"type": "object", "properties": {"a": {}}, "required": [[1], {"a": 1}, None]}


def odd_required() -> Schema:
    return {"type": "object", "properties": {"a": {"required": 5}}, "required": {"a": 1}}


def odd_values() -> Schema:
    return {
        **{"type": [{}, [], None], "enum": {}, "$ref": "#/%", "required": [], "const": {}},
        **{"properties": {"a": {"enum": [1], "$ref": "#/$defs/%zz"}}, "$defs": {"": {}}},
    }


def hostile_schemas() -> Iterator[tuple[str, Schema]]:
    """Yield the name and the schema of each function above."""
    for name, made in list(globals().items()):
        is_ours = callable(made) and made.__module__ == __name__ and not name.startswith("_")
        if is_ours and made is not hostile_schemas:
            yield name, made()
