"""Request: counters, life cycle, order, choices, hashes."""

from itertools import count

import pytest

from engine_core.block_hashing import BlockHasher, ExtraKeys
from engine_core.request import Request, RequestStatus, choices_of
from proto.messages.engine_io import EngineCoreRequest, FinishReason
from proto.messages.sampling_params import SamplingParams

HASHER = BlockHasher(16, b"model")


def make_request(num_prompt_tokens: int = 59, **fields) -> Request:
    defaults = {
        "seq_id": 1,
        "request_id": 10,
        "prompt_token_ids": list(range(num_prompt_tokens)),
        "sampling_params": SamplingParams(max_tokens=8),
        "hasher": HASHER,
    }
    return Request(**(defaults | fields))


def make_message(**fields) -> EngineCoreRequest:
    defaults = {
        "epoch": 1,
        "request_id": 10,
        "prompt_token_ids": list(range(40)),
        "sampling_params": SamplingParams(max_tokens=8),
        "seed": 5,
        "arrival_time": 2.5,
    }
    return EngineCoreRequest(**(defaults | fields))


def test_a_new_request_waits_with_nothing_computed():
    request = make_request()
    assert request.status is RequestStatus.WAITING
    assert not request.is_finished
    assert (request.num_tokens, request.num_output_tokens, request.num_computed_tokens) == (
        59,
        0,
        0,
    )
    assert request.output_token_ids == []


def test_outputs_drafts_and_prompt_are_counted_apart():
    request = make_request(3)
    request.all_token_ids += [7, 8]
    request.spec_token_ids = [9]
    assert request.num_tokens == 5
    assert request.num_tokens_ahead == 6
    assert request.num_output_tokens == 2
    assert request.output_token_ids == [7, 8]
    assert request.prompt_token_ids == [0, 1, 2]


def test_block_hashes_follow_the_tokens():
    request = make_request(55)
    assert len(request.block_hashes) == 3
    request = make_request(59)
    assert len(request.block_hashes) == 3
    request.all_token_ids += [1, 2, 3, 4, 5]
    expected: list[bytes] = []
    HASHER.extend(expected, request.all_token_ids)
    assert request.block_hashes == expected
    assert len(expected) == 4


def test_the_salt_is_part_of_the_hashes():
    assert make_request().block_hashes[0] != make_request(extra_keys=ExtraKeys("s")).block_hashes[0]


def test_prompt_logprobs_need_every_position_computed():
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    assert make_request(sampling_params=params).skip_reading_prefix_cache
    assert not make_request().skip_reading_prefix_cache


def test_order_is_priority_arrival_request_id_choice():
    ordered = [
        make_request(priority=-1, arrival_time=9.0, request_id=9, choice=9),
        make_request(priority=0, arrival_time=1.0, request_id=8, choice=8),
        make_request(priority=0, arrival_time=2.0, request_id=1, choice=7),
        make_request(priority=0, arrival_time=2.0, request_id=2, choice=0),
        make_request(priority=0, arrival_time=2.0, request_id=2, choice=1),
    ]
    shuffled = [ordered[index] for index in (3, 0, 4, 2, 1)]
    assert sorted(shuffled) == ordered


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (RequestStatus.FINISHED_STOPPED, FinishReason.STOP),
        (RequestStatus.FINISHED_LENGTH, FinishReason.LENGTH),
        (RequestStatus.FINISHED_ABORTED, FinishReason.ABORT),
        (RequestStatus.FINISHED_ERROR, FinishReason.ERROR),
    ],
)
def test_a_finished_status_has_a_finish_reason(status, reason):
    assert status.is_finished
    assert status.finish_reason is reason


@pytest.mark.parametrize(
    "status", [RequestStatus.WAITING, RequestStatus.RUNNING, RequestStatus.PREEMPTED]
)
def test_an_unfinished_status_has_no_finish_reason(status):
    assert not status.is_finished
    with pytest.raises(KeyError):
        _ = status.finish_reason


