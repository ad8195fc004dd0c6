"""The client that other tests of hostile inputs measure with sees stalls, memory and deaths."""

import os
import signal
import time

import pytest

from tests.e2e.bystander import Bystander, Client
from tests.e2e.daemon import Daemon

pytestmark = pytest.mark.suite("hostile")


def test_a_quiet_daemon_passes(daemon: Daemon) -> None:
    with Bystander(daemon) as bystander:
        bystander.rest(2.0)
    bystander.check()


def test_a_stopped_front_end_is_noticed(daemon: Daemon) -> None:
    with Bystander(daemon) as bystander:
        bystander.rest(0.5)
        front_end = daemon.processes()["api_server"].pid
        os.kill(front_end, signal.SIGSTOP)
        time.sleep(0.8)
        os.kill(front_end, signal.SIGCONT)
        bystander.rest(0.5)
    assert bystander.figures.health > 0.7
    assert bystander.figures.gap > 0.7
    with pytest.raises(AssertionError):
        bystander.check()


def test_a_process_that_died_is_noticed() -> None:
    with Daemon() as daemon:
        with Bystander(daemon) as bystander:
            bystander.rest(0.5)
            os.kill(daemon.processes()["worker"].pid, signal.SIGKILL)
            bystander.rest(1.0)
        with pytest.raises(AssertionError):
            bystander.check()


def test_memory_is_counted() -> None:
    client = Client(0, os.getpid())
    before = client.memory()
    taken = bytearray(os.urandom(1 << 20)) * 300
    assert 290 < client.memory() - before < 320
    assert len(taken) == 300 << 20
