"""Responses are bounded before their requests are accepted, and long ones are sent in parts."""

import asyncio
import itertools
import json

import msgspec
import pytest

from api_server.generation.encoders.base import ResponseOptions, event_data, flat_texts, json_parts
from api_server.generation.encoders.responses.encoder import ResponsesEncoder
from api_server.generation.encoders.responses.stored import (
    History,
    ResponseRecord,
    StoredResponses,
    json_size,
)
from api_server.generation.request_stream import MAX_UNSENT_BYTES, Delta, Usage
from api_server.generation.response import event_text
from api_server.parsers.output import PLAIN_TEXT, ChoiceParser
from api_server.protocol.completions import CompletionRequest
from api_server.protocol.fields import IgnoredFields
from api_server.protocol.responses.request import LOGPROBS, ResponsesTranslation, parse_request
from api_server.text.logprobs import ENTRY_BYTES, LogprobRow, TextToken
from proto.messages.engine_io import FinishReason
from proto.messages.pooling import Pooler
from proto.settings.config import FrontEndConfig
from tests.api_server.conftest import StartFrontEnd, counted_turns
from tests.fakes.fake_engine import pack_logprobs

LIMIT = 100_000
FAMILY = 390
"""A token of 26 bytes: an emoji of four persons."""
CONFIG = FrontEndConfig(max_response_bytes=LIMIT)


@pytest.mark.parametrize(
    "value",
    [
        *(None, 1.5, "x", [], {}, [[]], {"": {"a": []}}, "é\ud83d\ude00\n" * 50_000),
        *(
            list(range(1000)),
            {"a": list(range(129)), "b": [{"c": 1}] * 500, "d": {"e": "x" * 70_000}},
            [[1], ["x" * 70_000], [2], [3], [[{"a": list(range(300))}]], {}],
        ),
    ],
    ids=lambda value: str(type(value).__name__),
)
def test_parts_are_the_whole(value) -> None:
    parts = list(json_parts(value))
    assert "".join(parts) == json.dumps(value)
    assert max(map(len, parts)) < 800_000


def test_iterators_are_lists_made_on_the_way() -> None:
    made = itertools.count()
    body = {
        "a": ({"n": next(made), "rows": iter(range(3))} for _ in range(1000)),
        "b": iter(()),
    }
    parts = json_parts(body)
    for _ in range(10):
        next(parts)
    assert next(made) < 10
    parts = list(json_parts([{"a": ({"b": each} for each in range(300)), "c": iter(())}]))
    assert json.loads("".join(parts)) == [{"a": [{"b": each} for each in range(300)], "c": []}]
    assert len(parts) < 20, "small values are encoded together"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"echo": True, "n": 128, "prompt": [20] * 1000}, "echo"),
        ({"echo": True, "n": 64, "prompt": ["word " * 400]}, "echo"),
        ({"echo": True, "n": 128, "prompt": [20] * 1000, "stream": True}, "echo"),
        ({"return_prompt_text": True, "n": 128, "prompt": [20] * 1000}, "return_prompt_text"),
        ({"return_token_ids": True, "n": 128, "prompt": [20] * 1000}, "return_token_ids"),
        ({"prompt_logprobs": 0, "prompt": [20] * 1000}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 2, "prompt": [20] * 1000}, "logprobs"),
        (
            {"echo": True, "logprobs": 0, "prompt_logprobs": 0, "prompt": [20] * 390},
            "logprobs",
        ),
        ({"echo": True, "return_prompt_text": True, "n": 100, "prompt": [20] * 550}, "echo"),
        ({"logprobs": 0, "logprob_token_ids": [FAMILY], "max_tokens": 400}, "logprobs"),
        ({"logprobs": 5, "max_tokens": 1000}, "logprobs"),
        ({"logprobs": 5, "max_tokens": 10, "n": 64}, "logprobs"),
    ],
)
async def test_answers_beyond_the_limit_are_refused(start: StartFrontEnd, fields, param) -> None:
    async with start(config=CONFIG, max_model_len=4096) as front_end:
        answer = await front_end.complete(**fields)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param)
        assert f"--max-response-bytes, which is {LIMIT}" in error["message"]
        assert front_end.engine.requests.empty()


