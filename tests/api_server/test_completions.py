"""POST /v1/completions over HTTP, against a scripted engine."""


async def test_whole_answer(start, say, tokenizer):
    async with start(say(" world")) as front_end:
        response = await front_end.complete()
        assert response.status_code == 200
        body = response.json()
        choice = body["choices"][0]
        assert choice["text"] == " world"
        assert choice["finish_reason"] == "stop"
        assert choice["stop_reason"] is None
        assert choice["logprobs"] is None
        assert body["object"] == "text_completion"
        assert body["model"] == "toy"
        number = len(tokenizer.encode("hello").ids)
        assert body["usage"]["prompt_tokens"] == number
        assert body["usage"]["completion_tokens"] == len(tokenizer.encode(" world").ids) + 1


async def test_stream_equals_whole(start, say):
    text = "emoji 😀 and 👩‍👩‍👧‍👦 你好 e\u0301 done"
    async with start(say(text)) as front_end:
        whole = (await front_end.complete(max_tokens=200)).json()["choices"][0]
        events = await front_end.events("/v1/completions", prompt="hello", max_tokens=200)
        assert events[-1] == "[DONE]"
        pieces = [event["choices"][0]["text"] for event in events[:-1]]
        assert "".join(pieces) == whole["text"] == text
        assert not any("\ufffd" in piece for piece in pieces)
        reasons = [event["choices"][0]["finish_reason"] for event in events[:-1]]
        assert reasons[-1] == "stop" and set(reasons[:-1]) <= {None}
