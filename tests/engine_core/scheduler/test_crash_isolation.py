"""Requests suspected of crashing processes run alone, and end if they crash again."""

import pytest

from engine_core.request import RequestStatus
from proto.messages.engine_io import FinishReason
from tests.fakes.engine_harness import EngineHarness, scheduled
from tests.fakes.gates import NoFeature
from tests.fakes.paged_runner import undisturbed

BOTH = pytest.mark.parametrize("overlapped", [False, True])


class CrashProgressSink:
    """An engine whose processes crash. reports: reported requests, and whether they run alone."""

    def __init__(self, engine):
        self.reports = []
        engine.report_begun = self.report_begun

    def report_begun(self, request, alone):
        self.reports.append((request, alone))

    @property
    def isolated(self):
        return [request for request, alone in self.reports if alone]


class DeadlyGate(NoFeature):
    """The engine crashes when it schedules this prompt."""

    def __init__(self, prompt):
        self._prompt = prompt

    def is_blocked(self, candidate):
        if candidate.request.prompt_token_ids == self._prompt:
            raise ZeroDivisionError
        return False


def crash(engine):
    """The workers crash in a step with this prompt."""
    sent = engine.send()
    outputs = engine.lose_workers(engine.scheduler.worker_epoch + 1)
    return sent, outputs


@BOTH
def test_three_crashes_without_a_token_make_suspects_that_run_alone(overlapped):
    engine = EngineHarness(async_scheduling=overlapped)
    sink = CrashProgressSink(engine)
    requests = [engine.add_one([each], 3) for each in range(1, 4)]
    for _ in range(3):
        sent, _ = crash(engine)
        assert set(scheduled(sent)) == {each.seq_id for each in requests}
        assert sink.reports == []
    late = engine.add_one([9], 3)
    for suspect in requests:
        output = engine.step()
        assert set(scheduled(output)) == {suspect.seq_id}
        assert sink.isolated[-1] is suspect
        assert late.status in (RequestStatus.WAITING_FOR_ISOLATION, RequestStatus.WAITING)
        while not engine.tokens_of(suspect):
            assert set(scheduled(engine.step())) <= {suspect.seq_id}
    engine.run()
    assert sink.reports == [(each, True) for each in requests]
    for each in [*requests, late]:
        assert engine.tokens_of(each) == undisturbed(each.prompt_token_ids, 3)
        assert each.crash_count == 0 or each is late
    engine.assert_idle()


def test_a_request_that_crashes_alone_is_ended_and_others_continue():
    engine = EngineHarness()
    suspect, *others = [engine.add_one([each], 3) for each in range(1, 4)]
    for _ in range(3):
        crash(engine)
    for _ in range(2):
        assert suspect.status is RequestStatus.PREEMPTED
        sent, outputs = crash(engine)
        assert list(scheduled(sent)) == [suspect.seq_id]
    (output,) = outputs[0]
    assert (output.request_id, output.finish_reason) == (suspect.request_id, FinishReason.ERROR)
    assert "crashed 5 times" in output.error.message
    engine.run()
    for each in others:
        assert engine.tokens_of(each) == undisturbed(each.prompt_token_ids, 3)
    engine.assert_idle()


def test_a_token_between_crashes_resets_the_count():
    engine = EngineHarness()
    sink = CrashProgressSink(engine)
    request = engine.add_one([1], 20)
    for _ in range(6):
        crash(engine)
        crash(engine)
        engine.step()
        assert sink.isolated == []
    engine.run()
    assert engine.tokens_of(request) == undisturbed([1], 20)


@BOTH
def test_a_long_prompt_that_gets_further_each_time_is_no_suspect(overlapped):
    engine = EngineHarness(async_scheduling=overlapped, max_num_batched_tokens=8)
    sink = CrashProgressSink(engine)
    request = engine.add_one(list(range(200)), 3)
    for num_steps in range(2, 20, 3):
        for _ in range(num_steps):
            engine.step()
        crash(engine)
        assert sink.isolated == []
        assert request.crash_count == 1
    engine.run()
    assert engine.tokens_of(request) == undisturbed(list(range(200)), 3)
    engine.assert_idle()


