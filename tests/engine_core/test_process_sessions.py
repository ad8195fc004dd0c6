"""The engine process while it waits for the input of a session, or is idle."""

import subprocess

import pytest

from engine_core.busy_loop import IDLE_SECONDS
from proto.messages.engine_io import (
    AdminCall,
    AdminReply,
    EngineCoreOutputs,
    FinishReason,
    SessionInput,
)
from proto.settings.config import SchedulerConfig
from tests.fakes.engine_process import EPOCH
from tests.fakes.events import num_cached_tokens
from tests.fakes.paged_runner import undisturbed


def test_a_session_goes_on_turn_by_turn(start):
    engine = start()
    engine.start()
    (front_end,) = engine.front_ends
    front_end.send(engine.request(1, [1, 2, 3], 2, resumable=True))
    first = engine.outputs_of(1)
    assert first[-1].goes_on
    tokens = [token for each in first for token in each.new_token_ids]
    assert tokens == undisturbed([1, 2, 3], 2)
    front_end.send(SessionInput(EPOCH, 1, [4, 5]))
    second = engine.outputs_of(1)
    tokens = [token for each in second for token in each.new_token_ids]
    assert tokens == undisturbed([1, 2, 3, *undisturbed([1, 2, 3], 1), 4, 5], 2)
    assert num_cached_tokens(second[0]) == 4
    front_end.send(SessionInput(EPOCH, 1, [], last=True))
    (final,) = engine.expect(front_end, EngineCoreOutputs, lambda each: each.outputs).outputs
    assert (final.finish_reason, final.goes_on) == (FinishReason.LENGTH, False)
    front_end.send(AdminCall(EPOCH, 1, "get_num_unfinished"))
    assert engine.expect(front_end, AdminReply).value == 0
    front_end.send(AdminCall(EPOCH, 2, "reset_prefix_cache"))
    assert engine.expect(front_end, AdminReply).ok
    assert engine.shutdown() == 0


@pytest.mark.parametrize("seconds", [0.1, IDLE_SECONDS + 0.3])
def test_an_idle_session_expires_without_other_events(start, seconds):
    engine = start(scheduler=SchedulerConfig(session_timeout=seconds))
    engine.start()
    (front_end,) = engine.front_ends
    front_end.send(engine.request(1, [1, 2, 3], 1, resumable=True))
    assert engine.outputs_of(1)[-1].goes_on
    (final,) = engine.expect(front_end, EngineCoreOutputs, lambda each: each.outputs).outputs
    assert final.finish_reason is FinishReason.ERROR
    assert "--session-timeout" in final.error.message
    front_end.send(SessionInput(EPOCH, 1, [4, 5]))
    front_end.send(engine.request(2, [4], 1))
    (output,) = engine.outputs_of(2)
    assert output.new_token_ids == undisturbed([4], 1)
    assert engine.shutdown() == 0


def test_idle_costs_nothing(start):
    """A second of waiting, measured in processor time: a spinning loop would use all of it.

    A session at rest is no reason to spin, either, and the loop is the one of an empty engine.
    """
    engine = start(scheduler=SchedulerConfig(max_num_seqs=4))
    engine.start()
    engine.front_ends[0].send(engine.request(1, [1], 1, resumable=True))
    engine.outputs_of(1)
    before = engine.cpu_seconds()
    with pytest.raises(subprocess.TimeoutExpired):
        engine.process.wait(1.2)
    assert engine.cpu_seconds() - before < 0.3
