"""The order of the messages that the engine sends."""

from types import SimpleNamespace

from engine_core.busy_loop import EngineIO
from engine_core.frontend_io import OutputDispatcher
from engine_core.supervisor_io import SupervisorIO
from proto.messages.engine_io import AdminCall, AdminReply, AgentHint
from proto.messages.lifecycle import Paused
from tests.fakes.clock import FakeClock
from tests.fakes.input_harness import InputProcessorHarness


class FrontEnds:
    """One front end, which sends the given messages once."""

    links = ()
    alive = (0,)

    def __init__(self, asks, log):
        self._asks = asks
        self._log = log

    def receive(self):
        asked, self._asks = self._asks, []
        return [(0, each) for each in asked]

    def send(self, front_end, message):
        self._log.append(message)

    def pop_stalled(self):
        return []


def test_the_supervisor_is_notified_of_a_pause_before_the_reply():
    """The operator may kill the engine after the reply; the next engine must start paused."""
    log = []
    harness = InputProcessorHarness()
    supervisor = SimpleNamespace(send=log.append)
    supervisor_io = SupervisorIO(supervisor, None)
    front_ends = FrontEnds([AdminCall(1, 7, "pause", "freeze")], log)
    scheduler = harness.engine.scheduler
    outputs = OutputDispatcher(front_ends, scheduler, harness.engine.kv_cache, 1)
    harness.input_processor._output_dispatcher = outputs
    poller = SimpleNamespace(wait=lambda timeout: [front_ends])
    assert EngineIO(
        supervisor_io, front_ends, poller, scheduler, harness.input_processor, outputs
    ).receive_messages(0)
    paused, reply, _ = log
    assert paused == Paused("freeze")
    assert reply == AdminReply(1, 7, True)


def test_an_idle_engine_drops_expired_pins_and_reports_it():
    log, clock = [], FakeClock()
    harness = InputProcessorHarness(
        clock=clock, block_size=4, scheduling_policy="continuum", pin_policy="fixed"
    )
    harness.engine.add_one(list(range(20)), 4, agent=AgentHint("a"))
    harness.engine.run()
    scheduler = harness.engine.scheduler
    assert scheduler.pop_stats().num_pinned_blocks == 5
    front_ends = FrontEnds([], log)

    def wait(timeout):
        clock.now += timeout
        return []

    outputs = OutputDispatcher(front_ends, scheduler, harness.engine.kv_cache, 1)
    supervisor_io = SupervisorIO(SimpleNamespace(send=log.append), None)
    poller = SimpleNamespace(wait=wait)
    io = EngineIO(supervisor_io, front_ends, poller, scheduler, harness.input_processor, outputs)
    assert io.receive_messages(1.0) is False
    assert log == []
    assert io.receive_messages() is True
    (told,) = log
    assert (told.stats.num_pinned_blocks, told.stats.num_pins_expired) == (0, 1)
    assert io.receive_messages(5.0) is False
