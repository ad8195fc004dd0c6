"""Validation of sampling parameters, and the values derived from them."""

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from proto.codec import changed
from proto.errors import InvalidRequestError
from proto.messages.logit_edits import LogitEdits
from proto.messages.sampling_params import (
    DRAW_PARAMETERS,
    MAX_STOP_TOKEN_IDS,
    RepetitionDetection,
    SamplingParams,
)

VOCAB_SIZE = 100


def test_parameters_of_a_draw_have_the_defaults_of_a_request():
    params = SamplingParams(max_tokens=1)
    assert {name: getattr(params, name) for name in DRAW_PARAMETERS} == DRAW_PARAMETERS


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
        ("logprob_token_ids", (5,)),
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


@pytest.mark.parametrize(
    ("param", "edits"),
    [
        ("presence_penalty", {"presence_penalty": 2.1}),
        ("presence_penalty", {"presence_penalty": math.nan}),
        ("frequency_penalty", {"frequency_penalty": -2.1}),
        ("repetition_penalty", {"repetition_penalty": 0.0}),
        ("repetition_penalty", {"repetition_penalty": math.inf}),
        ("logit_bias", {"bias_token_ids": (1,)}),
        ("logit_bias", {"bias_token_ids": (1, 1), "bias_values": (1.0, 2.0)}),
        ("logit_bias", {"bias_token_ids": (100,), "bias_values": (1.0,)}),
        ("logit_bias", {"bias_token_ids": (1,), "bias_values": (-101.0,)}),
        ("logit_bias", {"bias_token_ids": (1,), "bias_values": (math.nan,)}),
        ("bad_words", {"bad_words": ((),)}),
        ("bad_words", {"bad_words": ((1, 100),)}),
        ("bad_words", {"bad_words": ((1,),) * 257}),
        ("bad_words", {"bad_words": ((1,) * 1025,)}),
        ("bad_words", {"bad_words": tuple((each,) for each in range(100))}),
        ("allowed_token_ids", {"allowed_token_ids": ()}),
        ("allowed_token_ids", {"allowed_token_ids": (-1,)}),
        ("allowed_token_ids", {"allowed_token_ids": (5, 6), "bad_words": ((5,), (7, 6))}),
    ],
)
def test_invalid_logits_edits_name_the_parameter(param, edits):
    params = SamplingParams(max_tokens=16, edits=LogitEdits(**edits))
    with pytest.raises(InvalidRequestError) as caught:
        params.validate(VOCAB_SIZE)
    assert caught.value.param == param
    assert param in caught.value.message


def test_logits_edits_at_their_limits_are_valid():
    edits = LogitEdits(
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        repetition_penalty=0.01,
        bias_token_ids=(0, 99),
        bias_values=(-100.0, 100.0),
        bad_words=((1,) * 1024,),
        allowed_token_ids=(2, 3),
    )
    params = SamplingParams(max_tokens=16, edits=edits, eos_token_ids=(2,), min_tokens=1)
    params.validate(VOCAB_SIZE)


def test_min_tokens_with_only_stop_tokens_allowed_is_refused():
    edits = LogitEdits(allowed_token_ids=(2, 3))
    params = SamplingParams(
        max_tokens=9, edits=edits, eos_token_ids=(2,), stop_token_ids=(3,), min_tokens=1
    )
    with pytest.raises(InvalidRequestError) as caught:
        params.validate(VOCAB_SIZE)
    assert caught.value.param == "allowed_token_ids"
    changed(params, min_tokens=0).validate(VOCAB_SIZE)


def repeats(tokens: list[int], most: int, least: int, count: int) -> bool:
    """Return whether the tokens end with a repeated pattern, by trying all sizes."""
    return any(
        len(tokens) >= size * count and tokens[-size:] * count == tokens[-size * count :]
        for size in range(least, most + 1)
    )


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=40),
    st.integers(1, 8),
    st.integers(1, 8),
    st.integers(2, 5),
)
def test_repetition_detection_agrees_with_brute_force(tokens, most, least, count):
    assume(least <= most)
    rule = RepetitionDetection(max_pattern_size=most, min_pattern_size=least, min_count=count)
    rule.validate()
    assert rule.is_found(tokens) == repeats(tokens, most, least, count)


@pytest.mark.parametrize(
    "values",
    [
        {"max_pattern_size": 0, "min_count": 2},
        {"max_pattern_size": 257, "min_count": 2},
        {"max_pattern_size": 4, "min_pattern_size": 5, "min_count": 2},
        {"max_pattern_size": 4, "min_pattern_size": 0, "min_count": 2},
        {"max_pattern_size": 4, "min_count": 1},
        {"max_pattern_size": 256, "min_count": 17},
    ],
)
def test_invalid_repetition_settings_are_refused(values):
    params = SamplingParams(max_tokens=9, repetition=RepetitionDetection(**values))
    with pytest.raises(InvalidRequestError) as caught:
        params.validate(VOCAB_SIZE)
    assert caught.value.param == "repetition_detection"


def test_stop_ids_join_stop_tokens_and_eos():
    params = SamplingParams(max_tokens=1, stop_token_ids=(5, 6), eos_token_ids=(2, 5))
    assert params.stop_ids == {2, 5, 6}
    ignoring = SamplingParams(
        max_tokens=1, stop_token_ids=(5, 6), eos_token_ids=(2, 5), ignore_eos=True
    )
    assert ignoring.stop_ids == {5, 6}


@pytest.mark.parametrize(("temperature", "greedy"), [(0.0, True), (1e-6, True), (1e-4, False)])
def test_near_zero_temperature_is_greedy(temperature, greedy):
    assert SamplingParams(max_tokens=1, temperature=temperature).greedy is greedy


@pytest.mark.parametrize("width", [-1, 99])
def test_beam_width_outside_the_vocabulary_is_refused(width):
    params = SamplingParams(max_tokens=1, beam_width=width, eos_token_ids=(2, 3))
    with pytest.raises(InvalidRequestError) as caught:
        params.validate(VOCAB_SIZE)
    assert caught.value.param == "n"


def test_a_beam_row_reports_enough_candidates_to_end_and_to_continue():
    assert SamplingParams(max_tokens=1).num_candidates == 0
    params = SamplingParams(max_tokens=1, beam_width=4, eos_token_ids=(2, 3), stop_token_ids=(2,))
    assert params.num_candidates == 6
