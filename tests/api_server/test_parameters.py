"""Request parameters: their values in the engine's request, and their effect on the answer."""

import asyncio
import hashlib

import pytest

from api_server.protocol.common import REQUEST_NUMBERS, SamplingNumbers
from api_server.text.prompts import MAX_TRUNCATED_CHARACTERS
from proto.messages.engine_io import FinishReason
from proto.messages.logit_edits import LogitEdits
from proto.messages.sampling_params import RepetitionDetection, SamplingParams
from proto.settings.config import FrontEndConfig
from tests.fakes.fake_engine import pack_logprobs

PATH = "/v1/completions"
ENDPOINTS = ("complete", "chat")


async def asked(front_end, endpoint: str, **fields):
    """Return the body of the answer and the engine's request."""
    response = await getattr(front_end, endpoint)(**fields)
    assert response.status_code == 200, response.text
    return response.json(), front_end.engine.requests.get_nowait()


def test_requests_have_every_number_of_the_engine_with_its_default():
    defaults = {name: field.default for name, field in SamplingNumbers.model_fields.items()}
    params, edits = SamplingParams(max_tokens=1), LogitEdits()
    assert defaults == {
        name: getattr(params if hasattr(params, name) else edits, name) for name in REQUEST_NUMBERS
    }


@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_logits_edits_reach_the_engine(start, scripted, tokenizer, endpoint):
    async with start(scripted("!")) as front_end:
        _, request = await asked(front_end, endpoint)
        assert request.sampling_params.edits is None
        assert request.sampling_params.repetition is None
        assert request.cache_salt is None
        _, request = await asked(
            front_end,
            endpoint,
            presence_penalty=0.5,
            frequency_penalty=-1,
            repetition_penalty=1.25,
            logit_bias={"5": -100, "17": 3.5},
            allowed_token_ids=[5, 17, 8],
            bad_words=["fox", "the sea"],
        )
        words = [*map(tuple, (tokenizer.encode(each).ids for each in ("fox", "the sea")))]
        edits = request.sampling_params.edits
        assert edits == LogitEdits(
            presence_penalty=0.5,
            frequency_penalty=-1.0,
            repetition_penalty=1.25,
            bias_token_ids=(5, 17),
            bias_values=(-100.0, 3.5),
            allowed_token_ids=(5, 17, 8),
            bad_words=edits.bad_words,
        )
        assert set(words) <= set(edits.bad_words)


async def test_bad_words_with_a_leading_space(start, scripted, tokenizer):
    """The other tokenization is used if it has the same length and another first token."""
    async with start(scripted("!")) as front_end:
        for word in ("fox", "lazy", "zebra", "the quick", "  dog"):
            first = tuple(tokenizer.encode(word.lstrip()).ids)
            spaced = tuple(tokenizer.encode(" " + word.lstrip()).ids)
            other = len(first) == len(spaced) and first[0] != spaced[0]
            _, request = await asked(front_end, "complete", bad_words=[word])
            assert request.sampling_params.edits.bad_words == (
                (first, spaced) if other else (first,)
            )


@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_repetition_detection_and_cache_salt_reach_the_engine(start, scripted, endpoint):
    async with start(scripted("!")) as front_end:
        pattern = {"max_pattern_size": 20, "min_pattern_size": 3, "min_count": 4}
        _, request = await asked(
            front_end, endpoint, repetition_detection=pattern, cache_salt="tenant é"
        )
        assert request.sampling_params.repetition == RepetitionDetection(**pattern)
        assert request.cache_salt == hashlib.sha256("tenant é".encode()).hexdigest()
        fewer = {"max_pattern_size": 20, "min_pattern_size": 0, "min_count": 4}
        _, request = await asked(front_end, endpoint, repetition_detection=fewer)
        assert request.sampling_params.repetition.min_pattern_size == 1


async def test_min_tokens_above_max_tokens(start, scripted):
    """Also if max_tokens follows from the context."""
    async with start(scripted("!")) as front_end:
        for fields in ({"min_tokens": 300}, {"min_tokens": 9, "max_completion_tokens": 8}):
            response = await front_end.chat(**fields)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == "min_tokens"


async def test_a_repetition_ends_a_choice(start):
    async def script(front_end):
        request = await front_end.engine.requests.get()
        front_end.engine.accept(request)
        front_end.engine.emit(request, [40, 40], finish=FinishReason.REPETITION)

    async with start() as front_end:
        for stream in (False, True):
            answer = asyncio.create_task(front_end.complete(stream=stream))
            await script(front_end)
            text = (await answer).text
            assert '"finish_reason": "repetition"' in text
            assert '"stop_reason": "repetition_detected"' in text


