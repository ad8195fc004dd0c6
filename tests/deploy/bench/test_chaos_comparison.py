"""Comparison of answers by tokens, length, finish reason and usage; the sampling noise of ties."""

import httpx
import numpy as np
import pytest

from deploy.bench.chaos.streams import CompletionStream, compare_streams, gumbel_noise, score_gap
from worker.reference import sampling as philox

BODY = {"prompt": "The sea", "temperature": 0.5, "seed": 1 << 40, "n": 2}


def stream(
    *choices: list[int], reason: str = "length", completion_tokens: int = 6
) -> CompletionStream:
    return CompletionStream(
        BODY,
        choices=dict(enumerate(map(list, choices))),
        reasons=dict.fromkeys(range(len(choices)), reason),
        usage={"prompt_tokens": 2, "completion_tokens": completion_tokens},
        prompt_token_ids=[7, 8],
    )


EXPECTED = stream([1, 2, 3], [4, 5, 6])


def test_equal_streams_have_no_differences() -> None:
    comparison = compare_streams(EXPECTED, stream([1, 2, 3], [4, 5, 6]))
    assert (comparison.num_tokens, comparison.differences, comparison.other_errors) == (6, [], [])


def test_comparison_stops_at_the_first_different_token() -> None:
    (difference,) = compare_streams(EXPECTED, stream([1, 2, 3], [4, 9, 9])).differences
    assert (difference.choice, difference.position, difference.token_id) == (1, 1, 9)
    assert compare_streams(EXPECTED, stream([1, 2, 3], [4, 9, 9])).num_tokens == 5


@pytest.mark.parametrize(
    "got",
    [
        stream([1, 2, 3], [4, 5]),
        stream([1, 2, 3], [4, 5, 6, 7]),
        stream([1, 2, 3]),
        stream([1, 2, 3], [4, 5, 6], reason="stop"),
        stream([1, 2, 3], [4, 5, 6], completion_tokens=7),
    ],
    ids=["missing", "too many", "no choice", "reason", "usage"],
)
def test_differences_other_than_tokens_are_errors(got: CompletionStream) -> None:
    assert len(compare_streams(EXPECTED, got).other_errors) >= 1


def test_a_disconnected_stream_is_a_prefix() -> None:
    assert compare_streams(EXPECTED, stream([1], []), whole=False).other_errors == []
    assert compare_streams(EXPECTED, stream([1], []), whole=False).num_tokens == 1
    assert compare_streams(EXPECTED, stream([1, 2, 3, 4], []), whole=False).other_errors


@pytest.mark.parametrize("seed", [0, 5, (1 << 64) - 1])
def test_gumbel_noise_equals_the_workers(seed: int) -> None:
    expected = philox.gumbel_noise(seed, 2, 31, 12)
    ours = [gumbel_noise(seed, 2, 31, token_id) for token_id in range(12)]
    np.testing.assert_allclose(ours, expected, rtol=1e-12)


async def test_the_score_gap_includes_the_sampling_noise() -> None:
    """The gap is between two tokens after the same prefix, scored by an undisturbed daemon."""
    logprobs, prompts = {5: -1.0, 9: -1.25}, []

    def answer(request: httpx.Request) -> httpx.Response:
        import json

        prompt = json.loads(request.content)["prompt"]
        prompts.append(prompt)
        row = {str(prompt[-1]): {"logprob": logprobs[prompt[-1]]}}
        return httpx.Response(200, json={"choices": [{"prompt_logprobs": [None, {}, row]}]})

    (difference,) = compare_streams(EXPECTED, stream([1, 2, 3], [4, 9, 9])).differences
    transport = httpx.MockTransport(answer)
    async with httpx.AsyncClient(base_url="http://tokend", transport=transport) as client:
        found = await score_gap(client, difference)
    noise = [gumbel_noise(BODY["seed"], 1, 1, token_id) for token_id in (5, 9)]
    assert prompts == [[7, 8, 4, 5], [7, 8, 4, 9]]
    assert found == pytest.approx(abs((-2.0 + noise[0]) - (-2.5 + noise[1])))
