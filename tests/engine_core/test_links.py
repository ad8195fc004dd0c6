"""The engine's channels: front ends that stall, workers that send invalid results."""

import subprocess
import sys
import tempfile
import time
from types import SimpleNamespace

import pytest

from engine_core.busy_loop import EngineIO
from engine_core.frontend_io import InputProcessor, OutputDispatcher
from engine_core.supervisor_io import SupervisorIO
from engine_core.transport import FrontEndLinks
from engine_core.validation import RequestLimits
from engine_core.worker_group import WorkerFailedError, WorkerGroup
from proto import PROTOCOL_VERSION
from proto.messages.engine_io import Abort, AdminReply, EngineCoreOutput, EngineCoreOutputs
from proto.messages.kv_connector import KVConnectorOutput, KVConnectorReport
from proto.messages.lifecycle import (
    CacheReady,
    EngineAlive,
    FrontEndStalled,
    InitializeCache,
    NewFrontEnd,
    Notice,
    Ping,
    Shutdown,
    ToSupervisor,
    WorkersReady,
)
from proto.messages.model_runner_output import ModelRunnerOutput
from proto.messages.scheduler_output import CachedRequestData, SchedulerOutput
from proto.messages.view import VIEW_SECONDS, EngineView, Watch
from proto.runtime import sockets
from proto.runtime.sockets import Link, Poller, front_end_path, worker_path
from proto.settings.config import ParallelConfig, ServeConfig
from tests.fakes import lifecycle_messages
from tests.fakes.clock import FakeClock
from tests.fakes.engine_harness import EngineHarness
from tests.fakes.links import receive

WAIT_SECONDS = 10.0
EPOCH = 4


class FakeWorkers:
    """Workers that have completed seven steps and owe none."""

    epoch, num_steps, awaited_ranks, is_ready, num_kv_reports = EPOCH, 7, (), True, 0


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


def hear(link, front_ends):
    """Return the next messages of a front end, which may have connected after they were sent."""
    end = time.monotonic() + WAIT_SECONDS
    while not (messages := link.receive()):
        assert time.monotonic() < end
        for each in front_ends.links:
            each.flush()
        time.sleep(0.001)
    return messages


def test_messages_carry_their_front_end_and_other_epochs_are_dropped(run_dir, closing):
    links = closing(FrontEndLinks(run_dir, EPOCH, (0, 0)))
    for front_end in range(2):
        peer = closing(Link.connect(front_end_path(run_dir, EPOCH, front_end), AdminReply))
        peer.send(Abort(EPOCH - 1, 99, "disconnect"))
        peer.send(Abort(EPOCH, front_end, "disconnect"))
    received = []
    poller = Poller(links.links)
    while len(received) < 2:
        assert poller.wait(WAIT_SECONDS)
        received += links.receive()
    assert sorted((front_end, message.request_id) for front_end, message in received) == [
        (0, 0),
        (1, 1),
    ]


DYING_ENGINE = """
import contextlib, os, sys
from engine_core.transport import FrontEndLinks
from proto.messages.engine_io import EngineCoreOutput, EngineCoreOutputs
with contextlib.suppress(ZeroDivisionError), \\
     contextlib.closing(FrontEndLinks(sys.argv[1], 4, (0,))) as front_ends:
    while not front_ends.receive():
        pass
    words = EngineCoreOutput(1, 0, 0, list(range(2_000_000)))
    front_ends.send(0, EngineCoreOutputs(4, 1, 0.0, [words]))
    1 / 0
os._exit(1)
"""


def test_the_last_message_of_a_crashing_engine_arrives(run_dir, closing):
    """No other message names the request that it scheduled alone."""
    peer = closing(Link.connect(front_end_path(run_dir, EPOCH, 0), EngineCoreOutputs))
    peer.send(Abort(EPOCH, 1, "disconnect"))
    assert subprocess.run([sys.executable, "-c", DYING_ENGINE, run_dir], timeout=60).returncode == 1
    (message,) = receive(peer)
    assert len(message.outputs[0].new_token_ids) == 2_000_000


def test_a_ping_of_the_supervisor_is_answered_and_does_not_end_a_wait(run_dir, closing):
    engine = EngineHarness()
    front_ends = closing(FrontEndLinks(run_dir, EPOCH, (0,)))
    link = closing(Link.bind(f"{run_dir}/s", Ping | Shutdown))
    supervisor = closing(Link.connect(f"{run_dir}/s", EngineAlive))
    outputs = OutputDispatcher(front_ends, engine.scheduler, engine.kv_cache, EPOCH)
    processor = InputProcessor(engine.scheduler, engine.kv_cache, outputs, RequestLimits(1000, 100))
    supervisor_io = SupervisorIO(link, FakeWorkers())
    io = EngineIO(supervisor_io, front_ends, Poller([link]), engine.scheduler, processor, outputs)
    supervisor.send(Ping())
    assert not io.receive_messages(0.2), "nothing has happened"
    assert receive(supervisor) == [EngineAlive(EPOCH, 7, (), True, catches_up=True)]
    supervisor.send(Ping())
    supervisor.send(Shutdown())
    assert io.receive_messages()
    assert io.is_stopped


