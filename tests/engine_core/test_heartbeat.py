"""How often heartbeats are sent."""

from engine_core.supervisor_io import SupervisorIO
from proto.messages.lifecycle import Heartbeat


class Listener:
    def __init__(self):
        self.heard = []

    def send(self, message):
        self.heard.append(message)


def test_heartbeats_are_periodic_and_immediate_for_new_workers():
    now = [100.0]
    listener = Listener()
    supervisor_io = SupervisorIO(listener, None, lambda: now[0])
    for step in range(1, 101):
        supervisor_io.send_heartbeat(1, step)
        now[0] += 0.03125
    assert [each.step for each in listener.heard] == [1, 17, 33, 49, 65, 81, 97]
    supervisor_io.send_heartbeat(2, 101)
    assert listener.heard[-1] == Heartbeat(2, 101)
