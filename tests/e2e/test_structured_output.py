"""Structured output through HTTP with the real model: every form, random schemas, abuse."""

import asyncio
import json
import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import psutil
import pytest

from deploy.bench.processes import pids_by_title
from tests.e2e.daemon import Daemon, DaemonPool
from tests.e2e.schemas import KEYWORDS, Schema, schemas

pytestmark = pytest.mark.suite("daemons")

PERSON: Schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
MESSAGES = [{"role": "user", "content": "Describe a person as JSON."}]
DEEP_RULES = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(4000)) + '\nr4000: "a"'
ABUSE_SECONDS = 15.0
"""For two seconds of processor time on a busy host."""


@pytest.fixture
def serving(daemons: DaemonPool) -> Iterator[Daemon]:
    """With overlapped steps, in which grammar masks come after the forward pass has begun."""
    with daemons.borrow("--async-scheduling") as running:
        yield running


def complete(daemon: Daemon, **fields: Any) -> httpx.Response:
    body = {"prompt": "A person: ", "max_tokens": 100, "temperature": 1.0, "seed": 3} | fields
    return httpx.post(f"{daemon.url}/v1/completions", json=body, timeout=60)


def chat(daemon: Daemon, **fields: Any) -> httpx.Response:
    body = {"messages": MESSAGES, "max_tokens": 100, "seed": 3} | fields
    return httpx.post(f"{daemon.url}/v1/chat/completions", json=body, timeout=60)


def check(schema: Schema, text: str) -> None:
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    jsonschema.Draft202012Validator(schema, format_checker=checker).validate(json.loads(text))


def test_every_form_of_asking(serving: Daemon) -> None:
    for fields, pattern in (
        ({"regex": "[0-9]{3}-[0-9]{2}"}, "[0-9]{3}-[0-9]{2}"),
        ({"choice": ["red", "green"]}, "red|green"),
        ({"grammar": 'root ::= "yes" | "no"'}, "yes|no"),
    ):
        choice = complete(serving, structured_outputs=fields).json()["choices"][0]
        assert re.fullmatch(pattern, choice["text"]), choice
        assert choice["finish_reason"] == "stop"
    choice = complete(serving, guided_json=PERSON).json()["choices"][0]
    check(PERSON, choice["text"])
    compact = {"json": PERSON, "disable_any_whitespace": True}
    choice = complete(serving, structured_outputs=compact).json()["choices"][0]
    assert not re.search(r"[{,:]\s|\s}", choice["text"])
    form = {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON, "strict": True}}
    choices = chat(serving, response_format=form, n=4).json()["choices"]
    assert len({each["message"]["content"] for each in choices}) > 1
    for each in choices:
        check(PERSON, each["message"]["content"])
    answer = chat(serving, response_format={"type": "json_object"}, max_tokens=300).json()
    if answer["choices"][0]["finish_reason"] == "stop":
        assert isinstance(json.loads(answer["choices"][0]["message"]["content"]), dict)
    free = chat(serving, response_format={"type": "text"}, temperature=0).json()
    assert (
        free["choices"][0]["message"]
        == chat(serving, temperature=0).json()["choices"][0]["message"]
    )


def test_the_text_of_a_special_token_in_a_literal_is_plain_text(serving: Daemon) -> None:
    literal = "yes<|im_end|>no"
    named = {"type": "object", "properties": {literal: {"const": literal}}, "required": [literal]}
    for fields, expected in (
        ({"json": {"enum": [literal]}}, json.dumps(literal)),
        ({"json": {"type": "string", "pattern": f"^{re.escape(literal)}$"}}, json.dumps(literal)),
        ({"choice": [literal]}, literal),
        ({"regex": re.escape(literal)}, literal),
        ({"grammar": f'root ::= "{literal}"'}, literal),
    ):
        choice = complete(serving, structured_outputs=fields).json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (expected, "stop"), fields
    choice = complete(serving, structured_outputs={"json": named}).json()["choices"][0]
    assert json.loads(choice["text"])[literal] == literal
    tool = {"type": "function", "function": {"name": "call", "parameters": named}}
    message = chat(serving, tools=[tool], tool_choice="required").json()["choices"][0]["message"]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"])[literal] == literal