@BOTH
def test_catching_up_ends_where_requests_were_at_the_crash(overlapped):
    """Another request that comes meanwhile does not count."""
    engine = EngineHarness(async_scheduling=overlapped, max_num_batched_tokens=8)
    isolation = engine.scheduler.crash_isolation
    engine.add_one(list(range(200)), 3)
    for _ in range(6):
        engine.step()
    assert not isolation.is_catching_up
    crash(engine)
    num_steps = 0
    while isolation.is_catching_up:
        engine.step()
        num_steps += 1
    assert 7 <= num_steps <= 9, "seven steps were lost"
    engine.add_one(list(range(100)), 3)
    engine.step()
    assert not isolation.is_catching_up
    engine.run()


def test_after_the_crash_of_an_engine_each_request_needs_a_token():
    engine = EngineHarness()
    engine.add_one([1, 2], 3, crash_count=1)
    assert engine.scheduler.crash_isolation.is_catching_up
    engine.step()
    engine.step()
    assert not engine.scheduler.crash_isolation.is_catching_up
    engine.run()


@BOTH
def test_a_suspect_that_recomputes_its_lost_tokens_is_cleared(overlapped):
    engine = EngineHarness(async_scheduling=overlapped, max_num_batched_tokens=8)
    suspect = engine.add_one(list(range(200)), 3)
    for _ in range(3):
        for _ in range(4):
            engine.step()
        crash(engine)
    assert suspect.crash_count == 3
    while suspect.crash_count:
        engine.step()
        assert not engine.tokens_of(suspect)
    assert suspect.num_computed_tokens >= 40, "four steps and the one of the crash"
    engine.run()
    assert engine.tokens_of(suspect) == undisturbed(list(range(200)), 3)


@BOTH
@pytest.mark.parametrize("place", [0, 7, 8, 100, 177, 199])
def test_five_crashes_at_one_position_end_a_request_whatever_its_chunks(overlapped, place):
    """Other requests have another length in every run, so its chunks differ, too."""
    engine = EngineHarness(
        async_scheduling=overlapped, max_num_batched_tokens=16, num_blocks=200, max_model_len=400
    )
    others = [engine.add_one([each], 150, ignore_eos=True) for each in range(5)]
    for _ in range(5):
        engine.step()
    suspect = engine.add_one(list(range(200)), 3)
    chunks = set()
    for _ in range(5):
        assert engine.finish_reason_of(suspect) is None
        while suspect.num_computed_tokens <= place:
            engine.send()
            if suspect.num_computed_tokens <= place:
                engine.receive()
        chunks.add(suspect.num_computed_tokens)
        engine.lose_workers(engine.scheduler.worker_epoch + 1)
    assert engine.finish_reason_of(suspect) is FinishReason.ERROR
    assert len(chunks) > 1 or place not in (100, 177)
    engine.run()
    for each in others:
        assert engine.tokens_of(each) == undisturbed(each.prompt_token_ids, 150)


@BOTH
def test_progress_of_requests_that_saw_a_crash_is_reported(overlapped):
    engine = EngineHarness(async_scheduling=overlapped, max_num_batched_tokens=8)
    request = engine.add_one(list(range(30)), 3, crash_count=1)
    other = engine.add_one([9], 3)
    reports = []
    while not engine.tokens_of(request):
        engine.send()
        ((reported, computed),) = engine.scheduler.crash_isolation.progress() or [(None, 0)]
        if reported is not None:
            assert reported is request
            reports.append((computed, request.num_computed_tokens))
        engine.receive()
    assert [under_way for _, under_way in reports] == sorted(under_way for _, under_way in reports)
    assert all(computed <= under_way - 8 for computed, under_way in reports[:3])
    assert reports[3][0] >= 8
    engine.run()
    assert engine.scheduler.crash_isolation.progress() == []
    assert engine.tokens_of(other) == undisturbed([9], 3)


def test_a_waiting_request_is_no_suspect():
    engine = EngineHarness(max_num_seqs=1)
    suspect, waiting = engine.add_one([1], 3), engine.add_one([2], 3)
    for _ in range(5):
        crash(engine)
    assert engine.finish_reason_of(suspect) is FinishReason.ERROR
    assert waiting.crash_count == 0
    engine.run()
    assert engine.tokens_of(waiting) == undisturbed([2], 3)