def test_statistics_travel_with_outputs_and_skip_dead_front_ends(run_dir, closing):
    engine = EngineHarness()
    front_ends = closing(FrontEndLinks(run_dir, EPOCH, (0, 0)))
    outputs = OutputDispatcher(front_ends, engine.scheduler, engine.kv_cache, EPOCH)
    first, second = (
        closing(Link.connect(front_end_path(run_dir, EPOCH, front_end), EngineCoreOutputs))
        for front_end in range(2)
    )
    engine.add_one([1], front_end=1)
    outputs.add_accepted(1, 100)
    outputs.flush()
    (message,) = hear(second, front_ends)
    assert (message.accepted, message.stats.num_waiting) == ([100], 1)
    outputs.flush()
    (message,) = hear(first, front_ends)
    assert message.stats.num_waiting == 1
    engine.step()
    outputs.add_accepted(0, 101)
    outputs.add_accepted(1, 102)
    outputs.flush()
    assert hear(first, front_ends)[0].stats.num_scheduled_tokens == 1
    assert hear(second, front_ends)[0].stats is None, "a step counts once"
    engine.step()
    old, _ = front_ends.replace(0, 1)
    for link in old:
        closing(link)
    outputs.flush()
    assert hear(second, front_ends)[0].stats.num_scheduled_tokens == 1, (
        "the front end that certainly exists"
    )


def test_engine_state_held_by_a_dead_front_end_is_resent_to_another(run_dir, closing, caplog):
    """Its requests are aborted; without a message the gauges would still count them."""
    engine = EngineHarness()
    front_ends = closing(FrontEndLinks(run_dir, EPOCH, (0, 0)))
    link = closing(Link.bind(f"{run_dir}/s", NewFrontEnd | Shutdown))
    supervisor = closing(Link.connect(f"{run_dir}/s", EngineAlive))
    outputs = OutputDispatcher(front_ends, engine.scheduler, engine.kv_cache, EPOCH)
    processor = InputProcessor(engine.scheduler, engine.kv_cache, outputs, RequestLimits(1000, 100))
    supervisor_io = SupervisorIO(link, FakeWorkers())
    io = EngineIO(supervisor_io, front_ends, Poller([link]), engine.scheduler, processor, outputs)
    other = closing(Link.connect(front_end_path(run_dir, EPOCH, 1), EngineCoreOutputs))
    engine.add_one([1], front_end=0, label="cmpl-1")
    engine.add([2], n=2, front_end=0, label="cmpl-2")
    engine.add_one([3], front_end=1, label="cmpl-3")
    supervisor.send(NewFrontEnd(0, 1))
    assert io.receive_messages(WAIT_SECONDS)
    (message,) = hear(other, front_ends)
    assert (message.stats.num_waiting, message.stats.num_running) == (1, 0)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == "front end 0 died: 2 requests are aborted: cmpl-1 cmpl-2"
    assert record.fields == {"front_end": 0, "aborted": 2, "ids": "cmpl-1 cmpl-2"}


def test_live_views_are_sent_until_the_front_end_dies(run_dir, closing):
    """The engine waits until a view is due at most, and is not idle before."""
    engine = EngineHarness()
    front_ends = closing(FrontEndLinks(run_dir, EPOCH, (0, 0)))
    link = closing(Link.bind(f"{run_dir}/s", NewFrontEnd | Shutdown))
    supervisor = closing(Link.connect(f"{run_dir}/s", EngineAlive))
    clock = FakeClock()
    outputs = OutputDispatcher(front_ends, engine.scheduler, engine.kv_cache, EPOCH, clock=clock)
    views = outputs.live_view
    processor = InputProcessor(engine.scheduler, engine.kv_cache, outputs, RequestLimits(1000, 100))
    supervisor_io = SupervisorIO(link, FakeWorkers())
    io = EngineIO(supervisor_io, front_ends, Poller([link]), engine.scheduler, processor, outputs)
    peer = closing(Link.connect(front_end_path(run_dir, EPOCH, 1), EngineCoreOutputs | EngineView))

    peer.send(Watch(EPOCH, True))
    assert io.receive_messages(WAIT_SECONDS)
    io.receive_messages(0)
    (view,) = receive(peer)
    assert view.requests == []
    engine.add_one([1] * 20, front_end=1, label="cmpl-1")
    outputs.flush()
    start = time.monotonic()
    assert io.receive_messages(WAIT_SECONDS), "a view is due before that"
    assert time.monotonic() - start < WAIT_SECONDS
    clock.now += VIEW_SECONDS
    io.receive_messages(0)
    assert views.seconds_to_next is None
    (view,) = receive(peer)
    assert [each.label for each in view.requests] == ["cmpl-1"]
    outputs.flush()
    assert views.seconds_to_next is not None
    supervisor.send(NewFrontEnd(1, 1))
    assert io.receive_messages(WAIT_SECONDS)
    assert views.seconds_to_next is None
    outputs.flush()
    assert views.seconds_to_next is None, "no page is open"