@pytest.mark.parametrize("shown", [False, True])
async def test_include_stop_str_in_output(start, scripted, shown):
    async with start(scripted("the quick brown fox")) as front_end:
        fields = {"max_tokens": 60, "stop": ["brown"], "include_stop_str_in_output": shown}
        body = (await front_end.complete(**fields)).json()
        expected = "the quick brown" if shown else "the quick "
        assert body["choices"][0]["text"] == expected
        assert body["choices"][0]["stop_reason"] == "brown"
        events = await front_end.events(PATH, prompt="hello", **fields)
        assert "".join(each["choices"][0]["text"] for each in events[:-1]) == expected


@pytest.mark.parametrize("skipped", [False, True])
@pytest.mark.parametrize("includes_stop", [False, True])
async def test_skip_special_tokens(start, tokenizer, skipped, includes_stop):
    """The end token has text only with both settings."""
    ids = [*tokenizer.encode("fox").ids, 1, 0, 2]
    async with start(lambda request, choice: ids) as front_end:
        fields = {"skip_special_tokens": skipped, "include_stop_str_in_output": includes_stop}
        body = (await front_end.complete(max_tokens=60, **fields)).json()
        end = "<|im_end|>" if includes_stop else ""
        expected = "fox" if skipped else f"fox<|im_start|><|endoftext|>{end}"
        assert body["choices"][0]["text"] == expected
        chat = (await front_end.chat(**fields)).json()
        assert chat["choices"][0]["message"]["content"] == expected


async def test_token_ids_without_text(start, scripted, tokenizer):
    ids = [*tokenizer.encode("the quick fox").ids, 2]
    async with start(scripted("the quick fox")) as front_end:
        fields = {"max_tokens": 60, "detokenize": False, "return_token_ids": True}
        choice = (await front_end.complete(**fields)).json()["choices"][0]
        assert (choice["text"], choice["token_ids"]) == ("", ids)
        events = await front_end.events(PATH, prompt="hello", **fields)
        assert [id_ for each in events[:-1] for id_ in each["choices"][0]["token_ids"]] == ids
        chat = (await front_end.chat(**fields)).json()["choices"][0]
        assert (chat["message"]["content"], chat["token_ids"]) == ("", ids)


async def test_logprobs_without_text(start, scripted):
    async with start(scripted("the fox")) as front_end:
        fields = {"max_tokens": 60, "detokenize": False, "prompt_logprobs": 0}
        choice = (await front_end.complete(logprobs=1, **fields)).json()["choices"][0]
        logprobs = choice["logprobs"]
        assert logprobs["text_offset"] == []
        assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) > 1
        assert all(name.startswith("token_id:") for name in logprobs["tokens"])
        assert all(name.startswith("token_id:") for top in logprobs["top_logprobs"] for name in top)
        rows = [row for row in choice["prompt_logprobs"] if row is not None]
        assert [entry["decoded_token"] for row in rows for entry in row.values()] == [None] * len(
            rows
        )
        chat = await front_end.chat(logprobs=True, top_logprobs=1, **fields)
        for entry in chat.json()["choices"][0]["logprobs"]["content"]:
            for each in (entry, *entry["top_logprobs"]):
                assert each["token"].startswith("token_id:")
                assert each["bytes"] is None


async def test_token_ids_without_text_are_not_held_back(start):
    async with start(accepts=True) as front_end:
        fields = {"max_tokens": 60, "detokenize": False, "return_token_ids": True}
        events = await front_end.one_by_one([40, 41, 42], **fields)
        assert [each["choices"][0]["token_ids"] for each in events] == [[40], [41], [42]]


@pytest.mark.parametrize("interval", [1, 3, 1000])
async def test_stream_interval(start, scripted, tokenizer, interval):
    """The first token immediately, then every N tokens, then the rest."""
    ids = [*tokenizer.encode("the quick brown fox jumps").ids, 2]
    async with start(scripted("the quick brown fox jumps")) as front_end:
        fields = {"prompt": "hello", "max_tokens": 60, "return_token_ids": True}
        events = await front_end.events(PATH, stream_interval=interval, **fields)
        lengths = [len(each["choices"][0]["token_ids"]) for each in events[:-1]]
        assert sum(lengths) == len(ids)
        assert all(length >= interval for length in lengths[1:-1])
        text = "".join(each["choices"][0]["text"] for each in events[:-1])
        assert text == "the quick brown fox jumps"
        if interval == 1000:
            assert len(lengths) <= 2


async def test_stream_interval_defaults_to_the_flag(start, scripted):
    """A value in the request overrides --stream-interval."""
    config = FrontEndConfig(stream_interval=1000)
    fields = {"max_tokens": 60, "return_token_ids": True}
    async with start(scripted("the quick brown fox jumps"), config=config) as front_end:
        assert len(await front_end.events(PATH, prompt="hello", **fields)) <= 3
        assert (await front_end.complete(**fields)).status_code == 200


