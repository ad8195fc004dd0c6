"""Request fields that constrain the answer, in three equivalent ways:

    response_format      OpenAI: text, json_object, json_schema
    structured_outputs   vLLM: json, regex, choice, grammar, json_object
    guided_…             vLLM's older names of these

All become one `GrammarSource`, which the engine compiles or refuses.
"""

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo

from api_server.protocol.fields import STRUCTURED_NEUTRAL, nested_fields
from proto.errors import InvalidRequestError
from proto.grammar import GrammarKind, GrammarSource, encoded

ANY_OBJECT: Final = '{"type": "object"}'
"""The schema of json_object."""


def _format_fields(value: Any, info: ValidationInfo) -> Any:
    if not isinstance(value, dict):
        return value
    if value.get("type") == "structural_tag":
        raise ValueError("structural_tag is not available yet")
    return nested_fields(value, ResponseFormat, {}, info, "response_format.")


def _schema_fields(value: Any, info: ValidationInfo) -> Any:
    return nested_fields(value, JsonSchemaFormat, {}, info, "response_format.json_schema.")


def _structured_fields(value: Any, info: ValidationInfo) -> Any:
    return nested_fields(value, StructuredOutputs, STRUCTURED_NEUTRAL, info, "structured_outputs.")


class _Part(BaseModel):
    """Base of the models in this file: no type conversion, no unknown fields."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, populate_by_name=True, protected_namespaces=()
    )


class JsonSchemaFormat(_Part):
    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    schema_: Any = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(_Part):
    """The field `response_format`. `strict` has no effect: every answer conforms to its schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Annotated[JsonSchemaFormat | None, BeforeValidator(_schema_fields)] = None


class StructuredOutputs(_Part):
    """The field `structured_outputs`: exactly one of its first five fields."""

    json_: Any = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False


class StructuredFields(BaseModel):
    """Request fields that constrain the answer."""

    response_format: Annotated[ResponseFormat | None, BeforeValidator(_format_fields)] = None
    """text, json_object, or json_schema with a schema that the answer keeps to."""
    structured_outputs: Annotated[StructuredOutputs | None, BeforeValidator(_structured_fields)] = (
        None
    )
    """One of json (a schema), regex, choice (a list), grammar (Lark or GBNF), json_object."""
    guided_json: Any = None
    """An older name of structured_outputs.json."""
    guided_regex: str | None = None
    """An older name of structured_outputs.regex."""
    guided_choice: list[str] | None = None
    """An older name of structured_outputs.choice."""
    guided_grammar: str | None = None
    """An older name of structured_outputs.grammar."""

    @property
    def grammar_source(self) -> GrammarSource | None:
        """The grammar or schema of the answer; None for any text.

        Raises InvalidRequestError that names the field.
        """
        found = [*self._from_format(), *self._from_structured(), *self._from_guided()]
        if len(found) > 1:
            raise InvalidRequestError(
                f"{found[1].field} does not go with another form of the answer, there is "
                f"{found[0].field}",
                found[1].field,
            )
        for source in found:
            try:
                source.validate()
            except InvalidRequestError as error:
                raise InvalidRequestError(
                    f"{source.field}: {error.message}", source.field
                ) from None
        return found[0] if found else None

    def _from_format(self) -> list[GrammarSource]:
        given, field = self.response_format, "response_format"
        if given is None or given.type == "text":
            return []
        if given.type == "json_object":
            return [GrammarSource("json_schema", ANY_OBJECT, field=field)]
        if given.json_schema is None:
            raise InvalidRequestError("response_format.json_schema is missing", field)
        return [_schema(given.json_schema.schema_, field)]

    def _from_structured(self) -> list[GrammarSource]:
        given, field = self.structured_outputs, "structured_outputs"
        if given is None:
            return []
        compact = given.disable_any_whitespace
        found = _sources(
            given.json_,
            given.regex,
            given.choice,
            given.grammar,
            (field,) * 4,
            compact=compact,
        )
        if given.json_object:
            found.append(GrammarSource("json_schema", ANY_OBJECT, compact, field=field))
        if len(found) != 1 or given.json_object is False:
            raise InvalidRequestError(
                "structured_outputs takes one of json, regex, choice, grammar, json_object (true)",
                field,
            )
        return found

    def _from_guided(self) -> list[GrammarSource]:
        fields = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
        json, regex = self.guided_json, self.guided_regex
        return _sources(json, regex, self.guided_choice, self.guided_grammar, fields)


def _sources(
    json: Any,
    regex: str | None,
    choice: list[str] | None,
    grammar: str | None,
    fields: tuple[str, str, str, str],
    *,
    compact: bool = False,
) -> list[GrammarSource]:
    """Return a source for each value that is not None.

    fields: names of the request fields of json, regex, choice and grammar, for errors. compact:
    JSON without optional whitespace.
    """
    found = []
    if json is not None:
        found.append(_schema(json, fields[0], compact=compact))
    if choice is not None:
        found.append(GrammarSource("choice", _json(choice, fields[2]), field=fields[2]))
    texts: tuple[tuple[GrammarKind, str | None, str], ...] = (
        ("regex", regex, fields[1]),
        ("grammar", grammar, fields[3]),
    )
    found += [
        GrammarSource(kind, text, field=name) for kind, text, name in texts if text is not None
    ]
    return found


def _schema(schema: Any, field: str, *, compact: bool = False) -> GrammarSource:
    """Return the source of a schema, given as JSON or as a string that contains JSON."""
    text = schema if isinstance(schema, str) else _json(schema, field)
    return GrammarSource("json_schema", text, compact, field=field)


def _json(value: Any, field: str) -> str:
    try:
        return encoded(value)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{field}: {error.message}", field) from None