def test_a_suspect_of_a_crashed_engine_preempts_running_requests():
    engine = EngineHarness()
    running = [engine.add_one([each], 5) for each in range(1, 3)]
    engine.step()
    suspect = engine.add_one([9], 5, crash_count=3)
    seen = [set(scheduled(engine.step())) for _ in range(4)]
    assert {suspect.seq_id} in seen
    assert seen[-1] == {each.seq_id for each in [*running, suspect]}
    engine.run()
    for each in [*running, suspect]:
        assert engine.tokens_of(each) == undisturbed(each.prompt_token_ids, 5)
    engine.assert_idle()


@pytest.mark.parametrize("which", ["the isolated one", "the waiting one"])
def test_aborting_the_suspect_ends_the_isolation(which):
    engine = EngineHarness()
    suspects = [engine.add_one([each], 5, crash_count=3) for each in range(1, 3)]
    other = engine.add_one([9], 5)
    engine.step()
    leaving = suspects[which != "the isolated one"]
    engine.scheduler.abort_request(leaving.request_id)
    engine.run()
    assert engine.tokens_of(other) == undisturbed([9], 5)
    engine.assert_idle()


@BOTH
def test_choices_of_a_suspect_run_alone_one_by_one(overlapped):
    engine = EngineHarness(async_scheduling=overlapped)
    choices = engine.add(list(range(20)), 4, n=3, crash_count=3)
    engine.run()
    for each in choices:
        assert engine.tokens_of(each) == undisturbed(each.prompt_token_ids, 4, each.choice)
    engine.assert_idle()


def test_a_suspect_with_a_long_prompt_runs_alone_until_its_token():
    engine = EngineHarness(max_num_batched_tokens=8)
    suspect = engine.add_one(list(range(30)), 3, crash_count=3)
    other = engine.add_one([9], 3)
    for _ in range(4):
        assert set(scheduled(engine.step())) == {suspect.seq_id}
    engine.run()
    assert engine.tokens_of(suspect) == undisturbed(list(range(30)), 3)
    assert engine.tokens_of(other) == undisturbed([9], 3)


def test_isolation_is_reported_before_its_step_is_scheduled():
    engine = EngineHarness(gates=[DeadlyGate([1])])
    sink = CrashProgressSink(engine)
    suspect = engine.add_one([1], 3, crash_count=3)
    engine.add_one([2], 3, crash_count=3)
    with pytest.raises(ZeroDivisionError):
        engine.send()
    assert sink.reports == [(suspect, True)]


def test_crash_progress_is_reported_at_admission_not_while_waiting():
    engine = EngineHarness(max_num_seqs=1, gates=[DeadlyGate([3])])
    sink = CrashProgressSink(engine)
    first, second, third = [engine.add_one([each], 3, crash_count=1) for each in range(1, 4)]
    engine.step()
    assert sink.reports == [(first, False)]
    with pytest.raises(ZeroDivisionError):
        engine.run()
    assert sink.reports == [(first, False), (second, False), (third, False)]
    assert third.status is RequestStatus.WAITING


def test_a_request_without_free_blocks_is_reported_once():
    engine = EngineHarness(num_blocks=5, block_size=4, max_model_len=16)
    sink = CrashProgressSink(engine)
    engine.add_one([1] * 12, 4, ignore_eos=True)
    waits = engine.add_one([2] * 12, 4, crash_count=1)
    for _ in range(3):
        engine.step()
        assert waits.status is RequestStatus.WAITING
    assert sink.reports == [(waits, False)]