async def test_stream_interval_of_the_request(start):
    config = FrontEndConfig(stream_interval=1000)
    fields = {"max_tokens": 60, "return_token_ids": True}
    async with start(accepts=True, config=config) as front_end:
        events = await front_end.one_by_one([40, 41, 42], stream_interval=1, **fields)
        assert [each["choices"][0]["token_ids"] for each in events] == [[40], [41], [42]]


async def test_return_tokens_as_token_ids(start, scripted, tokenizer):
    first = tokenizer.encode("fox").ids[0]
    async with start(scripted("fox")) as front_end:
        fields = {"max_tokens": 60, "return_tokens_as_token_ids": True, "prompt_logprobs": 0}
        choice = (await front_end.complete(logprobs=1, **fields)).json()["choices"][0]
        assert choice["logprobs"]["tokens"][0] == f"token_id:{first}"
        assert f"token_id:{first}" in choice["logprobs"]["top_logprobs"][0]
        prompt = next(iter(choice["prompt_logprobs"][1].values()))
        assert not prompt["decoded_token"].startswith("token_id")
        chat = (await front_end.chat(logprobs=True, top_logprobs=1, **fields)).json()
        entry = chat["choices"][0]["logprobs"]["content"][0]
        assert entry["token"] == f"token_id:{first}"
        assert bytes(entry["bytes"]).decode() == tokenizer.decode([first])


@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_logprob_token_ids(start, endpoint):
    """The engine returns these tokens, whatever the number in `logprobs`."""
    async with start() as front_end:
        wanted = {"logprobs": True} if endpoint == "chat" else {"logprobs": 0}
        answer = asyncio.create_task(
            getattr(front_end, endpoint)(logprob_token_ids=[50, 60], **wanted)
        )
        request = await front_end.engine.requests.get()
        assert request.sampling_params.logprob_token_ids == (50, 60)
        front_end.engine.accept(request)
        rows = pack_logprobs([[(40, -1.0), (50, -2.0), (60, -3.0)]], [1])
        front_end.engine.emit(request, [40], finish=FinishReason.LENGTH, logprobs=rows)
        choice = (await answer).json()["choices"][0]
        if endpoint == "chat":
            best = choice["logprobs"]["content"][0]["top_logprobs"]
            assert [each["logprob"] for each in best] == [-2.0, -3.0]
        else:
            assert sorted(choice["logprobs"]["top_logprobs"][0].values()) == [-3.0, -2.0, -1.0]


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, slice(-3, None)),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, slice(-3, None)),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, slice(0, 3)),
        ({"truncate_prompt_tokens": 255, "max_tokens": 1}, slice(-255, None)),
        ({"truncate_prompt_tokens": -1, "max_tokens": 50}, slice(-206, None)),
        ({"truncate_prompt_tokens": -1}, slice(-240, None)),
    ],
)
async def test_truncate_prompt_tokens(start, scripted, tokenizer, fields, kept):
    """For text and token ids, also far longer than the context."""
    text = "the quick brown fox jumps over the lazy dog. " * 400
    ids = tokenizer.encode(text).ids
    async with start(scripted("!")) as front_end:
        for prompt in (text, ids):
            _, request = await asked(front_end, "complete", prompt=prompt, **fields)
            assert request.prompt_token_ids == ids[kept]
        body, _ = await asked(front_end, "complete", prompt=text, echo=True, **fields)
        assert body["choices"][0]["text"].startswith(tokenizer.decode(ids[kept]))
        body, _ = await asked(front_end, "complete", prompt="the fox", **fields)
        assert body["usage"]["prompt_tokens"] == min(
            len(tokenizer.encode("the fox").ids), len(ids[kept])
        )


async def test_truncate_prompt_tokens_in_a_chat(start, scripted):
    async with start(scripted("!")) as front_end:
        long = [{"role": "user", "content": "the quick brown fox " * 5000}]
        _, request = await asked(front_end, "chat", messages=long, truncate_prompt_tokens=40)
        assert len(request.prompt_token_ids) == 40
        _, request = await asked(
            front_end, "chat", messages=long, truncate_prompt_tokens=-1, max_tokens=56
        )
        assert len(request.prompt_token_ids) == 200


