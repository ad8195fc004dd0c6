"""A team of threads gives up those that wait for cores, and takes them back."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from tests.worker.kernel_variants import LOADABLE, load_variant, threads_of_torch
from worker.cpu import thread_team
from worker.cpu.thread_team import ThreadTeam

pytestmark = pytest.mark.skipif(not LOADABLE, reason="no compiled kernels on this machine")
SIZE = 4


class Machine:
    """What the system says: seconds that threads have waited, and that other processes used."""

    def __init__(self) -> None:
        self.now = 100.0
        self.waited = 0.0
        self.used = 0.0
        self.team: ThreadTeam | None = None

    def run(self, seconds: float, waiting: float = 0.0, others: float = 0.0) -> int:
        """Compute steps of 20 ms for this long; return the size of the team.

        waiting: seconds that threads wait in each second. others: cores that other processes use.
        """
        assert self.team is not None
        for _ in range(round(seconds / 0.02)):
            self.now += 0.02
            self.waited += 0.02 * waiting
            self.used += 0.02 * others
            self.team.after_step(0.02)
        return torch.get_num_threads()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    found = Machine()
    monkeypatch.setattr(thread_team, "_seconds_waited", lambda threads: found.waited)
    monkeypatch.setattr(thread_team, "_seconds_used_by_others", lambda cpus: found.used)
    monkeypatch.setattr(thread_team.time, "monotonic", lambda: found.now)
    affinity = os.sched_getaffinity(0)
    with threads_of_torch(SIZE):
        found.team = ThreadTeam(load_variant(LOADABLE[0]))
        yield found
    os.sched_setaffinity(0, affinity)


def test_threads_that_do_not_wait_long_stay(machine: Machine) -> None:
    assert machine.run(5, waiting=0.2, others=1.0) == SIZE


def test_a_thread_that_the_others_wait_for_is_given_up_until_its_core_is_free(
    machine: Machine,
) -> None:
    assert machine.run(0.1, waiting=0.5, others=0.5) == SIZE - 1
    assert machine.run(10, others=1.0) == SIZE - 1
    assert machine.run(2) == SIZE


def test_many_busy_processes_take_many_threads_and_one_stays(machine: Machine) -> None:
    assert machine.run(0.1, waiting=2.4, others=3.0) == 2
    assert machine.run(1, waiting=2.0, others=4.0) == 1
    assert machine.run(5, waiting=1.0, others=4.0) == 1


def test_a_team_that_grew_too_early_waits_longer_before_it_grows_again(machine: Machine) -> None:
    """Other programs that run for moments: each growth is followed by waits."""
    sizes = []
    for _ in range(1000):
        size = torch.get_num_threads()
        sizes.append(machine.run(0.1, waiting=0.5 if size == SIZE else 0.0))
    assert 10 < sizes.count(SIZE) < 100
    assert machine.run(20) == SIZE, "at last it does"


def test_threads_of_a_smaller_team_run_on_all_cores_of_the_full_one(machine: Machine) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("needs two CPUs")
    team = machine.team
    assert team is not None
    for number, thread in enumerate(team._threads):
        os.sched_setaffinity(thread, {cpus[number % 2]})
    machine.team = team = ThreadTeam(load_variant(LOADABLE[0]))
    machine.run(0.1, waiting=0.5, others=1.0)
    assert [os.sched_getaffinity(each) for each in team._threads] == [set(cpus[:2])] * (SIZE - 1)
    machine.run(5)
    homes = [os.sched_getaffinity(each) for each in team._threads]
    assert homes == [{cpus[number % 2]} for number in range(SIZE)]


def test_a_team_is_not_resized_under_a_limit_of_processor_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits: list[float | None] = [1.5, None]
    monkeypatch.setattr(thread_team, "cpu_limit", lambda root: limits.pop())
    monkeypatch.setattr(thread_team, "memory_placement", lambda: None)
    with threads_of_torch(2):
        kernels = load_variant(LOADABLE[0])
        assert thread_team.thread_team(kernels) is not None
        assert thread_team.thread_team(kernels) is None


@pytest.fixture
def beside_busy_process() -> Iterator[int]:
    """Binds this thread to a CPU that another process uses all the time, too; gives the CPU."""
    affinity = os.sched_getaffinity(0)
    cpu = min(affinity)
    os.sched_setaffinity(0, {cpu})
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        yield cpu
        other.kill()
    os.sched_setaffinity(0, affinity)


def test_the_system_says_how_long_a_thread_waited_and_what_others_used(
    beside_busy_process: int,
) -> None:
    thread, cpus = threading.get_native_id(), {beside_busy_process}
    waited, used = thread_team._seconds_waited([thread]), thread_team._seconds_used_by_others(cpus)
    while thread_team._seconds_waited([thread]) < waited + 0.1:
        pass
    assert thread_team._seconds_used_by_others(cpus) - used > 0.05


def test_a_real_team_gives_up_a_thread_that_waits(beside_busy_process: int) -> None:
    """Both threads are on that CPU: they wait for the other process and for each other."""
    matrix = torch.ones(512, 512)
    with threads_of_torch(2):
        team = ThreadTeam(load_variant(LOADABLE[0]))
        deadline = time.monotonic() + 60
        while torch.get_num_threads() == 2 and time.monotonic() < deadline:
            started = time.monotonic()
            torch.mm(matrix, matrix)
            team.after_step(time.monotonic() - started)
        assert torch.get_num_threads() == 1
