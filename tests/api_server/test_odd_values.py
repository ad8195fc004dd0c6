"""Odd values in each field of each route of the OpenAPI document: never a 500, always strict JSON.

A refusal names the field. Fields of objects within a body are tried like those at its top, and so
is a field in free-form objects such as metadata.
"""

import asyncio
import contextlib
import itertools
import json
import pathlib
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any, Final

import httpx
import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer

from api_server.routes.openapi import OPERATIONS
from proto.messages.engine_io import FinishReason
from proto.messages.lora import AdapterCard, LoRARequest
from proto.messages.pooling import Pooler
from proto.messages.prepared_model import PreparedModel
from proto.settings.config import FrontEndConfig, LoRAConfig
from tests.api_server.conftest import FrontEnd, StartFrontEnd, serving

Path = tuple[str | int, ...]

USER: Final = {"role": "user", "content": [{"type": "text", "text": "x"}]}
CALL: Final = {"id": "c", "type": "function", "function": {"name": "a", "arguments": "{}"}}
CITY: Final = {"type": "object", "properties": {"city": {"type": "string", "minLength": 1}}}
FUNCTION: Final = {"name": "a", "description": "b", "parameters": CITY, "strict": False}
GENERATED: Final = {"prompt": "x", "max_tokens": 2, "logit_bias": {"5": 1}, "stop": ["q"]}
CHAT: Final = {
    "messages": [USER, {"role": "assistant", "tool_calls": [CALL]}, {**USER, "role": "tool"}],
    "tools": [{"type": "function", "function": FUNCTION}],
    "max_tokens": 2,
}
TEXTS: Final = {"model": "toy", "input": ["x", "y"]}
PAIR: Final = {"text_1": "x", "text_2": ["y", "z"]}
RANKED: Final = {"query": "x", "documents": ["y", "z"]}
ITEMS: Final = [
    {"type": "message", **USER, "content": [{"type": "input_text", "text": "x"}]},
    {"type": "function_call", "call_id": "c", "name": "a", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "x"},
]
RESPONSE: Final = {
    "input": ITEMS,
    "max_output_tokens": 16,
    "metadata": {"a": "b"},
    "text": {"format": {"type": "json_schema", "name": "a", "schema": CITY}},
}
MESSAGES: Final = {
    "model": "toy",
    "max_tokens": 2,
    "messages": [
        USER,
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t", "name": "a", "input": {}}],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "x"}]},
    ],
    "tools": [{"name": "a", "input_schema": CITY}],
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "metadata": {"user_id": "u"},
}
ADAPTER: Final = tempfile.TemporaryDirectory(prefix="tk")
pathlib.Path(ADAPTER.name, "adapter_config.json").write_text("{}")
BODIES: Final[dict[str, list[dict[str, Any]]]] = {
    "/v1/completions": [
        GENERATED,
        {"prompt": [[5, 6]], "stream": True, "stream_options": {"include_usage": True}},
        {
            "prompt": "x",
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": CITY},
            },
        },
        {"prompt": "x", "structured_outputs": {"json": CITY}, "cache_salt": "a"},
        {"prompt": "x", "use_beam_search": True, "n": 2, "vllm_xargs": {}, "prompt_logprobs": None},
        {
            "prompt": "x",
            "echo": True,
            "logprobs": 1,
            "prompt_logprobs": 1,
            "repetition_detection": {"max_pattern_size": 4, "min_pattern_size": 1, "min_count": 2},
        },
    ],
    "/infill": [
        {
            "input_prefix": "x",
            "input_suffix": "y",
            "input_extra": [{"text": "z", "filename": "a"}],
            "n_predict": 2,
            "logit_bias": {"5": 1},
            "n_probs": 1,
        },
        {"input_prefix": "x", "input_suffix": "y", "stream": True, "response_fields": ["content"]},
    ],
    "/v1/chat/completions": [
        CHAT,
        {
            **CHAT,
            "chat_template_kwargs": {"a": 1},
            "tool_choice": {"type": "function", "function": {"name": "a"}},
        },
        {"messages": [USER], "stream": True, "metadata": {"a": "b"}},
    ],
    "/v1/responses": [
        RESPONSE,
        {**RESPONSE, "text": None, "stream": True, "tools": [{"type": "function", **FUNCTION}]},
    ],
    "/v1/completions/render": [GENERATED],
    "/v1/chat/completions/render": [{key: CHAT[key] for key in ("messages", "max_tokens")}],
    "/v1/responses/render": [{"input": "x", "max_output_tokens": 16}],
    "/v1/responses/input_tokens": [RESPONSE],
    "/v1/responses/compact": [{"model": "toy", "input": ITEMS}],
    "/v1/messages": [MESSAGES, {**MESSAGES, "stream": True, "tool_choice": {"type": "auto"}}],
    "/v1/messages/count_tokens": [{key: MESSAGES[key] for key in ("model", "messages", "tools")}],
    "/v1/embeddings": [TEXTS],
    "/pooling": [TEXTS],
    "/classify": [TEXTS],
    "/score": [PAIR],
    "/v1/score": [PAIR],
    "/rerank": [RANKED],
    "/v1/rerank": [RANKED],
    "/v2/rerank": [RANKED],
    "/tokenize": [{"prompt": "x"}, {key: CHAT[key] for key in ("messages", "tools")}],
    "/detokenize": [{"tokens": [5, 6]}],
    "/abort_requests": [{"request_ids": ["x"]}],
    "/v1/load_lora_adapter": [{"lora_name": "b", "lora_path": ADAPTER.name, "load_inplace": True}],
    "/v1/unload_lora_adapter": [{"lora_name": "a"}],
}
"""Valid bodies of each route, which use fields that hold objects."""

