"""The end of a request, and its finish reason."""

import pytest

from engine_core.scheduler.result import completion
from proto.messages.engine_io import FinishReason
from proto.messages.model_runner_output import ModelRunnerOutput
from proto.messages.sampling_params import RepetitionDetection
from tests.fakes.engine_harness import EOS, EngineHarness


def scripted(tokens):
    """Return a worker that samples these tokens in order."""
    remaining = iter(tokens)
    return lambda _ids, _choice: next(remaining)


def finish(tokens, **params):
    engine = EngineHarness(next_token=scripted(tokens))
    request = engine.add_one([1, 2, 3], **params)
    engine.run()
    engine.assert_idle()
    (final,) = [
        each for each in engine.outputs[request.request_id, 0] if each.finish_reason is not None
    ]
    return engine.tokens_of(request), final.finish_reason, final.stop_reason


def test_stops_at_eos_which_stays_in_the_output():
    assert finish([10, EOS]) == ([10, EOS], FinishReason.STOP, None)


def test_stops_at_a_stop_token_and_names_it():
    assert finish([10, 42], stop_token_ids=(42, 43)) == ([10, 42], FinishReason.STOP, 42)


def test_ignore_eos_continues_past_eos():
    result = finish([10, EOS, 11], ignore_eos=True, max_tokens=3)
    assert result == ([10, EOS, 11], FinishReason.LENGTH, None)


def test_an_ignored_eos_can_still_be_a_stop_token():
    result = finish([10, EOS], ignore_eos=True, stop_token_ids=(EOS,))
    assert result == ([10, EOS], FinishReason.STOP, EOS)


def test_ends_at_max_tokens():
    assert finish([10, 11], max_tokens=2) == ([10, 11], FinishReason.LENGTH, None)


def test_a_stop_token_takes_precedence_over_max_tokens():
    assert finish([10, EOS], max_tokens=2) == ([10, EOS], FinishReason.STOP, None)


@pytest.mark.parametrize("stop", [EOS, 42])
def test_min_tokens_holds_back_every_kind_of_stop(stop):
    tokens = [10, 11, stop, 12, stop, 13]
    kept, reason, _ = finish(tokens, min_tokens=5, stop_token_ids=(42,))
    assert kept == tokens[:5]
    assert reason is FinishReason.STOP


TWICE = RepetitionDetection(max_pattern_size=2, min_count=2)
THRICE = RepetitionDetection(max_pattern_size=4, min_pattern_size=2, min_count=3)


@pytest.mark.parametrize(
    ("tokens", "kept", "params"),
    [
        ([10, 11, 11, 12], 3, {"repetition": TWICE}),
        ([10, 11, 10, 11, 12], 4, {"repetition": TWICE}),
        ([7, 7, 7, 7, 7, 7, 7], 6, {"repetition": THRICE}),
        ([10, 11, 11, 11, 12, 12], 6, {"repetition": TWICE, "min_tokens": 5}),
        ([3, 10, 11], 3, {"repetition": TWICE, "max_tokens": 3}),
    ],
)
def test_ends_when_the_outputs_repeat_themselves(tokens, kept, params):
    """The prompt, which ends with 3, does not count."""
    found, reason, stop_reason = finish(tokens, **params)
    assert found == tokens[:kept]
    length = "max_tokens" in params
    assert reason is (FinishReason.LENGTH if length else FinishReason.REPETITION)
    assert stop_reason is None


def test_stop_tokens_and_max_tokens_take_precedence_over_repetition():
    assert finish([EOS, EOS], repetition=TWICE, min_tokens=2)[1] is FinishReason.STOP
    assert finish([9, 9], repetition=TWICE, max_tokens=2)[1] is FinishReason.LENGTH


def test_a_resumed_request_repeats_what_it_had_before():
    engine = EngineHarness(next_token=scripted([10, 11]))
    request = engine.add_one([1, 2], repetition=TWICE, max_tokens=8, output_token_ids=((5, 10),))
    engine.run()
    assert engine.tokens_of(request)[-1] == 10
    assert engine.finish_reason_of(request) is FinishReason.REPETITION


def test_ends_at_the_usable_length():
    engine = EngineHarness(max_model_len=6, next_token=scripted([7, 8, 9]))
    request = engine.add_one([1, 2, 3], max_tokens=16)
    engine.run()
    assert engine.tokens_of(request) == [7, 8, 9]
    assert engine.finish_reason_of(request) is FinishReason.LENGTH


def test_tokens_after_the_one_that_ends_are_cut_off():
    engine = EngineHarness(next_token=scripted([9]))
    request = engine.add_one([1, 2, 3], stop_token_ids=(42, 43))
    engine.step()
    request.spec_token_ids += [10, 42]
    output = engine.scheduler.schedule()
    result = ModelRunnerOutput(1, output.step, [request.seq_id], [[10, 42, 12]])
    ((final,),) = engine.scheduler.update_from_output(output, result).values()
    assert final.new_token_ids == [10, 42]
    assert (final.finish_reason, final.stop_reason) == (FinishReason.STOP, 42)
    assert request.output_token_ids == [9, 10, 42]


def test_a_prompt_that_ends_with_eos_generates():
    engine = EngineHarness()
    request = engine.add_one([1, EOS])
    assert completion(request, 100) is request.status


def test_a_resumed_request_counts_from_its_first_output():
    engine = EngineHarness(next_token=scripted([10, 11, EOS]))
    request = engine.add_one([1, 2], min_tokens=4, max_tokens=8, output_token_ids=((5, EOS),))
    output = engine.step()
    (new,) = output.new_requests
    assert new.output_token_ids == [5, EOS]
    assert new.num_scheduled_tokens == 4
    engine.run()
    outputs = engine.outputs[request.request_id, 0]
    assert [each.token_index for each in outputs] == [2, 3, 4]
    assert [bool(each.events) for each in outputs] == [True, False, False]
    assert outputs[-1].finish_reason is FinishReason.STOP
