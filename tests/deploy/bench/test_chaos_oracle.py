"""What counts as the same answer: tokens, their number, ends and usage; and the noise of ties."""

import httpx
import numpy as np
import pytest

from deploy.bench.chaos.streams import CompletionStream, compare_streams, gumbel_noise, score_gap
from worker.sampling import torch_backend as philox

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


def test_the_same_is_the_same() -> None:
    comparison = compare_streams(EXPECTED, stream([1, 2, 3], [4, 5, 6]))
    assert (comparison.num_tokens, comparison.differences, comparison.other_errors) == (6, [], [])


def test_another_token_is_found_once_and_nothing_after_it_is_compared() -> None:
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
def test_what_is_no_question_of_tokens_is_wrong(got: CompletionStream) -> None:
    assert len(compare_streams(EXPECTED, got).other_errors) >= 1


def test_whoever_left_has_a_part_and_no_more() -> None:
    assert compare_streams(EXPECTED, stream([1], []), whole=False).other_errors == []
    assert compare_streams(EXPECTED, stream([1], []), whole=False).num_tokens == 1
    assert compare_streams(EXPECTED, stream([1, 2, 3, 4], []), whole=False).other_errors


@pytest.mark.parametrize("seed", [0, 5, (1 << 64) - 1])
def test_the_noise_is_that_of_the_worker(seed: int) -> None:
    expected = philox.gumbel_noise(seed, 2, 31, 12)
    ours = [gumbel_noise(seed, 2, 31, token_id) for token_id in range(12)]
    np.testing.assert_allclose(ours, expected, rtol=1e-12)


async def test_the_gap_is_between_the_scores_with_their_noise() -> None:
    """Of the two tokens after the same beginning, as the daemon scores them undisturbed."""
    logprobs, asked = {5: -1.0, 9: -1.25}, []

    def answer(request: httpx.Request) -> httpx.Response:
        import json

        prompt = json.loads(request.content)["prompt"]
        asked.append(prompt)
        row = {str(prompt[-1]): {"logprob": logprobs[prompt[-1]]}}
        return httpx.Response(200, json={"choices": [{"prompt_logprobs": [None, {}, row]}]})

    (difference,) = compare_streams(EXPECTED, stream([1, 2, 3], [4, 9, 9])).differences
    transport = httpx.MockTransport(answer)
    async with httpx.AsyncClient(base_url="http://tokend", transport=transport) as client:
        found = await score_gap(client, difference)
    noise = [gumbel_noise(BODY["seed"], 1, 1, token_id) for token_id in (5, 9)]
    assert asked == [[7, 8, 4, 5], [7, 8, 4, 9]]
    assert found == pytest.approx(abs((-2.0 + noise[0]) - (-2.5 + noise[1])))