LARGE: Final = 400
NUMBERS: Final = {
    "NaN": "NaN",
    "Infinity": "Infinity",
    "-Infinity": "-Infinity",
    "1e999": "1e999",
    "400 digits": "9" * LARGE,
    "5000 digits": "-" + "9" * 5000,
    "5000 places": "1." + "9" * 5000 + "e5000",
}
"""Numbers that every field refuses."""
VALUES: Final = {
    "308 digits": "9" * 308,
    "-308 digits": "-" + "9" * 308,
    "2**63": str(2**63),
    "2**64": str(2**64),
    "-2**63-1": str(-(2**63) - 1),
    "1e308": "1e308",
    "-0.0": "-0.0",
    "5e-324": "5e-324",
    "half": "0.5",
    "minus": "-1",
    "true": "true",
    "null": "null",
    "empty": '""',
    "zero byte": '"\\u0000"',
    "surrogate": '"\\ud800"',
    "digits in text": '"' + "9" * 5000 + '"',
    "NaN in text": '"NaN"',
    "list": "[]",
    "lists": "[[[]]]",
    "nulls": "[null, null]",
    "numbers": "[1.5, -1, 99999999999999999999]",
    "odd list": '["\\ud800", "", {}, 1e308]',
    "object": "{}",
    "odd keys": '{"": 1, "\\ud800": null, "\\u0000": [], "type": {}}',
    "surrogate in an object": '{"type": "\\ud800", "name": "\\udc00", "text": "\\ud800"}',
    "deep": '{"a": [' * 25 + "1" + "]}" * 25,
}
"""Values that some fields accept, as JSON."""
ANY: Final = ("maximum context length", "too long", "surrogate")
"""Of a refusal that concerns several fields of a message."""
_MARK: Final = "@value@"


@dataclass(frozen=True)
class Case:
    """A body with a value in one of its fields. name: of the field at the top of the body."""

    path: str
    name: str
    body: bytes
    must_fail: bool


