"""Sampling parameters check themselves."""

import math

import pytest

from proto.errors import InvalidRequestError
from proto.sampling_params import MAX_STOP_TOKEN_IDS, SamplingParams

VOCAB_SIZE = 100


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 1e4},
        {"top_p": 1.0, "top_k": 0, "min_p": 0.0},
        {"top_p": 1e-6, "top_k": 10**9, "min_p": 1.0},
        {"min_tokens": 16},
        {"stop_token_ids": (0, 99)},
        {"logprobs": 0, "prompt_logprobs": 20},
        {"beam_width": 98, "stop_token_ids": (1, 2), "length_penalty": -5.0},
    ],
)
def test_valid(values):
    SamplingParams(max_tokens=16, **values).validate(VOCAB_SIZE)


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", -0.1),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", math.nan),
        ("stop_token_ids", (100,)),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", (1,) * (MAX_STOP_TOKEN_IDS + 1)),
        ("length_penalty", 5.5),
        ("length_penalty", math.nan),
        ("logprobs", -1),
        ("logprobs", 21),
        ("prompt_logprobs", 21),
    ],
)
def test_invalid_names_the_parameter(param, value):
    params = SamplingParams(**{"max_tokens": 16, param: value})
    with pytest.raises(InvalidRequestError) as caught:
        params.validate(VOCAB_SIZE)
    assert caught.value.param == param
    assert param in caught.value.message


def test_stop_ids_join_stop_tokens_and_eos():
    params = SamplingParams(max_tokens=1, stop_token_ids=(5, 6), eos_token_ids=(2, 5))
    assert params.stop_ids == {2, 5, 6}
    ignoring = SamplingParams(
        max_tokens=1, stop_token_ids=(5, 6), eos_token_ids=(2, 5), ignore_eos=True
    )
    assert ignoring.stop_ids == {5, 6}


@pytest.mark.parametrize(("temperature", "greedy"), [(0.0, True), (1e-6, True), (1e-4, False)])
def test_greedy(temperature, greedy):
    assert SamplingParams(max_tokens=1, temperature=temperature).greedy is greedy


@pytest.mark.parametrize("width", [-1, 99])
def test_more_beams_than_tokens_are_too_many(width):
    params = SamplingParams(max_tokens=1, beam_width=width, eos_token_ids=(2, 3))
    with pytest.raises(InvalidRequestError) as caught:
        params.validate(VOCAB_SIZE)
    assert caught.value.param == "n"


def test_a_beam_row_tells_of_as_many_tokens_as_may_end_and_still_go_on():
    assert SamplingParams(max_tokens=1).num_candidates == 0
    params = SamplingParams(max_tokens=1, beam_width=4, eos_token_ids=(2, 3), stop_token_ids=(2,))
    assert params.num_candidates == 6