def test_a_stream_says_what_the_whole_answer_says(serving: Daemon) -> None:
    fields = {"structured_outputs": {"json": PERSON}, "n": 2, "logprobs": 1}
    whole = complete(serving, **fields).json()["choices"]
    texts = {0: "", 1: ""}
    reasons = {}
    body = {"prompt": "A person: ", "max_tokens": 100, "seed": 3, "stream": True, **fields}
    with httpx.stream("POST", f"{serving.url}/v1/completions", json=body, timeout=60) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                for each in json.loads(line.removeprefix("data: "))["choices"]:
                    texts[each["index"]] += each["text"]
                    reasons[each["index"]] = each["finish_reason"]
    assert [texts[0], texts[1]] == [each["text"] for each in whole]
    assert reasons == {0: "stop", 1: "stop"}


def test_a_cut_answer_says_so(serving: Daemon) -> None:
    choice = complete(serving, guided_json=PERSON, max_tokens=4).json()["choices"][0]
    assert choice["finish_reason"] == "length"


def test_constrained_and_free_requests_in_one_batch(serving: Daemon) -> None:
    prompts = ["Once upon a time", "The sea", "1 2 3"]
    asked = {"temperature": 0, "max_tokens": 24}
    alone = [
        complete(serving, prompt=each, **asked).json()["choices"][0]["text"] for each in prompts
    ]

    async def together() -> tuple[list[str], list[str]]:
        async with httpx.AsyncClient(base_url=serving.url, timeout=60) as client:

            async def ask(**fields: Any) -> str:
                body = {"max_tokens": 60, "temperature": 0} | fields
                answer = (await client.post("/v1/completions", json=body)).json()
                return str(answer["choices"][0]["text"])

            free = [ask(prompt=each, **asked) for each in prompts]
            bound = [ask(prompt=each, guided_json=PERSON) for each in prompts]
            found = await asyncio.gather(*free, *bound)
            return found[:3], found[3:]

    free, bound = asyncio.run(together())
    assert free == alone
    for text in bound:
        check(PERSON, text)


async def answers(daemon: Daemon, wanted: list[Schema], at_once: int = 16) -> list[dict[str, Any]]:
    """The choice that came of each schema, at temperature 1."""
    turn = asyncio.Semaphore(at_once)

    async def ask(client: httpx.AsyncClient, number: int, schema: Schema) -> dict[str, Any]:
        content = f"Write JSON for this schema: {json.dumps(schema)}"
        body = {
            "messages": [{"role": "user", "content": content}],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": schema},
            },
            "temperature": 1.0,
            "seed": number,
            "max_tokens": 1500,
        }
        async with turn:
            response = await client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, (schema, response.text)
        return dict(response.json()["choices"][0])

    async with httpx.AsyncClient(base_url=daemon.url, timeout=600) as client:
        return await asyncio.gather(*(ask(client, *each) for each in enumerate(wanted)))


def check_schemas(daemon: Daemon, wanted: list[Schema]) -> None:
    found = asyncio.run(answers(daemon, wanted))
    complete = [
        (schema, choice)
        for schema, choice in zip(wanted, found, strict=True)
        if choice["finish_reason"] == "stop"
    ]
    for schema, choice in complete:
        check(schema, choice["message"]["content"])
    print(f"{len(complete)} of {len(wanted)} answers end with stop, and all of these are valid")
    assert len(complete) >= 0.99 * len(wanted)


def test_random_schemas(serving: Daemon) -> None:
    check_schemas(serving, schemas(8, seed=1))


@pytest.mark.suite("settings")
@pytest.mark.parametrize("part", range(4))
def test_two_hundred_random_schemas(serving: Daemon, part: int) -> None:
    wanted = schemas(200)
    text = json.dumps(wanted)
    assert [each for each in KEYWORDS if f'"{each}":' not in text] == []
    check_schemas(serving, wanted[part::4])