def test_choices_share_the_prompt_and_differ_in_seq_id_and_choice():
    message = make_message(n=3, priority=4, cache_salt="salt")
    seq_ids = count(100)
    choices = choices_of(message, lambda: next(seq_ids), front_end_index=2, hasher=HASHER)
    assert [(each.seq_id, each.choice) for each in choices] == [(100, 0), (101, 1), (102, 2)]
    for choice in choices:
        assert choice.prompt_token_ids is message.prompt_token_ids
        assert (choice.request_id, choice.front_end_index, choice.seed) == (10, 2, 5)
        assert (choice.priority, choice.arrival_time) == (4, 2.5)
        assert choice.extra_keys.cache_salt == "salt"
        assert choice.block_hashes == choices[0].block_hashes
    choices[0].all_token_ids += range(8)
    assert [len(each.block_hashes) for each in choices] == [3, 2, 2]
    assert message.prompt_token_ids == list(range(40))


def test_choices_take_up_where_an_earlier_engine_left_them():
    message = make_message(n=3, output_token_ids=((7, 8), (), (9,)), finished_choices=(1,))
    seq_ids = count()
    first, third = choices_of(message, lambda: next(seq_ids), 0, HASHER)
    assert (first.choice, first.output_token_ids) == (0, [7, 8])
    assert (third.choice, third.output_token_ids) == (2, [9])
    assert (first.num_prompt_tokens, first.num_computed_tokens) == (40, 0)


def test_stop_ids_and_limits_come_from_the_sampling_parameters():
    params = SamplingParams(max_tokens=5, stop_token_ids=(3,), eos_token_ids=(2,))
    request = make_request(sampling_params=params)
    assert request.max_tokens == 5
    assert request.stop_ids == {2, 3}


def test_input_makes_the_prompt_longer_and_replaces_the_parameters():
    """STR-02, STR-03: max_tokens is that of the turn, not a sum."""
    request = make_request(3, sampling_params=SamplingParams(max_tokens=2))
    before = request.prompt_token_ids
    request.append_input([3, 4, 5], SamplingParams(max_tokens=10, stop_token_ids=(7,)))
    assert request.prompt_token_ids == request.all_token_ids == [0, 1, 2, 3, 4, 5]
    assert (request.num_prompt_tokens, request.num_output_tokens) == (6, 0)
    assert (request.max_tokens, request.stop_ids) == (10, {7})
    assert before == [0, 1, 2]
    request.append_input([6], SamplingParams(max_tokens=4))
    assert request.max_tokens == 4


def test_the_next_turn_keeps_all_outputs_but_the_last():
    """STR-07: a sampled token that was never computed is dropped."""
    request = make_request(3, priority=2, seed=9, front_end_index=1, extra_keys=ExtraKeys("s"))
    request.all_token_ids += [10, 11]
    following = request.next_turn(50)
    following.append_input([4, 5], SamplingParams(max_tokens=3))
    assert following.all_token_ids == [0, 1, 2, 10, 4, 5]
    assert following.output_token_ids == []
    assert following.seq_id == 50
    for name in ("request_id", "choice", "front_end_index", "seed", "order", "extra_keys"):
        assert getattr(following, name) == getattr(request, name)
    assert request.all_token_ids == [0, 1, 2, 10, 11]


def test_the_hashes_of_a_turn_are_those_of_a_request_with_the_same_prompt():
    """The block of the dropped token is hashed with the token that replaced it."""
    request = make_request(30)
    request.all_token_ids += [100, 101]
    assert len(request.block_hashes) == 2
    following = request.next_turn(2)
    following.append_input([7] * 20, SamplingParams(max_tokens=1))
    alone = make_request(prompt_token_ids=[*range(30), 100, *[7] * 20])
    assert following.block_hashes == alone.block_hashes