def test_a_front_end_that_does_not_read_is_dropped_with_its_requests(run_dir, closing, monkeypatch):
    monkeypatch.setattr(sockets, "MAX_PENDING_BYTES", 10_000)
    monkeypatch.setattr(sockets, "MAX_QUEUED_MESSAGES", 1)
    engine = EngineHarness()
    front_ends = closing(FrontEndLinks(run_dir, EPOCH, (0, 7)))
    supervisor = closing(Link.bind(f"{run_dir}/s", Shutdown))
    peer = closing(Link.connect(f"{run_dir}/s", ToSupervisor))
    outputs = OutputDispatcher(front_ends, engine.scheduler, engine.kv_cache, EPOCH)
    processor = InputProcessor(engine.scheduler, engine.kv_cache, outputs, RequestLimits(1000, 100))
    poller = Poller([supervisor])
    io = EngineIO(
        SupervisorIO(supervisor, FakeWorkers()),
        front_ends,
        poller,
        engine.scheduler,
        processor,
        outputs,
    )
    good = closing(Link.connect(front_end_path(run_dir, EPOCH, 0), EngineCoreOutputs))
    closing(Link.connect(front_end_path(run_dir, EPOCH, 1, 7), EngineCoreOutputs))
    engine.add_one([1], front_end=0)
    engine.add_one([2], front_end=1)
    engine.step()
    rounds = 0
    while len(front_ends.links) == 2:
        io.publish_step({1: [EngineCoreOutput(2, 0, 0, list(range(10_000)))]})
        good.receive()
        rounds += 1
        assert rounds < 10_000
    assert [each.front_end_index for each in engine.scheduler.running] == [0]
    # The other front end is still served.
    io.publish_step({0: [EngineCoreOutput(1, 0, 0, [1])]})
    reported, received = [], []
    poller = Poller([good, peer])
    while len(reported) < 2 or not any(each.outputs for each in received):
        io.receive_messages(0)
        poller.wait(0.01)
        reported += [each for each in peer.receive() if isinstance(each, Notice | FrontEndStalled)]
        received += good.receive()
    assert "front end 1" in reported[0].message
    assert reported[0].is_warning
    assert reported[1] == FrontEndStalled(1, 7), "the incarnation of the link"


def worker_ready(rank, **changes):
    return lifecycle_messages.worker_ready(epoch=EPOCH, rank=rank, **changes)


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
    """A worker group with two fake workers. log: messages to the supervisor."""

    def __init__(self, run_dir, closing):
        config = ServeConfig(parallel=ParallelConfig(tensor_parallel_size=2))
        boot = lifecycle_messages.boot(
            "engine_core", run_dir=run_dir, worker_epoch=EPOCH, config=config
        )
        self.poller, self.log = Poller(), []
        supervisor = SimpleNamespace(send=self.log.append)
        self.group = closing(WorkerGroup(boot, self.poller, supervisor))
        self.peers = [
            closing(
                Link.connect(worker_path(run_dir, EPOCH, rank), InitializeCache | SchedulerOutput)
            )
            for rank in range(2)
        ]

    def greet(self):
        """Send WorkerReady from every rank, and receive it."""
        for rank, peer in enumerate(self.peers):
            peer.send(worker_ready(rank))
        while not self.group.workers:
            self.receive()

    def start(self):
        """Start all workers until they accept steps."""
        self.greet()
        for rank, peer in enumerate(self.peers):
            receive(peer)
            peer.send(CacheReady(EPOCH, rank))
        while not self.group.is_ready:
            self.receive()

    def receive(self):
        assert self.poller.wait(WAIT_SECONDS)
        return self.group.receive_results()


