"""Request fields that constrain the answer, in four equivalent ways:

    response_format        OpenAI: text, json_object, json_schema
    structured_outputs     vLLM: json, regex, choice, grammar, json_object
    guided_…               vLLM's older names of these
    grammar, json_schema   llama.cpp, and `schema` beside `json_object` in response_format

All become one `GrammarSource`, which the engine compiles or refuses.
"""

from typing import Annotated, Any, Final, Literal

from pydantic import Field, ValidationInfo

from api_server.protocol.fields import (
    STRUCTURED_NEUTRAL,
    IgnoredFields,
    NestedFields,
    Strict,
    errors_of,
)
from api_server.protocol.json_schema import (
    SchemaWork,
    ecmascript_regex,
    rewrite_schema,
    write_grammar,
)
from proto.errors import InvalidRequestError
from proto.messages.grammar import GrammarSource, decoded, encoded

MAX_CHOICE_STRINGS: Final = 1 << 14
"""Most strings of a choice, which have 64 KiB together."""


Choices = Annotated[list[str], Field(fail_fast=True, max_length=MAX_CHOICE_STRINGS)]


class JsonSchemaFormat(NestedFields):
    where = "response_format.json_schema."

    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    schema_: Any = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(NestedFields):
    """The field `response_format`. `strict` has no effect: every answer conforms to its schema.

    schema: beside `json_object`, as llama.cpp has it.
    """

    where = "response_format."

    type: Literal["text", "json_object", "json_schema"]
    schema_: Any = Field(default=None, alias="schema")
    json_schema: JsonSchemaFormat | None = None

    @classmethod
    def known_fields(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, dict) and value.get("type") == "structural_tag":
            raise ValueError("structural_tag is not available yet")
        return super().known_fields(value, info)


class StructuredOutputs(NestedFields):
    """The field `structured_outputs`: exactly one of its first five fields."""

    where, neutral = "structured_outputs.", STRUCTURED_NEUTRAL

    json_: Any = Field(default=None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False


_UNSTRUCTURED: Final = StructuredOutputs()


class StructuredFields(Strict):
    """Request fields that constrain the answer."""

    response_format: ResponseFormat | None = None
    """text, json_object, or json_schema with a schema that the answer keeps to."""
    structured_outputs: StructuredOutputs | None = None
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
        structured = self.structured_outputs or _UNSTRUCTURED
        json_object = {"type": "object"} if structured.json_object else None
        values = {
            "response_format": self._format_schema(),
            "structured_outputs.json": structured.json_,
            "structured_outputs.choice": structured.choice,
            "structured_outputs.regex": structured.regex,
            "structured_outputs.grammar": structured.grammar,
            "structured_outputs.json_object": json_object,
            "guided_json": self.guided_json,
            "guided_regex": self.guided_regex,
            "guided_choice": self.guided_choice,
            "guided_grammar": self.guided_grammar,
            "grammar": self.grammar,
            "json_schema": self.json_schema,
        }
        given = [field for field in values if values[field] is not None]
        if self.structured_outputs is not None:
            num_structured = sum(field.startswith("structured_outputs.") for field in given)
            if num_structured != 1 or structured.json_object is False:
                raise InvalidRequestError(
                    "structured_outputs takes one of json, regex, choice, grammar, json_object "
                    "(true)",
                    "structured_outputs",
                )
        if not given:
            return None
        field, *others = given
        if others:
            raise InvalidRequestError(
                f"{others[0]} does not go with another form of the answer, there is {field}",
                others[0],
            )
        with errors_of(field):
            compact = structured.disable_any_whitespace
            source = _source(field, values[field], ignored, work, compact=compact)
            source.validate()
        return source

    def _format_schema(self) -> Any | None:
        """Return the JSON schema that `response_format` asks for, if any."""
        given = self.response_format
        if given is None or given.type == "text":
            return None
        if given.type == "json_object":
            return {"type": "object"} if given.schema_ is None else given.schema_
        if given.json_schema is None:
            raise InvalidRequestError("response_format.json_schema is missing", "response_format")
        return given.json_schema.schema_


async def text_grammar(body: StructuredFields, ignored: IgnoredFields) -> GrammarSource | None:
    """Return the grammar of an answer without tools; arguments, None and errors as above.

    It is made on a thread if it takes long, see `write_grammar`.
    """
    return await write_grammar(lambda work: body.grammar_source(ignored, work))


def _source(
    field: str, value: Any, ignored: IgnoredFields, work: SchemaWork, *, compact: bool
) -> GrammarSource:
    """Return the source of the value of a field, by the end of its name; InvalidRequestError."""
    if field.endswith("grammar"):
        return GrammarSource("grammar", value, field=field)
    if field.endswith("regex"):
        GrammarSource("regex", value).validate()
        work.take_steps(len(value))
        return GrammarSource("regex", ecmascript_regex(value), field=field)
    work.read(value)
    if field.endswith("choice"):
        return GrammarSource("choice", encoded(value), field=field)
    text = value if isinstance(value, str) else encoded(value)
    GrammarSource("json_schema", text).validate()
    rewritten, removed = rewrite_schema(decoded(text), work)
    for keyword in removed:
        ignored.add(f"{field}.{keyword}")
    return GrammarSource("json_schema", encoded(rewritten), compact, field=field)
