"""The engine's links: front ends that stall, workers that answer wrongly or apart."""

import subprocess
import sys
import tempfile
import time

import pytest

from engine_core.busy_loop import EngineIO
from engine_core.executor.base import WorkerFailedError
from engine_core.executor.local import LocalExecutor
from engine_core.frontend_io import InputProcessor, OutputDispatcher
from engine_core.supervisor_io import SupervisorCommands
from engine_core.transport import FrontEndLinks
from engine_core.validation import RequestLimits
from engine_core.view.views import EngineViews
from proto import PROTOCOL_VERSION, sockets
from proto.engine_io import Abort, AdminReply, EngineCoreOutput, EngineCoreOutputs
from proto.lifecycle import (
    CacheReady,
    EngineAlive,
    FrontEndStalled,
    InitializeCache,
    NewFrontEnd,
    Notice,
    Ping,
    Shutdown,
    ToSupervisor,
)
from proto.model_runner_output import ModelRunnerOutput
from proto.scheduler_output import CachedRequestData, SchedulerOutput
from proto.sockets import Link, Poller, front_end_path, worker_path
from proto.view import EngineView, Watch
from tests.fakes import boots
from tests.fakes.engine_harness import EngineHarness

WAIT_SECONDS = 10.0
EPOCH = 4


@pytest.fixture
def run_dir():
    with tempfile.TemporaryDirectory(prefix="t-") as path:
        yield path


@pytest.fixture
def closing():
    closed = []
    yield lambda each: closed.append(each) or each
    for each in closed:
        each.close()


def receive(link, count=1):
    messages = []
    poller = Poller([link])
    while len(messages) < count:
        assert poller.wait(WAIT_SECONDS)
        messages += link.receive()
    return messages


def hear(link, front_ends):
    """What a front end is told next; it may not have been connected when that was sent."""
    end = time.monotonic() + WAIT_SECONDS
    while not (messages := link.receive()):
        assert time.monotonic() < end
        for each in front_ends.links:
            each.flush()
        time.sleep(0.001)
    return messages


def test_front_ends_are_told_apart_and_other_epochs_dropped(run_dir, closing):
    links = closing(FrontEndLinks(run_dir, EPOCH, (0, 0)))
    for client in range(2):
        peer = closing(Link.connect(front_end_path(run_dir, EPOCH, client), AdminReply))
        peer.send(Abort(EPOCH - 1, 99, "disconnect"))
        peer.send(Abort(EPOCH, client, "disconnect"))
    received = []
    poller = Poller(links.links)
    while len(received) < 2:
        assert poller.wait(WAIT_SECONDS)
        received += links.receive()
    assert sorted((client, message.request_id) for client, message in received) == [(0, 0), (1, 1)]


DYING_ENGINE = """
import contextlib, os, sys
from engine_core.transport import FrontEndLinks
from proto.engine_io import EngineCoreOutput, EngineCoreOutputs
with contextlib.suppress(ZeroDivisionError), \\
     contextlib.closing(FrontEndLinks(sys.argv[1], 4, (0,))) as front_ends:
    while not front_ends.receive():
        pass
    words = EngineCoreOutput(1, 0, 0, list(range(2_000_000)))
    front_ends.send(0, EngineCoreOutputs(4, 1, 0.0, [words]))
    1 / 0
os._exit(1)
"""


def test_what_an_engine_said_last_arrives_though_it_dies_of_an_exception(run_dir, closing):
    """Nothing else says whom it had begun with, alone."""
    peer = closing(Link.connect(front_end_path(run_dir, EPOCH, 0), EngineCoreOutputs))
    peer.send(Abort(EPOCH, 1, "disconnect"))
    assert subprocess.run([sys.executable, "-c", DYING_ENGINE, run_dir], timeout=60).returncode == 1
    (message,) = receive(peer)
    assert len(message.outputs[0].new_token_ids) == 2_000_000


