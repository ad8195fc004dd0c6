"""In what order the engine says things."""

from types import SimpleNamespace

from engine_core.outbox import Outbox
from engine_core.service import Service
from proto.engine_io import AdminCall, AdminReply
from proto.lifecycle import Paused
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
    outbox = Outbox(front_ends, scheduler, 1)
    desk.intake._outbox = outbox
    poller = SimpleNamespace(wait=lambda timeout: [front_ends])
    assert Service(orders, front_ends, poller, scheduler, desk.intake, outbox).serve(0)
    paused, reply, _ = log
    assert paused == Paused("freeze")
    assert reply == AdminReply(1, 7, True)
