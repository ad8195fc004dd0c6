"""Schemas that would multiply, or be compared without end, cost little wherever they are read."""

import asyncio
import contextvars
import gc
import threading
import time

import pytest

from api_server.parsers.tool_calls import ModelToolCalls
from api_server.parsers.tools.registry import TOOL_CALL_FORMATS
from api_server.parsers.tools.tagged_values import value_types
from api_server.protocol.fields import IgnoredFields
from api_server.protocol.json_schema import (
    MAX_WAITING,
    SchemaWork,
    rewrite_schema,
    write_grammar,
)
from api_server.protocol.structured import StructuredFields
from api_server.protocol.tools import MAX_TOOLS_BYTES, ToolFields, read_tools
from api_server.text.chat_template import TemplateFacts
from api_server.turns import CLIENT, Client
from proto.errors import InvalidRequestError, OverloadedError
from proto.messages.grammar import MAX_GRAMMAR_BYTES
from tests.api_server.tools.test_grammars import NoTokens
from tests.fakes.hostile_schemas import hostile_schemas

HOSTILE = dict(hostile_schemas())
LIMIT_SECONDS = 0.5
"""Of processor time, several times what any of them takes."""


def as_parameters(schema):
    """A schema of an object: the schema itself, or one with a property that has it."""
    if schema.get("type") == "object":
        return {"properties": {}, **schema}
    definitions = {key: schema[key] for key in ("$defs", "components", "x") if key in schema}
    return {"type": "object", "properties": {"p": schema}, **definitions}


def tools_grammar(parser, schema):
    function = {"name": "find", "parameters": as_parameters(schema), "strict": True}
    body = {"tools": [{"type": "function", "function": function}]}
    asked = ToolFields.model_validate(body, context=IgnoredFields())
    caller = ModelToolCalls(parser, "{{ tools }}", TemplateFacts(frozenset({"tools"})), NoTokens())
    return caller.plan(asked, None, IgnoredFields(), SchemaWork()).grammar


def text_grammar(schema):
    return StructuredFields(guided_json=schema).grammar_source(IgnoredFields(), SchemaWork())


@pytest.fixture(autouse=True, scope="module")
def only_own_objects():
    """Keeps what earlier tests have left out of collections, as a front end does at its start."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("way", ["text", "hermes", "qwen3_coder", "glm45", "pythonic"])
def test_a_grammar_or_an_error_that_names_the_field_within_time(way, name):
    started, refused = time.thread_time(), None
    try:
        source = text_grammar(HOSTILE[name]) if way == "text" else tools_grammar(way, HOSTILE[name])
        assert len(source.source) < 2 * MAX_GRAMMAR_BYTES
    except InvalidRequestError as error:
        refused = error
    assert refused is None or (refused.param and len(refused.message) < 1_000)
    assert time.thread_time() - started < LIMIT_SECONDS


@pytest.mark.parametrize("name", HOSTILE)
def test_answers_are_parsed_within_time(name):
    """Parsers read the schemas of all tools, also of those that no grammar enforces."""
    schema = as_parameters(HOSTILE[name])
    started = time.thread_time()
    for key in list(schema["properties"])[:8]:
        value_types(schema, key)
    for tool_format in TOOL_CALL_FORMATS.values():
        text = tool_format.render_calls([("find", '{"p": "1", "p0": [2]}')])
        parser = tool_format.new_parser({"find": schema})
        parser.parse_delta(text)
        parser.parse_end()
    assert time.thread_time() - started < LIMIT_SECONDS


def test_a_header_with_the_id_of_a_call_is_compared_with_odd_schemas():
    text = '<|tool_calls_section_begin|><|tool_call_begin|>call_1{"a": 1}'
    for required in ([[1], {"a": 1}], {"a": 1}, 5, None):
        tools = {
            "find": {"properties": {"a": {}}, "required": required},
            "other": {"properties": 1},
        }
        parser = TOOL_CALL_FORMATS["kimi_k2"].new_parser(tools)
        assert [*parser.parse_delta(text), *parser.parse_end()]


def test_references_to_one_target_share_its_definition():
    target = {"type": "object", "properties": {"a": {"type": "string"}}}
    references = [{"$ref": f"#/{name}/x"} for name in ("parts", "%70arts", "p%61rts", "part%73")]
    rewritten, _ = rewrite_schema({"parts": {"x": target}, "anyOf": references}, SchemaWork())
    assert list(rewritten["$defs"].values()) == [target]


def test_hundreds_of_branches_are_known_to_exclude_each_other():
    branches = [
        {"type": "object", "required": ["kind"], "properties": {"kind": {"const": at}}}
        for at in range(90)
    ]
    assert rewrite_schema({"oneOf": branches}, SchemaWork())[1] == []
    assert rewrite_schema({"oneOf": branches * 10}, SchemaWork())[1] == ["oneOf"]


def test_the_tools_of_a_request_share_a_limit():
    part = {"type": "object", "description": "x" * 60_000}
    many = [
        {"type": "function", "function": {"name": f"f{at}", "parameters": part}}
        for at in range(MAX_TOOLS_BYTES // 60_000 + 1)
    ]
    assert len(read_tools(many[:-1], IgnoredFields())) == len(many) - 1
    with pytest.raises(InvalidRequestError, match="of all tools") as raised:
        read_tools(many, IgnoredFields())
    assert raised.value.param == f"tools[{len(many) - 1}].function.parameters"


def test_the_schemas_of_all_tools_share_the_work():
    schema = HOSTILE["references_in_a_row"]
    work = SchemaWork()
    rewrite_schema(schema, work)
    with pytest.raises(InvalidRequestError, match="too complex"):
        [rewrite_schema(schema, work) for _ in range(10)]
    assert work.is_used_up


# The thread.


def used_up(work):
    work.take_steps(100_000)
    return "made"


def write(tenant, make):
    """Return a task that writes a grammar for a client of this tenant."""
    context = contextvars.copy_context()
    context.run(CLIENT.set, Client(lambda: tenant))
    return asyncio.get_running_loop().create_task(write_grammar(make), context=context)


async def test_a_small_grammar_is_written_at_once():
    assert await write_grammar(lambda work: threading.current_thread()) is threading.main_thread()

    def refuse(work):
        raise InvalidRequestError("wrong")

    with pytest.raises(InvalidRequestError, match="wrong"):
        await write_grammar(refuse)


async def test_tenants_take_turns_and_the_loop_continues():
    order, gate = [], threading.Event()

    def make(name):
        def write(work):
            work.take_steps(100_000)
            gate.wait(5)
            order.append(name)

        return write

    names = [(1, "a0"), (1, "a1"), (1, "a2"), (2, "b0"), (2, "b1")]
    tasks = [write(tenant, make(name)) for tenant, name in names]
    await asyncio.sleep(0.05)
    assert order == []
    gate.set()
    await asyncio.gather(*tasks)
    assert order == ["a0", "a1", "b0", "a2", "b1"]
    assert await write(3, used_up) == "made"


async def test_a_tenant_has_few_requests_waiting_and_those_that_leave_do_not_count():
    gate = threading.Event()

    def slow(work):
        work.take_steps(100_000)
        gate.wait(5)

    tasks = [write(1, slow) for _ in range(1 + MAX_WAITING)]
    await asyncio.sleep(0.05)
    with pytest.raises(OverloadedError):
        await write(1, used_up)
    other = write(2, used_up)
    for task in tasks[1:]:
        task.cancel()
    await asyncio.gather(*tasks[1:], return_exceptions=True)
    gate.set()
    assert await other == "made"
    assert await write(1, used_up) == "made"
