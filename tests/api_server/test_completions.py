"""POST /v1/completions over HTTP, against a scripted engine."""

import asyncio

import pytest

from proto.engine_io import FinishReason
from tests.fakes.fake_engine import pack_logprobs

PATH = "/v1/completions"


def texts(events: list) -> list[str]:
    return [event["choices"][0]["text"] for event in events[:-1] if event["choices"]]


async def test_whole_answer(start, say, tokenizer):
    async with start(say(" world")) as front_end:
        response = await front_end.complete(request_id="mine-1")
        assert response.status_code == 200
        body = response.json()
        choice = body["choices"][0]
        assert choice["text"] == " world"
        assert choice["finish_reason"] == "stop"
        assert choice["stop_reason"] is None
        assert choice["logprobs"] is None
        assert body["id"] == "cmpl-mine-1"
        assert body["object"] == "text_completion"
        assert body["model"] == "toy"
        number, output = len(tokenizer.encode("hello").ids), len(tokenizer.encode(" world").ids) + 1
        assert body["usage"] == {
            "prompt_tokens": number,
            "completion_tokens": output,
            "total_tokens": number + output,
            "prompt_tokens_details": {"cached_tokens": 0},
        }


async def test_stream_equals_whole(start, say):
    text = 'emoji 😀 and 👩‍👩‍👧‍👦 你好 e\u0301 \u2028 " \\ done'
    async with start(say(text)) as front_end:
        whole = (await front_end.complete(max_tokens=200)).json()["choices"][0]
        events = await front_end.events(PATH, prompt="hello", max_tokens=200)
        assert events[-1] == "[DONE]"
        assert "".join(texts(events)) == whole["text"] == text
        assert not any("\ufffd" in piece for piece in texts(events))
        reasons = [event["choices"][0]["finish_reason"] for event in events[:-1]]
        assert reasons[-1] == "stop"
        assert set(reasons[:-1]) == {None}
        assert all("usage" not in event for event in events[:-1])


async def test_the_last_chunk_has_text_and_the_reason(start, say):
    async with start(say(" world and more")) as front_end:
        events = await front_end.events(PATH, prompt="hello", max_tokens=3)
        assert texts(events)[-1] != ""
        assert events[-2]["choices"][0]["finish_reason"] == "length"


async def test_every_form_of_prompt(start, say, tokenizer):
    ids = tokenizer.encode("hello").ids
    async with start(say("!")) as front_end:
        for prompt, number in (
            ("hello", 1),
            (["hello", "hello"], 2),
            (ids, 1),
            ([ids, ids, ids], 3),
        ):
            body = (await front_end.complete(prompt=prompt)).json()
            assert [choice["index"] for choice in body["choices"]] == list(range(number))
            assert body["usage"]["prompt_tokens"] == number * len(ids)
            for _ in range(number):
                assert front_end.engine.requests.get_nowait().prompt_token_ids == ids


