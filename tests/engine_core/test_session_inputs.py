"""Input of sessions from front ends, valid and invalid."""

import pytest

from proto.messages.engine_io import FinishReason, SessionInput
from proto.messages.sampling_params import SamplingParams
from tests.fakes.input_harness import InputProcessorHarness
from tests.fakes.messages import request


def give(request_id=1, tokens=(5, 6), params=None, last=False):
    return SessionInput(1, request_id, list(tokens), params, last)


def test_a_session_by_messages():
    harness = InputProcessorHarness()
    harness.receive(request(1, max_tokens=1, resumable=True), front_end=1)
    harness.engine.step()
    assert harness.outputs.outputs == []
    harness.receive(give(tokens=[5]), front_end=1)
    harness.engine.step()
    assert len(harness.engine.outputs[1, 0]) == 2
    harness.receive(give(tokens=[], last=True), front_end=1)
    ((front_end, final),) = harness.outputs.outputs
    assert (front_end, final.request_id, final.finish_reason) == (1, 1, FinishReason.LENGTH)
    assert not final.goes_on
    harness.engine.step()
    harness.engine.assert_idle()


@pytest.mark.parametrize("idle", [True, False])
@pytest.mark.parametrize(
    ("bad", "param", "words"),
    [
        (give(tokens=[]), "prompt", "no tokens"),
        (give(tokens=[1, 1000]), "prompt", "1000"),
        (give(params=SamplingParams(max_tokens=0)), "max_tokens", "0"),
        (
            give(params=SamplingParams(max_tokens=1, prompt_logprobs=1)),
            "prompt_logprobs",
            "session",
        ),
        (give(params=SamplingParams(max_tokens=1, eos_token_ids=(1000,))), "eos_token_ids", "1000"),
        (give(tokens=range(60)), "max_tokens", "64"),
    ],
)
def test_bad_input_ends_only_its_session_with_one_output(bad, param, words, idle):
    harness = InputProcessorHarness()
    harness.receive(request(1, max_tokens=2, resumable=True))
    harness.receive(request(2, max_tokens=9))
    for _ in range(2 if idle else 1):
        harness.engine.step()
    harness.receive(bad)
    ((_, output),) = harness.outputs.outputs
    assert (output.request_id, output.finish_reason) == (1, FinishReason.ERROR)
    assert (output.error.kind, output.error.param) == ("invalid_request", param)
    assert words in output.error.message
    harness.receive(give())
    assert len(harness.outputs.outputs) == 1, "the session has ended"
    harness.engine.run()
    harness.engine.assert_idle()


def test_input_for_unknown_or_foreign_sessions_is_dropped():
    harness = InputProcessorHarness()
    harness.receive(request(1, resumable=True), front_end=1)
    harness.receive(request(2), front_end=1)
    before = harness.engine.scheduler.num_unfinished
    for message, front_end in ((give(1), 0), (give(2), 1), (give(3), 1)):
        harness.receive(message, front_end)
    assert harness.outputs.outputs == []
    assert harness.engine.scheduler.num_unfinished == before
    harness.receive(give(1, [], last=True), front_end=1)
    harness.engine.run()
    assert len(harness.engine.tokens[1, 0]) == 4


@pytest.mark.interpreted
def test_an_unforeseen_error_in_an_input_ends_that_session_only(monkeypatch):
    harness = InputProcessorHarness()
    harness.receive(request(1, resumable=True))
    harness.receive(request(2))
    sessions = harness.engine.scheduler.resumable_sessions
    monkeypatch.setattr(sessions, "add_input", lambda message: 1 // 0)
    harness.receive(give())
    ((_, output),) = harness.outputs.outputs
    assert (output.request_id, output.error.kind) == (1, "internal")
    harness.engine.run()
    harness.engine.assert_idle()


def test_a_session_whose_turn_an_earlier_engine_finished_is_at_rest():
    harness = InputProcessorHarness()
    harness.receive(request(1, resumable=True, output_token_ids=((10, 11, 12, 13),)))
    ((_, output),) = harness.outputs.outputs
    assert (output.finish_reason, output.goes_on) == (FinishReason.LENGTH, True)
    assert harness.outputs.accepted == [(0, 1)]
    assert not harness.engine.scheduler.has_work
    harness.receive(give(tokens=[5]))
    (new,) = harness.engine.step().new_requests
    assert new.prompt_token_ids == [1, 2, 3, 10, 11, 12, 5]
