"""Bodies have limits that are checked before they are decoded, and lists before their elements."""

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from api_server.http.connection import MAX_BODY_BYTES
from api_server.protocol import chat, decoding
from api_server.protocol.completions import CompletionRequest
from api_server.protocol.decoding import decode_json, num_values
from api_server.protocol.fields import IgnoredFields
from api_server.protocol.messages.request import CountTokensRequest, MessagesRequest
from api_server.protocol.pooling import EmbeddingRequest, RerankRequest, ScoreRequest
from api_server.protocol.responses.compaction import CompactionRequest
from api_server.protocol.responses.request import ResponsesRequest
from api_server.routes.admin import AbortBody
from api_server.routes.tokenizer import Detokenize, TokenizeChat, TokenizeText
from proto.errors import InvalidRequestError

MODELS = [
    *(CompletionRequest, chat.ChatCompletionRequest, MessagesRequest, CountTokensRequest),
    *(ResponsesRequest, CompactionRequest, EmbeddingRequest, RerankRequest, ScoreRequest),
    *(Detokenize, TokenizeChat, TokenizeText, AbortBody),
]
TEXTS = ["", "a", '"', "\\", '\\"', ",[{:", "\n", "\\n", "ü", "🧿", '",[', "\\\\"]


def random_json(source: random.Random, depth: int = 0) -> Any:
    kind = source.randrange(5 if depth < 4 else 3)
    if kind == 3:
        return [random_json(source, depth + 1) for _ in range(source.randrange(5))]
    if kind == 4:
        names = {"".join(source.choices(TEXTS, k=3)) for _ in range(source.randrange(5))}
        return {name: random_json(source, depth + 1) for name in names}
    return "".join(source.choices(TEXTS, k=source.randrange(6))) if kind else source.random()


def counted(value: Any) -> tuple[int, int, int, int]:
    """Return commas, containers, quotes and keys."""
    if isinstance(value, str):
        return (0, 0, 2, 0)
    if not isinstance(value, dict | list):
        return (0, 0, 0, 0)
    inner = [*value, *value.values()] if isinstance(value, dict) else value
    sums = [sum(each) for each in zip(*map(counted, inner), strict=True)] or [0] * 4
    keys = len(value) if isinstance(value, dict) else 0
    return (sums[0] + max(len(value) - 1, 0), sums[1] + 1, sums[2], sums[3] + keys)


URI = "data:image/png;base64," + "iVBO" * 5_000


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"a": [URI, {"b": URI + "x"}, URI], "c": "data:,d"}),
        json.dumps({URI: [1], "a": {URI: URI}}),
        json.dumps([URI + '"', URI + "\\", "\\" + URI, f'{{"a": "{URI}"}}', URI + "ü", "é" + URI]),
        json.dumps(URI) + "\n",
        json.dumps([{"type": "base64", "data": URI[22:]}, {"data": [URI]}, {"data": {}, URI: 1}]),
        f'{{"data"\n:\t"{URI[9:]}","a":"data"}}',
        json.dumps(['{"data": "' + URI[22:], {"data": URI + "é"}, "data", URI + "data"]),
        f'[ "{URI}" \n , "{URI}"\t]',
        f'{{"a" : "{URI}"{" " * 99}}}',
    ],
)
def test_images_are_decoded_as_other_strings(text):
    assert decode_json(bytearray(text.encode())) == json.loads(text)
    assert decode_json(bytearray(json.dumps(json.loads(text)).encode())) == json.loads(text)


@pytest.mark.parametrize(
    "text",
    [
        *(f'["{URI}"', f'["{URI}', f'["a"{URI}", 1]', f'[""data:{URI}"]', f'["{URI}\n"]'),
        *(f'{{"data" "{URI}"}}', f'{{"data": "{URI}}}', f'["data": "{URI}"]'),
        *(f'["{URI}\\x"]', f'["{URI}\x01"]', f'["{URI}",]', f'{{"{URI}"}}', f'{{"a": 1, "{URI}"}}'),
    ],
)
def test_invalid_json_with_images_is_refused(text):
    with pytest.raises(InvalidRequestError, match="not valid JSON"):
        decode_json(bytearray(text.encode()))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_other_encodings_are_refused(encoding: str) -> None:
    """An image of UTF-8 may be a part of any text in them."""
    hidden = ('"data:' + "A" * 18_000 + '"' + ",  ").encode().decode("utf-16-le")
    body = bytearray(json.dumps({"m": f"hello {hidden}"}, ensure_ascii=False).encode(encoding))
    with pytest.raises(InvalidRequestError, match=r"^the body must be UTF-8$"):
        decode_json(body)


@pytest.mark.parametrize("start", ["data:image/png;base64,", ""])
def test_images_cost_no_limit(start):
    """Beside an image a body is small: its numbers are named, and its members are compared."""
    uri = start + "iVBO" * (2 << 20)
    with pytest.raises(InvalidRequestError, match=r"^b must be a finite number"):
        decode_json(bytearray(f'{{"data": "{uri}", "b": NaN}}'.encode()))
    with pytest.raises(InvalidRequestError, match="more than once"):
        decode_json(bytearray(f'{{"data": "{uri}", "data": "{uri}"}}'.encode()))


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 1 << 18])
def test_commas_brackets_quotes_and_keys_outside_of_strings_are_counted(piece, monkeypatch):
    monkeypatch.setattr(decoding, "_SCANNED_BYTES", piece)
    source = random.Random(piece)
    for _ in range(300):
        value = [random_json(source)]
        body = bytearray(json.dumps(value, ensure_ascii=source.random() < 0.5).encode())
        *_, counts = decoding._running_counts(body)
        assert tuple(counts) == counted(value), bytes(body)


