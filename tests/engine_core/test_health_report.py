"""Health reports while a KV connector copies: work owed by the engine or a worker."""

from dataclasses import dataclass

from deploy.supervisor.hang_detector import HangDetector, HangLimits
from engine_core.supervisor_io import SupervisorIO, owes_step
from proto import PROTOCOL_VERSION
from proto.messages.lifecycle import EngineAlive, KVCacheGeometry, KVGroup, WorkerReady
from tests.fakes.offload_rig import OffloadRig

PROMPT = list(range(37))


def test_an_unreported_store_does_not_hide_a_hang() -> None:
    """A request runs, or could run, while a copy holds blocks."""
    rig = OffloadRig(finishes=lambda job: None)
    request = rig.add_one(PROMPT, 20)
    rig.step()
    rig.step()
    assert rig.half.under_way
    assert rig.kv_cache.transfer_refs.num_blocks
    assert owes_step(rig.scheduler)
    second = rig.add_one([*range(300, 320)], 2)
    assert owes_step(rig.scheduler)
    for each in (request, second):
        rig.run_until_finished(each)
    while rig.scheduler.has_work:
        rig.step()
    assert rig.half.under_way
    assert not owes_step(rig.scheduler), "idle"
    assert rig.kv_cache.transfer_refs.num_alone
    rig.add_one(PROMPT[:20], 1)
    assert owes_step(rig.scheduler), "there are blocks for it"


def test_waiting_for_blocks_held_by_a_copy_is_no_hang() -> None:
    rig = OffloadRig(num_blocks=12, finishes=lambda job: None)
    first = rig.add_one(PROMPT, 1)
    rig.run_until_finished(first)
    assert rig.kv_cache.transfer_refs.num_alone == 9
    rig.add_one([*range(300, 340)], 1)
    while rig.scheduler.kv_transfer.wants_step:
        rig.step()
    assert rig.step().total_num_scheduled_tokens == 0
    assert rig.scheduler.has_work
    assert not owes_step(rig.scheduler)
    rig.finishes = lambda job: True
    rig.finish_some()
    assert owes_step(rig.scheduler)
    rig.run_until_idle()
    rig.assert_idle()


def test_waiting_for_a_load_is_no_hang() -> None:
    rig = OffloadRig()
    rig.generate(PROMPT)
    rig.reset_prefix_cache()
    rig.finishes = lambda job: None
    rig.add_one(PROMPT, 2)
    while rig.scheduler.has_work:
        rig.step()
    assert rig.scheduler.kv_transfer.is_loading
    assert not owes_step(rig.scheduler)
    rig.add_one([*range(300, 320)], 9)
    rig.step()
    assert rig.scheduler.running
    assert owes_step(rig.scheduler)
    rig.finishes = lambda job: True
    rig.run_until_idle()
    rig.assert_idle()


@dataclass
class Workers:
    """Two ready workers that owe no step."""

    epoch: int = 1
    is_ready: bool = True
    num_steps: int = 9
    num_kv_reports: int = 4
    awaited_ranks: tuple[int, ...] = ()

    @property
    def workers(self) -> list[WorkerReady]:
        geometry = KVCacheGeometry(1, 1, 8, "float32", 64, (KVGroup(None),))
        return [
            WorkerReady(PROTOCOL_VERSION, 1, rank, geometry, 0, 1000, bytes(32), "none")
            for rank in range(2)
        ]


def supervisor_io_of(rig: OffloadRig, workers: Workers) -> SupervisorIO:
    supervisor_io = SupervisorIO(None, workers)
    supervisor_io.scheduler = rig.scheduler
    return supervisor_io


def test_a_copy_that_workers_never_report_is_a_hang() -> None:
    """The pool is full of blocks that are being copied; the time limit of a step applies."""
    rig = OffloadRig(num_blocks=12, finishes=lambda job: None)
    rig.run_until_finished(rig.add_one(PROMPT, 1))
    rig.add_one([*range(300, 340)], 1)
    while rig.scheduler.kv_transfer.wants_step:
        rig.step()
    rig.step()
    workers = Workers()
    supervisor_io = supervisor_io_of(rig, workers)
    assert supervisor_io.health_report() == EngineAlive(1, 9, (0, 1), True, False, 4)

    now = 0.0
    detector = HangDetector(HangLimits(start=100.0, first_steps=30.0, step=10.0), lambda: now)
    for rank in range(2):
        detector.watch(("worker", rank))
    for seconds in range(20):
        now = float(seconds)
        if seconds == 8:
            workers.num_kv_reports += 1  # of another copy, so copies make progress
        detector.note_engine_report(supervisor_io.health_report(), 1)
        if seconds < 19:
            assert detector.find_hangs() == []
    assert {hang.process for hang in detector.find_hangs()} == {("worker", 0), ("worker", 1)}

    rig.lose_workers()
    rig.finishes = lambda job: True
    assert supervisor_io.health_report().awaits == ()
    rig.run_until_idle()
    rig.assert_idle()


def test_no_copy_is_awaited_while_requests_run_or_blocks_are_free() -> None:
    rig = OffloadRig(finishes=lambda job: None)
    supervisor_io = supervisor_io_of(rig, Workers())
    rig.add_one(PROMPT, 20)
    rig.step()
    rig.step()
    assert rig.half.under_way
    assert supervisor_io.health_report().awaits == ()
    rig.finishes = lambda job: True
    rig.run_until_idle()
    rig.reset_prefix_cache()
    rig.finishes = lambda job: None
    rig.add_one(PROMPT, 2)
    while rig.scheduler.has_work:
        rig.step()
    assert supervisor_io.health_report().awaits == (0, 1), "a load is waited for"
    rig.add_one([*range(300, 320)], 9)
    rig.step()
    assert supervisor_io.health_report().awaits == ()
    rig.finishes = lambda job: True
    rig.run_until_idle()