def test_isolation_is_reported_first_and_other_requests_are_held():
    """A crash of the engine before any report counts for the request it was scheduling."""
    engine = EngineHarness()
    sink = CrashProgressSink(engine)
    first, second = [engine.add_one([each], 3, crash_count=3) for each in (1, 2)]
    late = engine.add_one([9], 3)
    for _ in range(2):
        engine.scheduler.crash_isolation.isolate_suspect()
        assert sink.reports == [(first, True)]
        assert next(iter(engine.scheduler.waiting)) is first
        assert engine.scheduler.waiting.num_ready == 1
        assert {second.status, late.status} == {RequestStatus.WAITING_FOR_ISOLATION}
    engine.step()
    newcomer = engine.add_one([8], 3)
    engine.scheduler.crash_isolation.isolate_suspect()
    assert newcomer.status is RequestStatus.WAITING_FOR_ISOLATION
    assert engine.scheduler.waiting.num_ready == 0
    engine.run()
    assert sink.isolated == [first, second]
    for each in (first, second, late, newcomer):
        assert engine.tokens_of(each) == undisturbed(each.prompt_token_ids, 3)
    engine.assert_idle()


def test_without_suspects_no_request_is_held():
    engine = EngineHarness(max_num_seqs=1)
    requests = [engine.add_one([each], 3, crash_count=2) for each in (1, 2)]
    engine.step()
    engine.scheduler.crash_isolation.isolate_suspect()
    assert [each.status for each in requests] == [RequestStatus.RUNNING, RequestStatus.WAITING]


def test_results_of_the_step_in_flight_are_kept():
    engine = EngineHarness()
    sink = CrashProgressSink(engine)
    running = engine.add_one([1], 5)
    engine.step()
    engine.add_one([9], 5, crash_count=3)
    engine.scheduler.crash_isolation.isolate_suspect()
    assert sink.reports == [], "the request does not run alone yet"
    assert running.status is RequestStatus.RUNNING
    assert engine.scheduler.waiting.num_ready == 1


def test_a_request_held_by_a_pause_does_not_block_isolation():
    engine = EngineHarness()
    sink = CrashProgressSink(engine)
    fresh = engine.add_one([1], 3, crash_count=3)
    begun = engine.add_one([2], 3, crash_count=3, output_token_ids=(tuple(undisturbed([2], 1)),))
    engine.scheduler.pause("finish_running")
    while engine.scheduler.has_work:
        engine.step()
    assert sink.isolated == [begun]
    assert begun.num_output_tokens > 1, "the request has run alone"
    assert fresh.num_output_tokens == 0
    engine.scheduler.resume()
    engine.run()
    assert sink.isolated == [begun, fresh]
    assert engine.tokens_of(fresh) == undisturbed([1], 3)
    assert engine.tokens_of(begun) == undisturbed([2], 3)[1:]


def test_requests_continue_when_a_pause_forbids_the_isolation():
    """The isolated run starts after the pause; the other requests wait for it."""
    engine = EngineHarness()
    sink = CrashProgressSink(engine)
    begun = engine.add_one([2], 6, output_token_ids=(tuple(undisturbed([2], 1)),))
    suspect = engine.add_one([1], 3, crash_count=3)
    engine.scheduler.crash_isolation.isolate_suspect()
    assert begun.status is RequestStatus.WAITING_FOR_ISOLATION
    engine.scheduler.pause("finish_running")
    engine.step()
    assert begun.status is RequestStatus.RUNNING
    assert suspect.num_output_tokens == 0
    engine.scheduler.resume()
    engine.step()
    assert begun.status is RequestStatus.WAITING_FOR_ISOLATION
    assert suspect.num_output_tokens > 0
    engine.run()
    assert sink.isolated[-1] is suspect
    assert engine.tokens_of(suspect) == undisturbed([1], 3)
    assert engine.tokens_of(begun) == undisturbed([2], 6)[1:]
    engine.assert_idle()


def test_a_pause_ends_others_before_a_suspect_that_it_stops():
    engine = EngineHarness()
    begun = engine.add_one([2], 6)
    engine.step()
    suspect = engine.add_one([1], 3, crash_count=3)
    engine.scheduler.pause("finish_running")
    while engine.scheduler.has_work:
        engine.step()
    assert engine.tokens_of(begun) == undisturbed([2], 6)
    assert suspect.num_output_tokens == 0
    engine.scheduler.resume()
    engine.run()
    assert engine.tokens_of(suspect) == undisturbed([1], 3)
    engine.assert_idle()