def test_a_question_of_the_supervisor_is_answered_and_does_not_end_a_wait(run_dir, closing):
    engine = EngineHarness()
    front_ends = closing(FrontEndLinks(run_dir, EPOCH, (0,)))
    link = closing(Link.bind(f"{run_dir}/s", Ping | Shutdown))
    supervisor = closing(Link.connect(f"{run_dir}/s", EngineAlive))
    outbox = OutputDispatcher(front_ends, engine.scheduler, EPOCH)
    intake = InputProcessor(
        engine.scheduler, engine.kv_cache, outbox, RequestLimits(1000, 100), lambda: []
    )
    orders = SupervisorCommands(link, lambda: EngineAlive(EPOCH, 7))
    service = EngineIO(orders, front_ends, Poller([link]), engine.scheduler, intake, outbox)
    supervisor.send(Ping())
    assert not service.serve(0.2), "nothing has happened"
    assert receive(supervisor) == [EngineAlive(EPOCH, 7)]
    supervisor.send(Ping())
    supervisor.send(Shutdown())
    assert service.serve()
    assert service.stopped


def test_statistics_ride_with_what_somebody_is_told_and_go_to_no_dead_one(run_dir, closing):
    engine = EngineHarness()
    front_ends = closing(FrontEndLinks(run_dir, EPOCH, (0, 0)))
    outbox = OutputDispatcher(front_ends, engine.scheduler, EPOCH)
    first, second = (
        closing(Link.connect(front_end_path(run_dir, EPOCH, client), EngineCoreOutputs))
        for client in range(2)
    )
    engine.add_one([1], client=1)
    outbox.accept(1, 100)
    outbox.flush()
    (message,) = hear(second, front_ends)
    assert (message.accepted, message.stats.num_waiting) == ([100], 1)
    outbox.flush()
    (message,) = hear(first, front_ends)
    assert message.stats.num_waiting == 1
    engine.step()
    outbox.accept(0, 101)
    outbox.accept(1, 102)
    outbox.flush()
    assert hear(first, front_ends)[0].stats.num_scheduled_tokens == 1
    assert hear(second, front_ends)[0].stats is None, "a step counts once"
    engine.step()
    old, _ = front_ends.replace(0, 1)
    for link in old:
        closing(link)
    outbox.flush()
    assert hear(second, front_ends)[0].stats.num_scheduled_tokens == 1, (
        "the one that is surely there"
    )


def test_what_a_dead_front_end_knew_of_the_engine_is_told_to_another(run_dir, closing):
    """Its requests are over, and without a word the gauges would still show them."""
    engine = EngineHarness()
    front_ends = closing(FrontEndLinks(run_dir, EPOCH, (0, 0)))
    link = closing(Link.bind(f"{run_dir}/s", NewFrontEnd | Shutdown))
    supervisor = closing(Link.connect(f"{run_dir}/s", EngineAlive))
    outbox = OutputDispatcher(front_ends, engine.scheduler, EPOCH)
    intake = InputProcessor(
        engine.scheduler, engine.kv_cache, outbox, RequestLimits(1000, 100), lambda: []
    )
    orders = SupervisorCommands(link, lambda: EngineAlive(EPOCH, 7))
    service = EngineIO(orders, front_ends, Poller([link]), engine.scheduler, intake, outbox)
    other = closing(Link.connect(front_end_path(run_dir, EPOCH, 1), EngineCoreOutputs))
    engine.add_one([1], client=0)
    supervisor.send(NewFrontEnd(0, 1))
    assert service.serve(WAIT_SECONDS)
    (message,) = hear(other, front_ends)
    assert (message.stats.num_waiting, message.stats.num_running) == (0, 0)


