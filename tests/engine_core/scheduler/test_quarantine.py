"""Who may be what processes die of is computed alone, and ended if it is."""

import pytest

from engine_core.request import RequestStatus
from proto.engine_io import FinishReason
from tests.fakes.engine_harness import EngineHarness, scheduled
from tests.fakes.paged_runner import undisturbed

BOTH = pytest.mark.parametrize("overlapped", [False, True])


def crash(engine):
    """The workers die over the step that is sent."""
    sent = engine.send()
    outputs = engine.lose_workers(engine.scheduler.worker_epoch + 1)
    return sent, outputs


@BOTH
def test_three_crashes_without_a_token_make_suspects_who_are_tried_one_by_one(overlapped):
    engine = EngineHarness(async_scheduling=overlapped)
    requests = [engine.add_one([each], 3) for each in range(1, 4)]
    for _ in range(3):
        sent, _ = crash(engine)
        assert set(scheduled(sent)) == {each.handle for each in requests}
        assert engine.scheduler.take_trials() == []
    late = engine.add_one([9], 3)
    for suspect in requests:
        output = engine.step()
        assert set(scheduled(output)) == {suspect.handle}
        assert engine.scheduler.take_trials() == [suspect]
        assert late.status in (RequestStatus.WAITING_FOR_TRIAL, RequestStatus.WAITING)
        while not engine.tokens_of(suspect):
            assert set(scheduled(engine.step())) <= {suspect.handle}
    engine.run()
    for each in [*requests, late]:
        assert engine.tokens_of(each) == undisturbed(each.prompt_token_ids, 3)
        assert each.crash_count == 0 or each is late
    engine.assert_at_rest()


def test_the_one_that_crashes_alone_is_ended_and_the_others_go_on():
    engine = EngineHarness()
    poison, *others = [engine.add_one([each], 3) for each in range(1, 4)]
    for _ in range(3):
        crash(engine)
    for _ in range(2):
        assert poison.status is RequestStatus.PREEMPTED
        sent, outputs = crash(engine)
        assert list(scheduled(sent)) == [poison.handle]
    (output,) = outputs[0]
    assert (output.request_id, output.finish_reason) == (poison.request_id, FinishReason.ERROR)
    assert "crashed 5 times" in output.error.message
    engine.run()
    for each in others:
        assert engine.tokens_of(each) == undisturbed(each.prompt_token_ids, 3)
    engine.assert_at_rest()


def test_a_token_in_between_starts_the_count_anew():
    engine = EngineHarness()
    request = engine.add_one([1], 20)
    for _ in range(6):
        crash(engine)
        crash(engine)
        engine.step()
        assert engine.scheduler.take_trials() == []
    engine.run()
    assert engine.tokens_of(request) == undisturbed([1], 20)


def test_who_only_waited_is_no_suspect():
    engine = EngineHarness(max_num_seqs=1)
    poison, waiting = engine.add_one([1], 3), engine.add_one([2], 3)
    for _ in range(5):
        crash(engine)
    assert engine.reason_of(poison) is FinishReason.ERROR
    assert waiting.crash_count == 0
    engine.run()
    assert engine.tokens_of(waiting) == undisturbed([2], 3)


def test_a_suspect_that_comes_from_a_dead_engine_sends_those_who_run_back_to_wait():
    engine = EngineHarness()
    running = [engine.add_one([each], 5) for each in range(1, 3)]
    engine.step()
    suspect = engine.add_one([9], 5, crash_count=3)
    seen = [set(scheduled(engine.step())) for _ in range(4)]
    assert {suspect.handle} in seen
    assert seen[-1] == {each.handle for each in [*running, suspect]}
    engine.run()
    for each in [*running, suspect]:
        assert engine.tokens_of(each) == undisturbed(each.prompt_token_ids, 5)
    engine.assert_at_rest()


@pytest.mark.parametrize("which", ["the one on trial", "one that is held"])
def test_an_abort_ends_the_wait(which):
    engine = EngineHarness()
    suspects = [engine.add_one([each], 5, crash_count=3) for each in range(1, 3)]
    other = engine.add_one([9], 5)
    engine.step()
    leaving = suspects[which != "the one on trial"]
    engine.scheduler.abort(leaving.request_id)
    engine.run()
    assert engine.tokens_of(other) == undisturbed([9], 5)
    engine.assert_at_rest()


@BOTH
def test_choices_are_tried_one_by_one_and_end_the_same(overlapped):
    engine = EngineHarness(async_scheduling=overlapped)
    choices = engine.add(list(range(20)), 4, n=3, crash_count=3)
    engine.run()
    for each in choices:
        assert engine.tokens_of(each) == undisturbed(each.prompt_token_ids, 4, each.choice)
    engine.assert_at_rest()


def test_a_suspect_with_a_long_prompt_keeps_its_trial_until_its_token():
    engine = EngineHarness(max_num_batched_tokens=8)
    suspect = engine.add_one(list(range(30)), 3, crash_count=3)
    other = engine.add_one([9], 3)
    for _ in range(4):
        assert set(scheduled(engine.step())) == {suspect.handle}
    engine.run()
    assert engine.tokens_of(suspect) == undisturbed(list(range(30)), 3)
    assert engine.tokens_of(other) == undisturbed([9], 3)