async def test_chats_and_detokenised_texts_beyond_the_limit_are_refused(start) -> None:
    async with start(config=CONFIG, max_model_len=4096) as front_end:
        answer = await front_end.chat(logprobs=True, top_logprobs=5, max_tokens=1000)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "logprobs")
        answer = await front_end.http.post("/detokenize", json={"tokens": [20] * 130_000})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tokens")


async def test_embeddings_beyond_the_limit_are_refused(start, model) -> None:
    """The size depends on the encoding: a number takes 22 bytes, or 6 in base64."""
    pooling = msgspec.structs.replace(model, pooler=Pooler(size=1000), hidden_size=1000)
    async with start(served=pooling, config=CONFIG, accepts=True) as front_end:
        body = {"input": [[5]] * 10}
        answer = await front_end.http.post("/v1/embeddings", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")
        assert front_end.engine.requests.empty()
        body["encoding_format"] = "base64"
        asked = asyncio.create_task(front_end.http.post("/v1/embeddings", json=body))
        for _ in range(10):
            request = await front_end.engine.requests.get()
            front_end.engine.emit(
                request, [], finish=FinishReason.STOP, pooler_output=bytes(4 * 1000)
            )
        answer = await asked
        assert answer.status_code == 200
        assert len(answer.content) < LIMIT


@pytest.mark.parametrize("stream", [False, True])
async def test_a_long_response_is_encoded_in_parts(monkeypatch, stream) -> None:
    """No single step makes the whole of an output with log-probabilities, stored or not."""
    rows = LogprobRow(list(range(21)), [-1.0] * 21, 1)
    asked, _ = parse_request({"input": "x"}, IgnoredFields())
    request = CompletionRequest(prompt="", detokenize=False)
    options = ResponseOptions("resp_1", 1, "toy", request, None, 20)
    translation = ResponsesTranslation(asked, {}, [], IgnoredFields(), template_names=frozenset())
    stored = StoredResponses(200 << 20, 3600, lambda: 0.0)
    record = ResponseRecord(stored, (0, ""), History([], 2))
    encoder = ResponsesEncoder(options, asked, ChoiceParser(PLAIN_TEXT), translation, record)
    tokens = [TextToken(7, index, rows) for index in range(2000)]
    delta, usage = Delta(0, "x" * 2000, [7] * 2000, tokens, 2000, "stop"), Usage(1, 2000)
    encoded: list[int] = []

    def dumps(value, dump=json_parts.__defaults__[0]):
        text = dump(value)
        encoded.append(len(text))
        return text

    monkeypatch.setattr(json, "dumps", dumps)
    monkeypatch.setattr(json_parts, "__defaults__", (dumps,))
    if stream:
        events = [encoder.encode_start(), encoder.encode_delta(delta), encoder.encode_end(usage)]
        text = "".join(flat_texts(events))
        data = [json.loads(each) for each in event_data(text)]
        found = data[-1]["response"]["output"][0]["content"][0]
        assert found == data[-2]["item"]["content"][0] == data[-3]["part"]
    else:
        with counted_turns() as turns:
            body = await encoder.encode_body([delta], usage)
        assert len(turns) >= 5
        assert sum(encoded) < 20_000, "neither events nor log-probabilities are encoded"
        text = "".join(json_parts(body))
        found = json.loads(text)["output"][0]["content"][0]
    assert len(found["logprobs"]) == 2000
    assert len(text) > 2_000_000 > 10 * max(encoded)
    response = stored.find_stored((0, ""), "resp_1").response
    assert json.loads("".join(json_parts(response)))["output"][0]["content"][0] == found
    assert stored.num_bytes == pytest.approx(json_size(response), rel=0.5)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("endpoint", ["chat/completions", "responses"])
async def test_long_tokens_end_a_response_that_becomes_too_long(start, stream, endpoint) -> None:
    """Their names in log-probabilities are several times the estimate. Others stay within it."""
    fields = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "max_tokens": 120}
    field = "logprobs"
    if endpoint == "responses":
        fields = {"input": "x", "include": [LOGPROBS], "max_output_tokens": 120}
        field = "include"
    fields |= {"top_logprobs": 5, "stream": stream}
    async with start(config=CONFIG, max_model_len=4096, accepts=True) as front_end:
        for token, is_ended in ((20, False), (FAMILY, True)):
            asked = asyncio.create_task(
                front_end.http.post(f"/v1/{endpoint}", json=fields, timeout=30)
            )
            request = await front_end.engine.requests.get()
            rows = pack_logprobs([[(token, -1.0)] * 6] * 40, [1] * 40)
            for finish in (None, None, FinishReason.LENGTH):
                front_end.engine.emit(request, [token] * 40, logprobs=rows, finish=finish)
            answer = await asked
            assert answer.status_code == 200 or is_ended
            error = '"message": "the response has more bytes than --max-response-bytes'
            text = answer.text.replace('":"', '": "')
            assert (error in text, f'"param": "{field}"' in text) == (is_ended, is_ended)
            if is_ended:
                assert (await front_end.engine.aborts.get()).request_id == request.request_id