def test_who_watches_is_shown_a_view_until_the_front_end_dies(run_dir, closing):
    """The engine waits no longer than until one is due, and is not idle before."""
    engine = EngineHarness()
    front_ends = closing(FrontEndLinks(run_dir, EPOCH, (0, 0)))
    link = closing(Link.bind(f"{run_dir}/s", NewFrontEnd | Shutdown))
    supervisor = closing(Link.connect(f"{run_dir}/s", EngineAlive))
    views = EngineViews(front_ends, engine.scheduler, engine.kv_cache, EPOCH)
    outbox = OutputDispatcher(front_ends, engine.scheduler, EPOCH, views=views)
    limits = RequestLimits(1000, 100)
    intake = InputProcessor(
        engine.scheduler, engine.kv_cache, outbox, limits, lambda: [], views=views
    )
    orders = SupervisorCommands(link, lambda: EngineAlive(EPOCH, 7))
    parts = (front_ends, Poller([link]), engine.scheduler, intake, outbox)
    service = EngineIO(orders, *parts, views=views)
    peer = closing(Link.connect(front_end_path(run_dir, EPOCH, 1), EngineCoreOutputs | EngineView))

    peer.send(Watch(EPOCH, True))
    assert service.serve(WAIT_SECONDS)
    service.serve(0)
    (view,) = receive(peer)
    assert view.requests == []
    engine.add_one([1] * 20, client=1, label="cmpl-1")
    outbox.flush()
    assert service.serve(WAIT_SECONDS), "a view is due before that"
    while views.seconds_to_next is not None:
        service.serve(0)
    (view,) = receive(peer)
    assert [each.label for each in view.requests] == ["cmpl-1"]
    outbox.flush()
    assert views.seconds_to_next is not None
    supervisor.send(NewFrontEnd(1, 1))
    while views.seconds_to_next is not None:
        assert service.serve(WAIT_SECONDS)
    outbox.flush()
    assert views.seconds_to_next is None, "nobody watches"


def test_a_front_end_that_does_not_read_is_given_up_with_its_requests(
    run_dir, closing, monkeypatch
):
    monkeypatch.setattr(sockets, "MAX_PENDING_BYTES", 10_000)
    monkeypatch.setattr(sockets, "MAX_QUEUED_MESSAGES", 1)
    engine = EngineHarness()
    front_ends = closing(FrontEndLinks(run_dir, EPOCH, (0, 7)))
    supervisor = closing(Link.bind(f"{run_dir}/s", Shutdown))
    peer = closing(Link.connect(f"{run_dir}/s", ToSupervisor))
    outbox = OutputDispatcher(front_ends, engine.scheduler, EPOCH)
    intake = InputProcessor(
        engine.scheduler, engine.kv_cache, outbox, RequestLimits(1000, 100), lambda: []
    )
    poller = Poller([supervisor])
    service = EngineIO(
        SupervisorCommands(supervisor), front_ends, poller, engine.scheduler, intake, outbox
    )
    good = closing(Link.connect(front_end_path(run_dir, EPOCH, 0), EngineCoreOutputs))
    closing(Link.connect(front_end_path(run_dir, EPOCH, 1, 7), EngineCoreOutputs))
    engine.add_one([1], client=0)
    engine.add_one([2], client=1)
    engine.step()
    rounds = 0
    while len(front_ends.links) == 2:
        service.publish({1: [EngineCoreOutput(2, 0, 0, list(range(10_000)))]})
        good.receive()
        rounds += 1
        assert rounds < 10_000
    assert [each.client_index for each in engine.scheduler.running] == [0]
    # Life goes on for the other one.
    service.publish({0: [EngineCoreOutput(1, 0, 0, [1])]})
    told, received = [], []
    poller = Poller([good, peer])
    while len(told) < 2 or not any(each.outputs for each in received):
        service.serve(0)
        poller.wait(0.01)
        told += [each for each in peer.receive() if isinstance(each, Notice | FrontEndStalled)]
        received += good.receive()
    assert "front end 1" in told[0].message
    assert told[1] == FrontEndStalled(1, 7), "the life that the link was for"


def worker_ready(rank, **changes):
    return boots.worker_ready(epoch=EPOCH, rank=rank, **changes)


def step(number):
    return SchedulerOutput(
        epoch=EPOCH,
        step=number,
        new_requests=[],
        cached_requests=CachedRequestData(),
        total_num_scheduled_tokens=0,
        finished_seq_ids=[],
        preempted_seq_ids=[],
    )


class Ranks:
    """An executor with two fake workers."""

    def __init__(self, run_dir, closing):
        self.executor = closing(LocalExecutor(run_dir, EPOCH, 2))
        self.poller = Poller(self.executor.links)
        self.peers = [
            closing(
                Link.connect(worker_path(run_dir, EPOCH, rank), InitializeCache | SchedulerOutput)
            )
            for rank in range(2)
        ]

    def greet(self):
        """Hear from every worker, as a real engine does before the first step."""
        for rank, peer in enumerate(self.peers):
            peer.send(worker_ready(rank))
        while not self.executor.workers:
            self.receive()

    def receive(self):
        assert self.poller.wait(WAIT_SECONDS)
        return self.executor.receive()