def test_abuse_is_a_400_within_seconds(serving: Daemon) -> None:
    control = complete(serving, temperature=0).json()["choices"]
    engine = pids_by_title(serving.pid)["tokend: engine 0"]
    endless = {
        "allOf": [
            {"type": "integer", "multipleOf": 999983},
            {"type": "integer", "multipleOf": 999979},
            {"multipleOf": 777777},
        ]
    }
    recursive = {
        "$defs": {
            "a": {
                "type": "object",
                "properties": {"a": {"$ref": "#/$defs/a"}},
                "required": ["a"],
            }
        },
        "$ref": "#/$defs/a",
    }
    for fields, statuses in (
        ({"json": {"type": "foo"}}, {400}),
        ({"json": {"not": {}}}, {400}),
        ({"json": ""}, {400}),
        ({"json_object": False}, {400}),
        ({"grammar": 'start: "a"\nstart: "b"'}, {400}),
        ({"grammar": DEEP_RULES}, {400}),
        ({"json": '{"items":' * 1000 + "{}" + "}" * 1000}, {400}),
        ({"json": recursive}, {200, 400}),
        ({"json": {"$ref": "#"}}, {400}),
        ({"json": endless}, {400}),
        ({"regex": "(a+)+b"}, {200}),
        ({"regex": "([a-z]+)*" * 2000}, {200, 400}),
        ({"regex": "x" * 1_000_000}, {400}),
    ):
        started = time.monotonic()
        response = complete(serving, structured_outputs=fields, max_tokens=8)
        assert response.status_code in statuses, (fields, response.text)
        assert time.monotonic() - started < ABUSE_SECONDS, fields
        if response.status_code == 400:
            param = response.json()["error"]["param"]
            assert param.removesuffix(f".{next(iter(fields))}") == "structured_outputs"
    assert complete(serving, temperature=0).json()["choices"] == control
    assert pids_by_title(serving.pid)["tokend: engine 0"] == engine


def test_slow_grammars_of_one_client_delay_no_other(serving: Daemon) -> None:
    """Nor does one whose client has left."""
    slow = [{"type": "integer", "multipleOf": number} for number in range(999_901, 999_919, 3)]

    async def run() -> None:
        async with httpx.AsyncClient(base_url=serving.url, timeout=60) as client:

            async def ask(schema: Schema) -> int:
                body = {"prompt": "x", "max_tokens": 2, "structured_outputs": {"json": schema}}
                return (await client.post("/v1/completions", json=body)).status_code

            tasks = [asyncio.create_task(ask(schema)) for schema in slow]
            while serving.metric("vllm:num_requests_waiting") < len(slow):
                await asyncio.sleep(0.01)
            assert await ask({"type": "integer", "maximum": 9}) == 200
            assert sum(task.done() for task in tasks) <= 1, "it waited for slow grammars"
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    asyncio.run(run())


@pytest.mark.suite("settings")
def test_ten_thousand_grammars_take_bounded_memory(serving: Daemon) -> None:
    """The cache is full after the first thousand; what follows takes the place of what was."""
    engine = psutil.Process(pids_by_title(serving.pid)["tokend: engine 0"])

    async def ask(first: int, count: int) -> None:
        turn = asyncio.Semaphore(16)
        async with httpx.AsyncClient(base_url=serving.url, timeout=120) as client:

            async def one(number: int) -> None:
                grammar = {"choice": [f"answer {number}", f"reply {number}"]}
                body = {"prompt": "x", "max_tokens": 1, "structured_outputs": grammar}
                async with turn:
                    assert (await client.post("/v1/completions", json=body)).status_code == 200

            await asyncio.gather(*(one(first + each) for each in range(count)))

    asyncio.run(ask(0, 1000))
    before = engine.memory_info().rss
    asyncio.run(ask(1000, 9000))
    assert engine.memory_info().rss - before < 64 << 20