@pytest.mark.parametrize("largest", [0, decoding.MAX_PYTHON_JSON])
def test_both_decoders_return_the_same(largest, monkeypatch):
    monkeypatch.setattr(decoding, "MAX_PYTHON_JSON", largest)
    source = random.Random(1)
    for _ in range(300):
        value = random_json(source)
        body = bytearray(json.dumps(value).encode())
        assert decode_json(body) == value
        assert not body  # its memory is free before the request is validated
    for invalid in (b'{"a": 1, "b": {"c": 2, "c": 3}}', b"[1,", b"\xff", b"[" * 10**5, b"[" * 99):
        with pytest.raises(InvalidRequestError):
            decode_json(bytearray(invalid))


DECODE = """
import sys
from pathlib import Path
from api_server.http.connection import MAX_BODY_BYTES
from api_server.protocol.decoding import decode_json

def status(name):  # KiB
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))

before, end = status("VmRSS"), sys.argv[1].encode() + b'"]'
body = bytearray(b'["')
body += b"a" * (MAX_BODY_BYTES - len(body) - len(end))
body += end
Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
assert len(decode_json(body)[0]) > MAX_BODY_BYTES - 100
print((status("VmHWM") - before) >> 10)
"""


@pytest.mark.parametrize("end", ["\U0001f9ff", "\\ud83e\\uddff", ""])
def test_the_largest_body_takes_less_than_200_mib(end: str) -> None:
    """One character outside of the first plane makes all take four bytes."""
    command = [sys.executable, "-c", DECODE, end]
    grown = int(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    assert MAX_BODY_BYTES >> 20 <= grown < 200


@pytest.mark.parametrize("value", [b"[],", b"{},", b'{"a":[1]},', b'"",', b"0,"])
@pytest.mark.parametrize("size", [3 << 20, 5 << 20])
def test_a_body_of_too_many_values_is_refused_undecoded(value, size, monkeypatch):
    monkeypatch.setattr(json, "loads", lambda *_, **__: pytest.fail("decoded"))
    body = bytearray(b'["' + rb",\"[\\" * 1000 + b'",' + value * (size // len(value)) + b"0]")
    with pytest.raises(InvalidRequestError, match="more than 1048576 values, 131072 strings,"):
        decode_json(body)


def test_what_a_text_holds_is_not_counted() -> None:
    text = ',[{"a":1}' * 100_000
    assert decode_json(bytearray(json.dumps([text]).encode())) == [text]
    assert num_values(json.dumps({"a": text, "b": [1, 2]}), 10) == 5


def lists_of(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield the schemas of all lists and objects of free names in a model's core schema."""
    if isinstance(schema, dict):
        if schema.get("type") in ("list", "dict", "tuple", "set"):
            yield schema
        for inner in schema.values():
            yield from lists_of(inner)
    elif isinstance(schema, list | tuple):
        for inner in schema:
            yield from lists_of(inner)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_lists_have_limits_and_end_with_their_first_error(model: type[BaseModel]) -> None:
    for schema in lists_of(model.__pydantic_core_schema__):
        if schema["type"] == "list":  # an object has a validator before it, or any values
            assert schema.get("fail_fast"), schema
            # the limit of /detokenize follows the context, and its elements are only numbers
            assert schema.get("max_length") or model is Detokenize, schema


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        (MessagesRequest, {"system": [0] * 60_000, "tools": [0] * 60_000}),
        (ResponsesRequest, {"input": [0] * 4000, "include": [0] * 60_000}),
        (ResponsesRequest, {"metadata": {str(name): 0 for name in range(60_000)}}),
        (CompletionRequest, {"guided_choice": [0] * 60_000, "stop": [0] * 60_000}),
        (chat.ChatCompletionRequest, {"documents": [0] * 60_000}),
        (chat.ChatCompletionRequest, {"chat_template_kwargs": dict.fromkeys(map(str, range(99)))}),
        (
            chat.ChatCompletionRequest,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 5000}]},
        ),
    ],
)
def test_a_body_that_is_wrong_in_many_places_has_few_errors(model, fields):
    with pytest.raises(ValidationError) as caught:
        model.model_validate(fields)
    assert caught.value.error_count() < 8


def test_arguments_of_calls_have_a_limit_of_values_together() -> None:
    call = {"function": {"name": "f", "arguments": json.dumps([[]] * 20_000)}}
    for number, is_valid in ((3, True), (4, False)):
        messages = [{"role": "assistant", "content": "", "tool_calls": [call]}] * number
        fields = {"messages": messages}
        if is_valid:
            chat.ChatCompletionRequest.model_validate(fields, context=IgnoredFields())
        else:
            with pytest.raises(ValidationError, match="more than 131072 values in all calls"):
                chat.ChatCompletionRequest.model_validate(fields, context=IgnoredFields())