def test_a_start_waits_for_every_rank(run_dir, closing):
    ranks = Ranks(run_dir, closing)
    ranks.peers[1].send(worker_ready(1))
    ranks.receive()
    assert ranks.group.workers == []
    assert ranks.group.awaited_ranks == (0,)
    ranks.peers[0].send(worker_ready(0))
    ranks.receive()
    assert [each.rank for each in ranks.group.workers] == [0, 1]
    plan = ranks.group.plan
    expected = InitializeCache(
        PROTOCOL_VERSION,
        EPOCH,
        plan.num_blocks,
        plan.block_size,
        plan.max_model_len,
        b"f" * 32,
    )
    assert [receive(peer) for peer in ranks.peers] == [[expected], [expected]]
    ranks.peers[0].send(CacheReady(EPOCH, 0))
    ranks.receive()
    assert not ranks.group.is_ready
    assert ranks.group.awaited_ranks == (1,)
    ranks.peers[1].send(CacheReady(EPOCH, 1))
    ranks.receive()
    assert ranks.group.is_ready
    assert ranks.log == [WorkersReady(EPOCH)]


def test_reports_of_a_connector_are_no_progress_while_a_step_is_owed(run_dir, closing):
    """Its thread goes on when a GPU, or another rank, hangs in a step."""
    ranks = Ranks(run_dir, closing)
    ranks.start()
    ranks.peers[0].send(KVConnectorReport(EPOCH, 0, KVConnectorOutput()))
    ranks.receive()
    assert len(ranks.group.pop_kv_reports()) == 1
    assert ranks.group.num_kv_reports == 1
    ranks.group.send_step(step(1))
    ranks.peers[0].send(KVConnectorReport(EPOCH, 0, KVConnectorOutput()))
    ranks.receive()
    assert len(ranks.group.pop_kv_reports()) == 1, "the connector gets it all the same"
    assert ranks.group.num_kv_reports == 1
    for peer in ranks.peers:
        peer.send(ModelRunnerOutput(EPOCH, 1, [], []))
    while ranks.group.awaited_ranks:
        ranks.receive()
    ranks.peers[0].send(KVConnectorReport(EPOCH, 0, KVConnectorOutput()))
    ranks.receive()
    ranks.group.pop_kv_reports()
    assert ranks.group.num_kv_reports == 2


def test_a_step_is_complete_when_every_rank_has_answered(run_dir, closing):
    ranks = Ranks(run_dir, closing)
    ranks.start()
    ranks.group.send_step(step(1))
    assert (ranks.group.awaited_ranks, ranks.group.num_steps) == ((0, 1), 0)
    assert [receive(peer) for peer in ranks.peers] == [[step(1)], [step(1)]]
    ranks.peers[0].send(ModelRunnerOutput(EPOCH - 1, 1, [], []))
    ranks.peers[0].send(ModelRunnerOutput(EPOCH, 1, [7], [[8]]))
    ranks.group.send_step(step(2))
    ranks.peers[0].send(ModelRunnerOutput(EPOCH, 2, [7], [[9]]))
    while 0 in ranks.group.awaited_ranks:
        assert ranks.receive() == []
    assert (ranks.group.awaited_ranks, ranks.group.num_steps) == ((1,), 0)
    ranks.peers[1].send(ModelRunnerOutput(EPOCH, 1, [7], [[8]]))
    assert [each.step for each in ranks.receive()] == [1]
    assert (ranks.group.awaited_ranks, ranks.group.num_steps) == ((1,), 1)
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
def test_a_worker_with_a_wrong_identity_is_named(run_dir, closing, message):
    ranks = Ranks(run_dir, closing)
    ranks.peers[1].send(message)
    with pytest.raises(WorkerFailedError, match="rank 1"):
        ranks.receive()


def test_ranks_that_answer_different_steps_are_refused(run_dir, closing):
    ranks = Ranks(run_dir, closing)
    ranks.peers[0].send(ModelRunnerOutput(EPOCH, 1, [], []))
    assert ranks.receive() == []
    ranks.peers[1].send(ModelRunnerOutput(EPOCH, 2, [], []))
    with pytest.raises(WorkerFailedError, match="out of step"):
        ranks.receive()


def test_an_image_has_failed_if_any_rank_could_not_encode_it(run_dir, closing):
    ranks = Ranks(run_dir, closing)
    ranks.peers[0].send(ModelRunnerOutput(EPOCH, 1, [], [], failed_mm_hashes=[b"a"]))
    assert ranks.receive() == []
    ranks.peers[1].send(ModelRunnerOutput(EPOCH, 1, [], [], failed_mm_hashes=[b"b"]))
    assert [each.failed_mm_hashes for each in ranks.receive()] == [[b"a", b"b"]]


def test_a_rank_with_other_tokens_than_rank_0_is_a_protocol_violation(run_dir, closing):
    ranks = Ranks(run_dir, closing)
    ranks.peers[0].send(ModelRunnerOutput(EPOCH, 1, [7], [[8]]))
    assert ranks.receive() == []
    ranks.peers[1].send(ModelRunnerOutput(EPOCH, 1, [7], [[9]]))
    with pytest.raises(WorkerFailedError, match="rank 1 has other tokens in step 1"):
        ranks.receive()