async def test_log_probabilities_do_not_wait_for_a_long_interval(start) -> None:
    """As many as may wait for a blocked connection are an event."""
    number = MAX_UNSENT_BYTES // (3 * ENTRY_BYTES) + 10
    fields = {"prompt": "x", "logprobs": 2, "max_tokens": number + 2, "stream": True}
    fields["stream_interval"] = 10**9
    async with start(accepts=True, max_model_len=2 * number) as front_end:
        asked = asyncio.create_task(front_end.engine.requests.get())
        async with front_end.http.stream("POST", "/v1/completions", json=fields) as answer:
            request, lines = await asked, answer.aiter_lines()
            for count, finish in ((1, None), (number, None), (1, FinishReason.LENGTH)):
                front_end.engine.emit(request, [20] * count, finish=finish)
                while not (line := await anext(lines)):
                    pass
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                assert len(choice["logprobs"]["tokens"]) == count


async def test_a_long_message_of_a_websocket_is_made_between_other_work() -> None:
    """A text is taken as a whole, not by its characters."""

    class Text(str):
        def __iter__(self):
            raise AssertionError("the text is read by its characters")

    parts = ["é" * 50_000] * 20
    with counted_turns() as turns:
        assert await event_text([Text("a" * 1000), iter(parts), Text("b")]) == (
            "a" * 1000 + "".join(parts) + "b"
        )
    assert len(turns) >= 10


@pytest.mark.parametrize("stream", [False, True])
async def test_a_long_answer_is_complete(start, scripted, stream) -> None:
    """Its parts are the answer, and others are answered between them."""
    async with start(scripted("!"), max_model_len=8192) as front_end:
        fields = {"prompt": [20, 30] * 2000, "echo": True, "logprobs": 3, "n": 4, "max_tokens": 2}
        asked = asyncio.create_task(
            front_end.events("/v1/completions", **fields)
            if stream
            else front_end.complete(**fields)
        )
        num_answers = 0
        while not asked.done():
            assert (await front_end.http.get("/health/live")).status_code == 200
            num_answers += 1
        answer = await asked
        choices = (
            [choice for event in answer[:-1] for choice in event["choices"]]
            if stream
            else answer.json()["choices"]
        )
        whole = [choice for choice in choices if len(choice["logprobs"]["tokens"]) >= 4000]
        assert len(whole) == 4
        for choice in whole:
            lists = choice["logprobs"]
            assert choice["text"].startswith("".join(lists["tokens"][:10]))
            assert {len(each) for each in lists.values()} == {len(lists["tokens"])}
        assert num_answers > 3