def cases(path: str, fields: list[str]) -> Iterator[Case]:
    """Yield all odd values in all fields; those of nested objects that the valid bodies have."""
    for number, body in enumerate(BODIES[path]):
        new = [(name,) for name in fields if name not in body and not number]
        for place in [*_places(body), *new]:
            marked = json.dumps(_put(body, place, _MARK))
            for values, must_fail in ((NUMBERS, True), (VALUES, False)):
                for text in values.values():
                    content = marked.replace(f'"{_MARK}"', text)
                    yield Case(path, str(place[0]), content.encode(), must_fail)


def _places(value: Any) -> Iterator[Path]:
    """Yield the paths of all fields and elements, and of a new field in each object."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, child in pairs:
        yield (key,)
        if isinstance(child, dict | list):
            yield from ((key, *place) for place in _places(child))
    if isinstance(value, dict):
        yield ("unknown",)


def _put(body: Any, place: Path, value: Any) -> Any:
    """Return a copy of a body with another value in one place."""
    key, *rest = place
    copied = body.copy()
    copied[key] = _put(body[key], tuple(rest), value) if rest else value
    return copied


def test_every_route_with_a_body_has_a_valid_one() -> None:
    assert BODIES.keys() == {path for (path, _), route in OPERATIONS.items() if route.bodies}


async def check(client: httpx.AsyncClient, case: Case) -> str:
    """Return what is wrong with the answer to a case; "" for nothing."""
    answer = await client.post(
        case.path, content=case.body, headers={"content-type": "application/json"}
    )
    wrong = problem(case, answer)
    return wrong and f"{case.path} {case.name} {wrong} {answer.text[:300]} {case.body[-300:]!r}"


def problem(case: Case, answer: httpx.Response) -> str:
    if answer.status_code >= 500:
        return str(answer.status_code)
    if answer.status_code == 200 and case.must_fail:
        return "accepted"
    texts = [answer.text]
    if answer.headers["content-type"].startswith("text/event-stream"):
        lines = answer.text.splitlines()
        texts = [line[6:] for line in lines if line.startswith("data: {")]
    elif answer.headers["content-type"].startswith("text/plain"):  # as of vLLM's routes of adapters
        texts = []
    try:
        values = [strict_json(text) for text in texts if text]
    except ValueError as error:
        return f"no strict JSON: {error}"
    if answer.status_code == 400:
        error = values[0]["error"]
        known = error["message"] if "param" not in error else error["param"] or ""
        names = [case.name] if case.must_fail else [*json.loads(case.body), *ANY]
        if not any(name in known for name in names):
            return "the field is not named"
        if len(error["message"]) > 1000:
            return "a long message"
    return ""


def strict_json(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(constant)

    text.encode()
    return json.loads(text, parse_constant=refuse)


async def answer_all(front_end: FrontEnd) -> None:
    """Give each request of a model that pools a result."""
    while True:
        request = await front_end.engine.requests.get()
        assert request.pooling_params is not None
        size = request.pooling_params.dimensions or 4
        data = np.zeros(size, "<f4").tobytes()
        front_end.engine.emit(request, [], finish=FinishReason.STOP, pooler_output=data)


POOLERS: Final = {
    "/classify": Pooler(size=4, task="classify", labels=("a", "b", "c", "d")),
    **dict.fromkeys(
        (
            "/v1/embeddings",
            "/pooling",
            "/score",
            "/v1/score",
            "/rerank",
            "/v1/rerank",
            "/v2/rerank",
        ),
        Pooler(size=4),
    ),
}
"""The poolers of the models that are asked; other routes ask a model that generates."""


def that_fills_in(model: PreparedModel, folder: pathlib.Path) -> PreparedModel:
    """Return a model whose vocabulary also has the tokens for filling in."""
    shutil.copytree(model.folder, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<fim_prefix>", "<fim_suffix>", "<fim_middle>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    return msgspec.structs.replace(model, folder=str(folder), vocab_size=size)


@contextlib.asynccontextmanager
async def client_of(
    run_dir: str, model: PreparedModel, path: str
) -> AsyncIterator[httpx.AsyncClient]:
    config = FrontEndConfig(
        admin_api_key="k",
        disable_log_requests=True,
        reasoning_parser="auto" if path.endswith("compact") else "qwen3",
        tool_call_parser="hermes",
    )
    if path == "/infill":
        model = that_fills_in(model, pathlib.Path(run_dir, "infill"))
    pooler = POOLERS.get(path)
    async with contextlib.AsyncExitStack() as stack:
        if pooler is None:
            script = [20, 30, 200, 2]
            lora = LoRAConfig(enable_lora=True)
            front_end = await stack.enter_async_context(
                serving(
                    run_dir, model, lambda *_: script, config=config, max_model_len=4096, lora=lora
                )
            )
            adapter = LoRARequest(1, "a", "/a", bytes(32))
            front_end.engine.send_adapters(AdapterCard(adapter, 8, 1000, 0))
            assert front_end.app_state.adapters is not None
            while not front_end.app_state.adapters.all_cards():
                await asyncio.sleep(0.001)
        else:
            pooling = msgspec.structs.replace(model, pooler=pooler, hidden_size=4)
            front_end = await stack.enter_async_context(
                serving(run_dir, pooling, accepts=True, config=config)
            )
            stack.callback(asyncio.create_task(answer_all(front_end)).cancel)
        transport = httpx.ASGITransport(front_end.app, raise_app_exceptions=False)
        yield httpx.AsyncClient(
            transport=transport, base_url="http://127.0.0.1", headers={"x-api-key": "k"}
        )


def fields_of(path: str) -> list[str]:
    models = OPERATIONS[path, "post"].bodies
    return sorted({name for model in models for name in model.model_fields})


async def check_route(run_dir: str, model: PreparedModel, path: str, every: int) -> None:
    """Check each `every`th case of a route."""
    async with client_of(run_dir, model, path) as client:
        for body in BODIES[path]:
            answer = await client.post(path, json=body)
            assert answer.status_code in (200, 202), answer.text
        tried = itertools.islice(cases(path, fields_of(path)), 0, None, every)
        wrong = [found for case in tried if (found := await check(client, case))]
    assert not wrong, f"{len(wrong)}: " + "\n".join(wrong[:40])


ROUTES: Final = pytest.mark.parametrize("path", sorted(BODIES))


@ROUTES
async def test_odd_values_are_refused_by_name_or_harmless(
    run_dir: str, model: PreparedModel, path: str
) -> None:
    """A part of the cases: their number and the number of values have no common divisor."""
    await check_route(run_dir, model, path, every=61)


@pytest.mark.suite("fuzz")
@ROUTES
async def test_all_odd_values_in_all_fields(run_dir: str, model: PreparedModel, path: str) -> None:
    await check_route(run_dir, model, path, every=1)


@pytest.mark.parametrize("number", NUMBERS.values(), ids=NUMBERS)
@pytest.mark.parametrize(
    ("path", "body", "where"),
    [
        (
            "/v1/completions",
            '{"prompt": "x", "vllm_xargs": {"a": [{"b": %s}]}}',
            "vllm_xargs.a[0].b",
        ),
        ("/v1/completions", '{"prompt": "x", "no_field": [[%s]]}', "no_field[0][0]"),
        ("/v1/chat/completions", '{"messages": [], "metadata": {"a": %s}}', "metadata.a"),
        ("/tokenize", '{"prompt": "x", "chat_template_kwargs": {"": %s}}', "chat_template_kwargs."),
        ("/v1/completions", "[%s]", "[0]"),
        ("/v1/completions", "%s", "the body"),
    ],
)
async def test_a_number_that_is_refused_is_found_anywhere_in_a_body(
    start: StartFrontEnd, path: str, body: str, where: str, number: str
) -> None:
    async with start() as front_end:
        headers = {"content-type": "application/json"}
        answer = await front_end.http.post(path, content=body % number, headers=headers)
        assert answer.status_code == 400
        message = strict_json(answer.text)["error"]["message"]
        assert message == f"{where} must be a finite number of at most 308 digits"
        assert (await front_end.http.get("/health")).status_code == 200
