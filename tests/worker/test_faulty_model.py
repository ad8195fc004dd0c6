"""Steps with injected NaN."""

from pathlib import Path

from proto.messages.scheduler_output import CachedRequestData, SchedulerOutput
from proto.runtime.faults import Fault, FaultInjector
from tests.fakes.prepared_models import prepare_checkpoint
from tests.fakes.real_engine import load, runner_of
from tests.fakes.stepped_engine import new_request
from tests.fakes.tiny_checkpoints import save_tiny


def test_only_the_chosen_step_fails(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    runner = runner_of(load(prepare_checkpoint(tmp_path, tmp_path / "prepared")), 10)
    injector = runner._fault_injector = FaultInjector([Fault("worker", 0, "nan", 2)])
    failed = []
    for number in range(1, 4):
        injector.begin_step()
        step = SchedulerOutput(
            epoch=1,
            step=number,
            new_requests=[new_request(number, [5, 6, 7], [[number]], 3)],
            cached_requests=CachedRequestData([], [], [], [], [], []),
            total_num_scheduled_tokens=3,
            finished_seq_ids=[],
            preempted_seq_ids=[],
        )
        failed.append(runner.execute(step).failed_seq_ids)
    assert failed == [[], [2], []]
