"""Request fields that constrain the answer, in four equivalent ways:

    response_format        OpenAI: text, json_object, json_schema
    structured_outputs     vLLM: json, regex, choice, grammar, json_object
    guided_…               vLLM's older names of these
    grammar, json_schema   llama.cpp, and `schema` beside `json_object` in response_format

All become one `GrammarSource`, which the engine compiles or refuses.
"""

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo

from api_server.protocol.fields import STRUCTURED_NEUTRAL, IgnoredFields, nested_fields
from api_server.protocol.json_schema import SchemaWork, ecmascript_regex, rewrite_schema
from proto.errors import InvalidRequestError
from proto.grammar import GrammarSource, decoded, encoded

MAX_CHOICE_STRINGS: Final = 1 << 14
"""Most strings of a choice, which have 64 KiB together."""


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


Choices = Annotated[list[str], Field(fail_fast=True, max_length=MAX_CHOICE_STRINGS)]


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
    """The field `response_format`. `strict` has no effect: every answer conforms to its schema.

    schema: beside `json_object`, as llama.cpp has it.
    """

    type: Literal["text", "json_object", "json_schema"]
    schema_: Any = Field(default=None, alias="schema")
    json_schema: Annotated[JsonSchemaFormat | None, BeforeValidator(_schema_fields)] = None


class StructuredOutputs(_Part):
    """The field `structured_outputs`: exactly one of its first five fields."""

    json_: Any = Field(default=None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
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
    guided_choice: Choices | None = None
    """An older name of structured_outputs.choice."""
    guided_grammar: str | None = None
    """An older name of structured_outputs.grammar."""

    grammar: str | None = None
    """llama.cpp's name of structured_outputs.grammar."""
    json_schema: Any = None
    """llama.cpp's name of structured_outputs.json."""

    def grammar_source(self, ignored: IgnoredFields, work: SchemaWork) -> GrammarSource | None:
        """Return the grammar of the answer; None for any text.

        ignored: collects keywords of a schema that the grammar cannot enforce. work: of the
        request's schemas. Raises InvalidRequestError, naming the field.
        """
        reader = _SourceReader(ignored, work)
        found = [*self._from_format(reader), *self._from_structured(reader)]
        found += reader.read("guided_", self.guided_json, self.guided_regex)
        found += reader.read("guided_", choice=self.guided_choice, grammar=self.guided_grammar)
        found += reader.read("", grammar=self.grammar)
        if self.json_schema is not None:
            found.append(reader.json_schema("json_schema", self.json_schema))
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
                raise error.in_field(source.field) from None
        return found[0] if found else None

    def _from_format(self, reader: "_SourceReader") -> list[GrammarSource]:
        given, field = self.response_format, "response_format"
        if given is None or given.type == "text":
            return []
        if given.type == "json_object":
            schema = {"type": "object"} if given.schema_ is None else given.schema_
            return [reader.json_schema(field, schema)]
        if given.json_schema is None:
            raise InvalidRequestError("response_format.json_schema is missing", field)
        return [reader.json_schema(field, given.json_schema.schema_)]

    def _from_structured(self, reader: "_SourceReader") -> list[GrammarSource]:
        given, field = self.structured_outputs, "structured_outputs"
        if given is None:
            return []
        compact = given.disable_any_whitespace
        found = reader.read(
            f"{field}.", given.json_, given.regex, given.choice, given.grammar, compact=compact
        )
        if given.json_object:
            field_path = f"{field}.json_object"
            found.append(reader.json_schema(field_path, {"type": "object"}, compact=compact))
        if len(found) != 1 or given.json_object is False:
            raise InvalidRequestError(
                "structured_outputs takes one of json, regex, choice, grammar, json_object (true)",
                field,
            )
        return found


class _SourceReader:
    """Makes grammar sources from the values of request fields."""

    def __init__(self, ignored: IgnoredFields, work: SchemaWork) -> None:
        self._ignored = ignored
        self._work = work

    def read(
        self,
        prefix: str,
        json: Any = None,
        regex: str | None = None,
        choice: list[str] | None = None,
        grammar: str | None = None,
        *,
        compact: bool = False,
    ) -> list[GrammarSource]:
        """Return a source for each value that is not None.

        prefix: of the fields' names. compact: JSON without optional whitespace.
        """
        found = []
        if json is not None:
            found.append(self.json_schema(f"{prefix}json", json, compact=compact))
        if choice is not None:
            field = f"{prefix}choice"
            self._read(choice, field)
            found.append(GrammarSource("choice", _json(choice, field), field=field))
        if regex is not None:
            found.append(self._regex(f"{prefix}regex", regex))
        if grammar is not None:
            found.append(GrammarSource("grammar", grammar, field=f"{prefix}grammar"))
        return found

    def _read(self, value: Any, field: str) -> None:
        """Count the values of JSON. Raises InvalidRequestError."""
        try:
            self._work.read(value)
        except InvalidRequestError as error:
            raise error.in_field(field) from None

    def _regex(self, field: str, regex: str) -> GrammarSource:
        try:
            GrammarSource("regex", regex).validate()
            self._work.take_steps(len(regex))
        except InvalidRequestError as error:
            raise error.in_field(field) from None
        return GrammarSource("regex", ecmascript_regex(regex), field=field)

    def json_schema(self, field: str, schema: Any, *, compact: bool = False) -> GrammarSource:
        """Return the source of a schema, given as JSON or as a string that contains JSON."""
        try:
            self._work.read(schema)
            text = schema if isinstance(schema, str) else encoded(schema)
            GrammarSource("json_schema", text).validate()
            rewritten, removed = rewrite_schema(decoded(text), self._work)
        except InvalidRequestError as error:
            raise error.in_field(field) from None
        for keyword in removed:
            self._ignored.add(f"{field}.{keyword}")
        return GrammarSource("json_schema", _json(rewritten, field), compact, field=field)


def _json(value: Any, field: str) -> str:
    try:
        return encoded(value)
    except InvalidRequestError as error:
        raise error.in_field(field) from None
