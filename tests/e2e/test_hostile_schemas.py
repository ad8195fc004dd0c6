"""Schemas and other sources of grammars that cost a front end or the engine too much."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.e2e.bystander import Bystander
from tests.e2e.daemon import Daemon, DaemonPool
from tests.fakes.hostile_schemas import hostile_schemas

pytestmark = pytest.mark.suite("hostile")

MODEL = "smollm2-135m-instruct"
MESSAGES = [{"role": "user", "content": "Hello"}]
CLIENTS = 9
"""Requests at the same time."""
SLOW_TO_COMPILE = frozenset(
    {"thousands_of_branches", "branches_with_many_names", "overlapping_patterns", "small_parts"}
    | {"many_properties", "definitions_for_every_property", "branches_with_long_lists"}
)
"""Schemas that are rewritten in time, but keep the engine's compiler busy."""


def tool(schema: Any, **fields: Any) -> dict[str, Any]:
    """Return the parameters of a tool with a schema; those of an object have a property with it."""
    if schema.get("type") != "object":
        definitions = {key: schema[key] for key in ("$defs", "components", "x") if key in schema}
        schema = {"type": "object", "properties": {"p": schema}, **definitions}
    return {"name": "find", "parameters": schema, **fields}


def ways_to_send(schema: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return requests with a schema: path and body."""
    form = {"name": "x", "schema": schema}
    function = tool(schema, strict=True)
    chat = {"messages": MESSAGES}
    forced = {**tool(schema), "input_schema": tool(schema)["parameters"]}
    forced.pop("parameters")
    return [
        ("completions", {"prompt": "x", "structured_outputs": {"json": schema}}),
        (
            "chat/completions",
            chat | {"response_format": {"type": "json_schema", "json_schema": form}},
        ),
        ("chat/completions", chat | {"tools": [{"type": "function", "function": function}]}),
        ("responses", {"input": "x", "text": {"format": {"type": "json_schema", **form}}}),
        ("responses", {"input": "x", "tools": [{"type": "function", **function}]}),
        ("messages", chat | {"model": MODEL, "tools": [forced], "tool_choice": {"type": "any"}}),
    ]


def send_all(
    daemon: Daemon, requests: list[tuple[str, dict[str, Any]]], clients: int = CLIENTS
) -> list[str]:
    """Send requests from several threads; return answers that are errors and name no field."""
    with httpx.Client(timeout=60) as client, ThreadPoolExecutor(clients) as pool:

        def send(request: tuple[str, dict[str, Any]]) -> str:
            path, body = request
            limit = "max_output_tokens" if path == "responses" else "max_tokens"
            answer = client.post(f"{daemon.url}/v1/{path}", json={**body, limit: 4})
            if answer.status_code == 200:
                return ""
            error = answer.json()["error"]
            names_field = error.get("param") or path == "messages"
            is_well = answer.status_code in (400, 503) and names_field
            return "" if is_well and len(error["message"]) < 1_000 else f"{path} {error}"

        return [found for found in pool.map(send, requests) if found]


@pytest.fixture
def serving(daemons: DaemonPool) -> Iterator[Daemon]:
    """A daemon whose tool calls are tagged, with a sandbox that has compiled grammars.

    The processes of the sandbox share the vocabulary, but the bystander counts it for each of them.
    """
    with daemons.borrow("--tool-call-parser", "qwen3_coder") as running:
        regexes = [{"regex": f"a{{{number}}}"} for number in range(40)]
        requests = [("completions", {"prompt": "x", "structured_outputs": one}) for one in regexes]
        assert send_all(running, requests) == []
        yield running


def test_schemas(serving: Daemon) -> None:
    requests = [
        ways_to_send(schema)[number % 6]
        for number, (name, schema) in enumerate(hostile_schemas())
        if name not in SLOW_TO_COMPILE
    ]
    # Tools are a part of the prompt, whose steps may delay those of others.
    with Bystander(serving, gaps=False) as bystander:
        wrong = send_all(serving, requests, clients=3)
        bystander.rest()
    bystander.check()
    assert wrong == []


def test_the_same_by_many_at_once(serving: Daemon) -> None:
    names = ("names_that_repeat_a_schema", "branches_that_refer_to_each_other")
    schemas = dict(hostile_schemas())
    with Bystander(serving) as bystander:
        wrong = send_all(serving, [ways_to_send(schemas[name])[0] for name in names] * CLIENTS)
        bystander.rest()
    bystander.check()
    assert wrong == []


def test_other_sources(serving: Daemon) -> None:
    sources = {
        "regex": ["a" * 2_000_000, "[" * 60_000, "(" * 60_000, "((a{1,999}){1,999}){1,999}"],
        "choice": [["a" * 2_000_000], ["a"] * 100_000, [f"{at}" for at in range(7_000)]],
        "grammar": ["x" * 2_000_000, "start: " + "a" * 60_000, 'root ::= "a"\n' * 4_000],
        "json": ['{"enum": [' + "[], " * 15_000 + "[]]}", "[" * 60_000, '{"a": ' * 10_000],
    }
    requests = [
        ("completions", {"prompt": "x", "structured_outputs": {kind: source}})
        for kind, several in sources.items()
        for source in several
    ]
    with Bystander(serving) as bystander:
        wrong = send_all(serving, requests)
        bystander.rest()
    bystander.check()
    assert wrong == []
