"""The choices of a completion: order, sampling and end."""

import asyncio

from proto.messages.engine_io import FinishReason

PATH = "/v1/completions"


async def test_choices_are_ordered_by_prompt(start, tokenizer):
    def script(request, choice):
        return [*tokenizer.encode(f"{request.prompt_token_ids[0]}.{choice}").ids, 2]

    async with start(script) as front_end:
        body = (await front_end.complete(prompt=[[40], [41]], n=3)).json()
        expected = [f"{prompt}.{choice}" for prompt in (40, 41) for choice in range(3)]
        assert [choice["text"] for choice in body["choices"]] == expected
        assert [choice["index"] for choice in body["choices"]] == list(range(6))
        assert front_end.engine.requests.qsize() == 2, "n choices are one engine request"
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


async def test_usage_counts_the_prompt_once_and_tokens_of_all_choices(start):
    async with start(lambda request, choice: [40] * (choice + 1)) as front_end:
        fields = {"prompt": [[40, 41, 42], [43, 44]], "n": 3, "max_tokens": 5}
        usage = (await front_end.complete(**fields)).json()["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 2 * (1 + 2 + 3))
        events = await front_end.events(PATH, **fields, stream_options={"include_usage": True})
        assert events[-2]["usage"] == usage


async def test_beams_reach_the_engine(start, scripted):
    async with start(scripted("x")) as front_end:
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


async def test_beams_are_returned_complete_and_in_order(start, tokenizer):
    """The engine sends no output before the search ends, and then whole choices."""
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


async def test_requests_without_a_seed_get_reproducible_seeds(start, scripted):
    drawn = []
    for _ in range(2):
        async with start(scripted("x"), seed=5) as front_end:
            await front_end.complete()
            await front_end.complete()
            drawn.append([front_end.engine.requests.get_nowait().seed for _ in range(2)])
    assert drawn[0] == drawn[1]
    assert drawn[0][0] != drawn[0][1]


async def test_stop_string_aborts_the_choice(start, scripted):
    async with start(scripted("one two three four")) as front_end:
        body = (await front_end.complete(stop=[" thr", "zzz"])).json()
        choice = body["choices"][0]
        assert choice["text"] == "one two"
        assert choice["finish_reason"] == "stop"
        assert choice["stop_reason"] == " thr"
        abort = await front_end.engine.aborts.get()
        assert (abort.reason, abort.choice) == ("stop_string", 0)
        events = await front_end.events(PATH, prompt="hello", stop=" thr")
        assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "one two"


async def test_stop_strings_are_ignored_before_min_tokens(start, tokenizer):
    ids = tokenizer.encode("e e e e").ids
    async with start(lambda request, choice: ids) as front_end:
        body = (await front_end.complete(stop="e", min_tokens=3, max_tokens=len(ids))).json()
        assert body["choices"][0]["text"].count("e") >= 1


async def test_stop_token_and_ignore_eos(start, scripted, tokenizer):
    bang = tokenizer.encode("!").ids[0]
    ids = [*tokenizer.encode("hi").ids, bang, 2, *tokenizer.encode("more").ids]
    async with start(lambda request, choice: ids) as front_end:
        choice = (await front_end.complete(stop_token_ids=[bang])).json()["choices"][0]
        assert (choice["text"], choice["stop_reason"]) == ("hi", bang)
        choice = (await front_end.complete(max_tokens=4, ignore_eos=True)).json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("hi!", "length")


async def test_echo_streams_the_prompt_first(start, scripted):
    async with start(scripted(" world")) as front_end:
        events = await front_end.events(PATH, prompt="hello", echo=True, n=2)
        choices = [event["choices"][0] for event in events[:-1]]
        for index in range(2):
            texts = [choice["text"] for choice in choices if choice["index"] == index]
            assert "".join(texts) == "hello world"