async def test_a_priority_comes_from_the_body_or_from_the_header(start, say):
    header = {"x-vllm-priority": "-3"}
    async with start(say("!")) as front_end:
        for fields, headers, expected in (
            ({}, {}, 0),
            ({"priority": 7}, {}, 7),
            ({"priority": -(1 << 63)}, {}, -(1 << 63)),
            ({}, header, -3),
            ({"priority": None}, header, -3),
            ({"priority": 7}, header, 7),
        ):
            for path, body in (
                (PATH, {"prompt": "hello"}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
            ):
                response = await front_end.http.post(path, json=body | fields, headers=headers)
                assert response.status_code == 200, response.text
                assert front_end.engine.requests.get_nowait().priority == expected


@pytest.mark.parametrize("text", ["", "high", "1.5", "9" * 20, str(1 << 63)])
async def test_a_priority_in_the_header_must_be_a_whole_number(start, text):
    async with start() as front_end:
        response = await front_end.http.post(
            PATH, json={"prompt": "hello"}, headers={"x-vllm-priority": text}
        )
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "priority"


async def test_choices_are_ordered_by_prompt(start, tokenizer):
    def script(request, choice):
        return [*tokenizer.encode(f"{request.prompt_token_ids[0]}.{choice}").ids, 2]

    async with start(script) as front_end:
        body = (await front_end.complete(prompt=[[40], [41]], n=3)).json()
        expected = [f"{prompt}.{choice}" for prompt in (40, 41) for choice in range(3)]
        assert [choice["text"] for choice in body["choices"]] == expected
        assert [choice["index"] for choice in body["choices"]] == list(range(6))
        assert front_end.engine.requests.qsize() == 2, "n choices are one message"
        events = await front_end.events(PATH, prompt=[[40], [41]], n=3)
        streamed = [""] * 6
        ends = []
        for event in events[:-1]:
            (choice,) = event["choices"]
            streamed[choice["index"]] += choice["text"]
            if choice["finish_reason"]:
                ends.append(choice["index"])
        assert streamed == expected
        assert sorted(ends) == list(range(6))


async def test_parameters_reach_the_engine(start, say):
    async with start(say("x"), seed=5) as front_end:
        await front_end.complete(
            max_tokens=9,
            min_tokens=2,
            temperature=0.5,
            top_p=0.9,
            top_k=-1,
            min_p=0.1,
            stop_token_ids=[7, 8],
            ignore_eos=True,
            seed=-1,
            n=2,
        )
        request = front_end.engine.requests.get_nowait()
        params = request.sampling_params
        assert (params.max_tokens, params.min_tokens, params.temperature) == (9, 2, 0.5)
        assert (params.top_p, params.top_k, params.min_p) == (0.9, 0, 0.1)
        assert params.stop_token_ids == (7, 8)
        assert params.eos_token_ids == (2,)
        assert params.ignore_eos
        assert request.seed == (1 << 64) - 1
        assert request.n == 2


async def test_beams_reach_the_engine(start, say):
    async with start(say("x")) as front_end:
        for fields in ({}, {"temperature": 0, "top_k": -1, "length_penalty": 2}):
            response = await front_end.complete(
                n=3, use_beam_search=True, early_stopping="never", **fields
            )
            assert len(response.json()["choices"]) == 3
            request = front_end.engine.requests.get_nowait()
            params = request.sampling_params
            assert (request.n, params.beam_width, params.early_stopping) == (3, 3, "never")
            assert params.length_penalty == fields.get("length_penalty", 1.0)
            assert params.greedy
        await front_end.complete(n=3)
        assert front_end.engine.requests.get_nowait().sampling_params.beam_width == 0


async def test_beams_come_whole_and_in_order(start, tokenizer):
    """The engine says nothing before the search is over, and then all of each choice at once."""
    async with start() as front_end:
        pending = asyncio.create_task(front_end.complete(n=2, use_beam_search=True, echo=True))
        request = await front_end.engine.requests.get()
        front_end.engine.accept(request)
        for choice, text in enumerate(("one", "another")):
            token_ids = [*tokenizer.encode(text).ids, 2]
            front_end.engine.emit(request, token_ids, choice=choice, finish=FinishReason.STOP)
        choices = (await pending).json()["choices"]
        assert [each["text"].removeprefix("hello") for each in choices] == ["one", "another"]
        assert [each["index"] for each in choices] == [0, 1]


async def test_seeds_are_drawn_repeatably(start, say):
    drawn = []
    for _ in range(2):
        async with start(say("x"), seed=5) as front_end:
            await front_end.complete()
            await front_end.complete()
            drawn.append([front_end.engine.requests.get_nowait().seed for _ in range(2)])
    assert drawn[0] == drawn[1]
    assert drawn[0][0] != drawn[0][1]


async def test_default_max_tokens(start, say, tokenizer):
    async with start(say("x"), max_model_len=40) as front_end:
        await front_end.complete()
        await front_end.complete(prompt=[40] * 30)
        assert front_end.engine.requests.get_nowait().sampling_params.max_tokens == 16
        assert front_end.engine.requests.get_nowait().sampling_params.max_tokens == 10


async def test_stop_string_aborts_the_choice(start, say):
    async with start(say("one two three four")) as front_end:
        body = (await front_end.complete(stop=[" thr", "zzz"])).json()
        choice = body["choices"][0]
        assert choice["text"] == "one two"
        assert choice["finish_reason"] == "stop"
        assert choice["stop_reason"] == " thr"
        abort = await front_end.engine.aborts.get()
        assert (abort.reason, abort.choice) == ("stop_string", 0)
        events = await front_end.events(PATH, prompt="hello", stop=" thr")
        assert "".join(texts(events)) == "one two"


async def test_stop_strings_do_not_count_before_min_tokens(start, tokenizer):
    ids = tokenizer.encode("e e e e").ids
    async with start(lambda request, choice: ids) as front_end:
        body = (await front_end.complete(stop="e", min_tokens=3, max_tokens=len(ids))).json()
        assert body["choices"][0]["text"].count("e") >= 1


async def test_stop_token_and_ignored_end(start, say, tokenizer):
    bang = tokenizer.encode("!").ids[0]
    ids = [*tokenizer.encode("hi").ids, bang, 2, *tokenizer.encode("more").ids]
    async with start(lambda request, choice: ids) as front_end:
        choice = (await front_end.complete(stop_token_ids=[bang])).json()["choices"][0]
        assert (choice["text"], choice["stop_reason"]) == ("hi", bang)
        choice = (await front_end.complete(max_tokens=4, ignore_eos=True)).json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("hi!", "length")


async def test_usage_in_streams(start, say):
    async with start(say(" world")) as front_end:
        options = {"include_usage": True}
        events = await front_end.events(PATH, prompt="hello", stream_options=options)
        assert events[-2]["choices"] == []
        whole = (await front_end.complete()).json()
        assert events[-2]["usage"] == whole["usage"]
        assert all(not event.get("usage") for event in events[:-2])
        options["continuous_usage_stats"] = True
        events = await front_end.events(PATH, prompt="hello", stream_options=options)
        counts = [event["usage"]["completion_tokens"] for event in events[:-1]]
        assert counts[-1] == whole["usage"]["completion_tokens"]
        assert counts[:-1] == sorted(set(counts[:-1]))


async def test_continuous_usage_alone_shows_nothing(start, say):
    async with start(say(" world")) as front_end:
        options = {"include_usage": False, "continuous_usage_stats": True}
        events = await front_end.events(PATH, prompt="hello", stream_options=options)
        assert all(not event.get("usage") for event in events[:-1])


@pytest.mark.parametrize("number", [0, 1, 5])
async def test_logprobs(start, say, tokenizer, number):
    async with start(say(" world 😀")) as front_end:
        choice = (await front_end.complete(logprobs=number, max_tokens=60)).json()["choices"][0]
        logprobs = choice["logprobs"]
        ids = [*tokenizer.encode(" world 😀").ids, 2]
        assert len(logprobs["tokens"]) == len(ids)
        assert logprobs["tokens"][0] == tokenizer.decode(ids[:1])
        assert logprobs["token_logprobs"] == [-0.5] * len(ids)
        assert all(1 <= len(best) <= number + 1 for best in logprobs["top_logprobs"])
        assert logprobs["text_offset"][0] == 0
        assert logprobs["text_offset"][-1] == len(" world 😀")
        assert front_end.engine.requests.get_nowait().sampling_params.logprobs == number
        events = await front_end.events(PATH, prompt="hello", logprobs=number, max_tokens=60)
        for key in logprobs:
            streamed = [
                value for event in events[:-1] for value in event["choices"][0]["logprobs"][key]
            ]
            assert streamed == logprobs[key]


async def test_logprobs_of_minus_infinity(start):
    async with start() as front_end:
        answer = asyncio.create_task(front_end.complete(logprobs=1))
        request = await front_end.engine.requests.get()
        front_end.engine.accept(request)
        front_end.engine.emit(
            request,
            [40],
            finish=FinishReason.LENGTH,
            logprobs=pack_logprobs([[(40, float("-inf")), (41, float("nan"))]], [3]),
        )
        logprobs = (await answer).json()["choices"][0]["logprobs"]
        assert logprobs["token_logprobs"] == [-9999.0]


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
async def test_echo_with_logprobs(start, say, tokenizer, max_tokens, stream):
    """As lm-eval asks: batched token ids, echo, one alternative, one token or none."""
    prompts = [tokenizer.encode(text).ids for text in ("hello fox", "lazy dog!")]
    async with start(say(" world")) as front_end:
        fields = {"prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": max_tokens}
        if stream:
            events = await front_end.events(PATH, **fields)
            choices = sorted(
                (event["choices"][0] for event in events[:-1]), key=lambda each: each["index"]
            )
        else:
            body = (await front_end.complete(**fields)).json()
            choices = body["choices"]
            assert body["usage"]["completion_tokens"] == max_tokens * 2
        first = tokenizer.decode(tokenizer.encode(" world").ids[:1])
        for choice, ids, text in zip(choices, prompts, ("hello fox", "lazy dog!"), strict=True):
            logprobs = choice["logprobs"]
            assert choice["text"] == text + first * max_tokens
            assert choice["finish_reason"] == "length"
            assert len(logprobs["tokens"]) == len(ids) + max_tokens
            assert "".join(logprobs["tokens"]) == choice["text"]
            assert logprobs["token_logprobs"][0] is None
            assert logprobs["top_logprobs"][0] is None
            assert logprobs["token_logprobs"][1:] == [-0.5] * (len(ids) - 1 + max_tokens)
            starts = [
                len("".join(logprobs["tokens"][:at])) for at in range(len(logprobs["tokens"]))
            ]
            assert logprobs["text_offset"] == starts
        assert front_end.engine.requests.get_nowait().sampling_params.prompt_logprobs == 1


async def test_echo_streams_the_prompt_first(start, say):
    async with start(say(" world")) as front_end:
        events = await front_end.events(PATH, prompt="hello", echo=True, n=2)
        choices = [event["choices"][0] for event in events[:-1]]
        for index in range(2):
            texts = [choice["text"] for choice in choices if choice["index"] == index]
            assert "".join(texts) == "hello world"


async def test_prompt_logprobs(start, say, tokenizer):
    async with start(say("!")) as front_end:
        fields = {"prompt": [40, 41, 42], "prompt_logprobs": 1, "echo": True, "logprobs": 2}
        choice = (await front_end.complete(**fields)).json()["choices"][0]
        rows = choice["prompt_logprobs"]
        text = tokenizer.decode([41])
        assert rows == [
            None,
            {"41": {"logprob": -0.5, "rank": 1, "decoded_token": text}},
            {"42": {"logprob": -0.5, "rank": 1, "decoded_token": tokenizer.decode([42])}},
        ]
        assert len(choice["logprobs"]["top_logprobs"][1]) == 2
        for others in ({}, {"echo": True, "logprobs": 1}):
            choice = (await front_end.complete(prompt=[40], **others)).json()["choices"][0]
            assert choice["prompt_logprobs"] is None


async def test_token_ids(start, say, tokenizer):
    ids = [*tokenizer.encode(" world 😀").ids, 2]
    async with start(say(" world 😀")) as front_end:
        choice = (
            await front_end.complete(prompt=[40, 41], return_token_ids=True, max_tokens=60)
        ).json()["choices"][0]
        assert choice["prompt_token_ids"] == [40, 41]
        assert choice["token_ids"] == ids
        events = await front_end.events(PATH, prompt=[40, 41], return_token_ids=True, max_tokens=60)
        choices = [event["choices"][0] for event in events[:-1]]
        assert choices[0]["prompt_token_ids"] == [40, 41]
        assert not any(choice["prompt_token_ids"] for choice in choices[1:])
        assert [token for choice in choices for token in choice["token_ids"]] == ids
        assert "token_ids" not in (await front_end.complete()).json()["choices"][0]


async def test_cached_tokens(start, say):
    async with start(say("!")) as front_end:
        front_end.engine.num_cached_tokens = 2
        usage = (await front_end.complete(n=2)).json()["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 2}