def test_a_start_waits_for_every_rank(run_dir, closing):
    ranks = Ranks(run_dir, closing)
    ranks.peers[1].send(worker_ready(1))
    ranks.receive()
    assert ranks.executor.workers == []
    assert ranks.executor.awaits == (0,)
    ranks.peers[0].send(worker_ready(0))
    ranks.receive()
    assert [each.rank for each in ranks.executor.workers] == [0, 1]
    ranks.executor.initialize_cache(10, 16, 100)
    expected = InitializeCache(PROTOCOL_VERSION, EPOCH, 10, 16, 100, b"f" * 32)
    assert [receive(peer) for peer in ranks.peers] == [[expected], [expected]]
    ranks.peers[0].send(CacheReady(EPOCH, 0))
    ranks.receive()
    assert not ranks.executor.cache_ready
    assert ranks.executor.awaits == (1,)
    ranks.peers[1].send(CacheReady(EPOCH, 1))
    ranks.receive()
    assert ranks.executor.cache_ready


def test_a_step_is_complete_when_every_rank_has_answered(run_dir, closing):
    ranks = Ranks(run_dir, closing)
    ranks.greet()
    ranks.executor.initialize_cache(10, 16, 100)
    for rank, peer in enumerate(ranks.peers):
        receive(peer)
        peer.send(CacheReady(EPOCH, rank))
    while not ranks.executor.cache_ready:
        ranks.receive()
    ranks.executor.submit(step(1))
    assert (ranks.executor.awaits, ranks.executor.num_steps) == ((0, 1), 0)
    assert [receive(peer) for peer in ranks.peers] == [[step(1)], [step(1)]]
    ranks.peers[0].send(ModelRunnerOutput(EPOCH - 1, 1, [], []))
    ranks.peers[0].send(ModelRunnerOutput(EPOCH, 1, [7], [[8]]))
    ranks.executor.submit(step(2))
    ranks.peers[0].send(ModelRunnerOutput(EPOCH, 2, [7], [[9]]))
    while 0 in ranks.executor.awaits:
        assert ranks.receive() == []
    assert (ranks.executor.awaits, ranks.executor.num_steps) == ((1,), 0)
    ranks.peers[1].send(ModelRunnerOutput(EPOCH, 1, [7], [[8]]))
    assert [each.step for each in ranks.receive()] == [1]
    assert (ranks.executor.awaits, ranks.executor.num_steps) == ((1,), 1)
    ranks.peers[1].send(ModelRunnerOutput(EPOCH, 2, [7], [[9]]))
    assert [each.sampled_token_ids for each in ranks.receive()] == [[[9]]]


@pytest.mark.parametrize(
    "message",
    [
        worker_ready(1, protocol_version=PROTOCOL_VERSION + 1),
        worker_ready(0),
        CacheReady(EPOCH, 0),
    ],
)
def test_a_worker_that_is_not_who_it_should_be_is_named(run_dir, closing, message):
    ranks = Ranks(run_dir, closing)
    ranks.peers[1].send(message)
    with pytest.raises(WorkerFailedError, match="worker 1"):
        ranks.receive()


def test_ranks_that_answer_different_steps_are_refused(run_dir, closing):
    ranks = Ranks(run_dir, closing)
    ranks.peers[0].send(ModelRunnerOutput(EPOCH, 1, [], []))
    assert ranks.receive() == []
    ranks.peers[1].send(ModelRunnerOutput(EPOCH, 2, [], []))
    with pytest.raises(WorkerFailedError, match="out of step"):
        ranks.receive()


def test_a_rank_that_has_other_tokens_than_the_first_is_not_trusted(run_dir, closing):
    ranks = Ranks(run_dir, closing)
    ranks.peers[0].send(ModelRunnerOutput(EPOCH, 1, [7], [[8]]))
    assert ranks.receive() == []
    ranks.peers[1].send(ModelRunnerOutput(EPOCH, 1, [7], [[9]]))
    with pytest.raises(WorkerFailedError, match="worker 1 has other tokens in step 1"):
        ranks.receive()