async def test_a_conversation_that_is_truncated_has_a_limit(start, scripted):
    """It is rendered before it is truncated; a text is truncated as it is."""
    text = "🧿" + "a" * MAX_TRUNCATED_CHARACTERS
    async with start(scripted("!")) as front_end:
        answer = await front_end.chat(
            messages=[{"role": "user", "content": text}], truncate_prompt_tokens=40
        )
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "messages")
        assert f"at most {MAX_TRUNCATED_CHARACTERS} characters" in error["message"]
        answer = await front_end.http.post(
            "/v1/responses", json={"input": text, "truncation": "auto", "max_output_tokens": 6}
        )
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")
        answer = await front_end.complete(prompt=text, truncate_prompt_tokens=40)
        assert answer.status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_the_rendered_prompt_is_returned(start, scripted, tokenizer, stream):
    async def shown(path, **fields):
        if stream:
            return (await front_end.events(path, **fields))[0]
        return (await front_end.http.post(path, json=fields)).json()

    async with start(scripted("!")) as front_end:
        ids = tokenizer.encode("lazy dog").ids
        body = await shown(PATH, prompt=ids, return_prompt_text=True)
        assert body["choices"][0]["prompt_text"] == "lazy dog"
        messages = [{"role": "user", "content": "hello"}]
        body = await shown("/v1/chat/completions", messages=messages, return_prompt_text=True)
        assert body["prompt_text"] == ("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")
        assert "prompt_text" not in await shown("/v1/chat/completions", messages=messages)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_unknown_fields_are_reported(start, scripted, caplog, endpoint):
    caplog.set_level("INFO", "tokend.requests")
    async with start(scripted("!")) as front_end:
        fields = {"temprature": 1, "x\r\ny: 1": 2, "z" * 200: None, "repetition_detection": None}
        response = await getattr(front_end, endpoint)(**fields)
        assert response.status_code == 200, response.text
        named = response.headers["x-tokend-ignored"]
        assert named == f"temprature, x??y??1, {'z' * 61}..."
        assert f"ignored_fields={named}" in caplog.text
        many = await getattr(front_end, endpoint)(**{f"f{number}": 1 for number in range(5000)})
        assert many.headers["x-tokend-ignored"].endswith("f15, 4984 more")
        fine = await getattr(front_end, endpoint)(user="ann")
        assert "x-tokend-ignored" not in fine.headers


async def test_unknown_nested_fields_are_reported(start, scripted):
    async with start(scripted("!")) as front_end:
        response = await front_end.chat(
            messages=[
                {"role": "user", "content": [{"type": "text", "text": "hi", "mood": 1}], "hat": 2}
            ],
            stream=True,
            stream_options={"include_usage": True, "speed": 3},
            repetition_detection={"max_pattern_size": 2, "min_count": 3, "why": 1},
        )
        assert response.status_code == 200, response.text
        assert sorted(response.headers["x-tokend-ignored"].split(", ")) == [
            "messages.content.mood",
            "messages.hat",
            "repetition_detection.why",
            "stream_options.speed",
        ]


@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_request_id(start, scripted, endpoint):
    async with start(scripted("!")) as front_end:
        url = PATH if endpoint == "complete" else "/v1/chat/completions"
        messages = [{"role": "user", "content": "hi"}]
        ask = {"prompt": "hi"} if endpoint == "complete" else {"messages": messages}

        async def ids(headers, **fields):
            response = await front_end.http.post(url, json=ask | fields, headers=headers)
            return response.json()["id"].split("-", 1)[1], response.headers

        answer, headers = await ids({"x-request-id": "abc.1:2"})
        assert answer == headers["x-request-id"] == "abc.1:2"
        answer, headers = await ids({"x-request-id": "abc"}, request_id="body")
        assert answer == headers["x-request-id"] == "body"
        answer, headers = await ids({"x-request-id": "Root=1;x"})
        assert len(answer) == 32
        assert headers["x-request-id"].endswith(answer)
        assert headers["x-tokend-ignored"] == "x-request-id"


async def test_concurrent_requests_with_the_same_id(start, tokenizer):
    """The id is only a label; the server distinguishes requests by its own ids."""
    async with start(lambda request, choice: [*request.prompt_token_ids, 2]) as front_end:
        answers = await asyncio.gather(
            *(
                front_end.complete(prompt=text, request_id="same", max_tokens=60)
                for text in ("fox", "lazy dog", "the sea")
            )
        )
        texts = [answer.json()["choices"][0]["text"] for answer in answers]
        assert texts == ["fox", "lazy dog", "the sea"]
        assert {answer.json()["id"] for answer in answers} == {"cmpl-same"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (PATH, {"prompt": "hello"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
        ("/v1/responses", {"input": "hello"}),
        (
            "/v1/messages",
            {"model": "toy", "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]},
        ),
    ],
)
async def test_skipping_the_prefix_cache_reaches_the_engine(start, scripted, path, body):
    async with start(scripted("!")) as front_end:
        for skips in (True, False, None):
            body = body | {"skip_reading_prefix_cache": skips}
            answer = await front_end.http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            request = front_end.engine.requests.get_nowait()
            assert request.skip_reading_prefix_cache is bool(skips)
