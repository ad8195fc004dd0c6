"""POST /v1/completions over HTTP, against a scripted engine."""

import pytest

PATH = "/v1/completions"


def texts(events: list) -> list[str]:
    return [event["choices"][0]["text"] for event in events[:-1] if event["choices"]]


async def test_non_streaming_response(start, scripted, tokenizer):
    async with start(scripted(" world")) as front_end:
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


async def test_stream_equals_non_streaming_response(start, scripted):
    text = 'emoji 😀 and 👩‍👩‍👧‍👦 你好 e\u0301 \u2028 " \\ done'
    async with start(scripted(text)) as front_end:
        whole = (await front_end.complete(max_tokens=200)).json()["choices"][0]
        events = await front_end.events(PATH, prompt="hello", max_tokens=200)
        assert events[-1] == "[DONE]"
        assert "".join(texts(events)) == whole["text"] == text
        assert not any("\ufffd" in piece for piece in texts(events))
        reasons = [event["choices"][0]["finish_reason"] for event in events[:-1]]
        assert reasons[-1] == "stop"
        assert not any(reasons[:-1])
        assert all("usage" not in event for event in events[:-1])


async def test_the_last_chunk_has_text_and_the_finish_reason(start, scripted):
    async with start(scripted(" world and more")) as front_end:
        events = await front_end.events(PATH, prompt="hello", max_tokens=3)
        assert texts(events)[-1] != ""
        assert events[-2]["choices"][0]["finish_reason"] == "length"


async def test_every_form_of_prompt(start, scripted, tokenizer):
    ids = tokenizer.encode("hello").ids
    async with start(scripted("!")) as front_end:
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


async def test_priority_from_body_or_header(start, scripted):
    header = {"x-vllm-priority": "-3"}
    async with start(scripted("!")) as front_end:
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


async def test_parameters_reach_the_engine(start, scripted):
    async with start(scripted("x"), seed=5) as front_end:
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


async def test_default_max_tokens(start, scripted, tokenizer):
    async with start(scripted("x"), max_model_len=40) as front_end:
        await front_end.complete()
        await front_end.complete(prompt=[40] * 30)
        assert front_end.engine.requests.get_nowait().sampling_params.max_tokens == 16
        assert front_end.engine.requests.get_nowait().sampling_params.max_tokens == 10


async def test_usage_in_streams(start, scripted):
    async with start(scripted(" world")) as front_end:
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


async def test_continuous_usage_needs_include_usage(start, scripted):
    async with start(scripted(" world")) as front_end:
        options = {"include_usage": False, "continuous_usage_stats": True}
        events = await front_end.events(PATH, prompt="hello", stream_options=options)
        assert all(not event.get("usage") for event in events[:-1])


async def test_token_ids(start, scripted, tokenizer):
    ids = [*tokenizer.encode(" world 😀").ids, 2]
    async with start(scripted(" world 😀")) as front_end:
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


async def test_cached_tokens(start, scripted):
    async with start(scripted("!")) as front_end:
        front_end.engine.num_cached_tokens = 2
        usage = (await front_end.complete(n=2)).json()["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 2}


async def test_many_stop_strings(start, scripted):
    """As many and as long as possible; the last one ends the answer."""
    stop = [f"{number:063d}" for number in range(1023)] + [" fox"]
    stop[0] += "x" * (65536 - sum(map(len, stop)))
    async with start(scripted("the quick fox jumps")) as front_end:
        for _ in range(2):
            (choice,) = (await front_end.complete(stop=stop)).json()["choices"]
            assert (choice["text"], choice["stop_reason"]) == ("the quick", " fox")
