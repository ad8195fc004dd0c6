"""In what order the engine says things."""

from types import SimpleNamespace

from engine_core.busy_loop import EngineIO
from engine_core.frontend_io import OutputDispatcher
from proto.engine_io import AdminCall, AdminReply, AgentHint
from proto.lifecycle import Paused
from tests.fakes.clock import FakeClock
from tests.fakes.intake_desk import Desk


class FrontEnds:
    """One, which asks for what it is given to ask for, once."""

    links = ()
    alive = (0,)

    def __init__(self, asks, log):
        self._asks = asks
        self._log = log

    def receive(self):
        asked, self._asks = self._asks, []
        return [(0, each) for each in asked]

    def send(self, client, message):
        self._log.append(message)

    def take_stalled(self):
        return []


def test_the_supervisor_hears_of_a_pause_before_the_operator_has_an_answer():
    """Who has it may kill the engine at once: the next one must be born with the pause."""
    log = []
    desk = Desk()
    supervisor = SimpleNamespace(send=log.append)
    orders = SimpleNamespace(link=supervisor)
    front_ends = FrontEnds([AdminCall(1, 7, "pause", "freeze")], log)
    scheduler = desk.engine.scheduler
    outbox = OutputDispatcher(front_ends, scheduler, 1)
    desk.intake._output_dispatcher = outbox
    poller = SimpleNamespace(wait=lambda timeout: [front_ends])
    assert EngineIO(orders, front_ends, poller, scheduler, desk.intake, outbox).serve(0)
    paused, reply, _ = log
    assert paused == Paused("freeze")
    assert reply == AdminReply(1, 7, True)


def test_an_idle_engine_gives_pins_up_when_their_time_is_over_and_says_so():
    log, clock = [], FakeClock()
    desk = Desk(clock=clock, block_size=4, scheduling_policy="continuum", pin_policy="fixed")
    desk.engine.add_one(list(range(20)), 4, agent=AgentHint("a"))
    desk.engine.run()
    scheduler = desk.engine.scheduler
    assert scheduler.take_stats().num_pinned_blocks == 5
    front_ends = FrontEnds([], log)

    def wait(timeout):
        clock.now += timeout
        return []

    outbox = OutputDispatcher(front_ends, scheduler, 1)
    orders = SimpleNamespace(link=SimpleNamespace(send=log.append))
    poller = SimpleNamespace(wait=wait)
    service = EngineIO(orders, front_ends, poller, scheduler, desk.intake, outbox)
    assert service.serve(1.0) is False
    assert log == []
    assert service.serve() is True
    (told,) = log
    assert (told.stats.num_pinned_blocks, told.stats.num_pins_expired) == (0, 1)
    assert service.serve(5.0) is False
