"""An executor in whose engine things break on purpose; wired for tests only."""

from engine_core.executor.local import LocalExecutor
from proto.faults import FaultInjector
from proto.scheduler_output import SchedulerOutput


class SabotagedExecutor(LocalExecutor):
    """Does what a fault says before it hands on a step."""

    def __init__(self, run_dir: str, epoch: int, world_size: int, saboteur: FaultInjector) -> None:
        super().__init__(run_dir, epoch, world_size)
        self._saboteur = saboteur

    def submit(self, output: SchedulerOutput) -> None:
        if output.total_num_scheduled_tokens:
            self._saboteur.begin_step()
        super().submit(output)
