"""Characters of several tokens: streams contain only whole ones, also with stop strings."""

import pytest

PATH = "/v1/completions"
TEXT = "naïve 你好世界 😀 and 👩‍👩‍👧‍👦 and 🇩🇪, end"


@pytest.mark.parametrize("stop", ["好", "😀", "好世界 😀", "👩‍👩", "‍👧", "🇩🇪,"])
async def test_a_stop_string_between_multi_token_characters(start, scripted, stop):
    async with start(scripted(TEXT)) as front_end:
        answer = await front_end.complete(stop=stop, max_tokens=200)
        events = await front_end.events(PATH, prompt="hello", stop=stop, max_tokens=200)
    whole = answer.json()["choices"][0]
    pieces = [event["choices"][0]["text"] for event in events[:-1]]
    assert whole["text"] == "".join(pieces) == TEXT.split(stop)[0]
    assert (whole["finish_reason"], whole["stop_reason"]) == ("stop", stop)
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


async def test_every_chunk_has_whole_characters(start, scripted):
    async with start(scripted(TEXT)) as front_end:
        events = await front_end.events(PATH, prompt="hello", max_tokens=200)
    pieces = [event["choices"][0]["text"] for event in events[:-1]]
    assert "".join(pieces) == TEXT
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
