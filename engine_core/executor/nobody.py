"""An executor between two: the workers that were here are not listened to any more."""

from proto.kv_transfer import KVConnectorOutput
from proto.lifecycle import WorkerReady
from proto.model_runner_output import ModelRunnerOutput
from proto.scheduler_output import GrammarOutput, SchedulerOutput
from proto.sockets import Link


class Nobody:
    """Never ready, so nobody hands it a step."""

    links: list[Link] = []
    workers: list[WorkerReady] = []
    cache_ready = False

    @property
    def num_steps(self) -> int:
        return 0

    @property
    def awaits(self) -> tuple[int, ...]:
        return ()

    def initialize_cache(self, num_blocks: int, block_size: int, max_model_len: int) -> None:
        """There is nobody to make one."""

    def submit(self, output: SchedulerOutput) -> None:
        """Only who is ready may be asked to."""
        raise AssertionError("a step for nobody")

    def submit_masks(self, masks: GrammarOutput) -> None:
        """They were for a step that is lost."""

    def receive(self) -> list[ModelRunnerOutput]:
        """Nothing."""
        return []

    def take_reports(self) -> list[KVConnectorOutput]:
        """Nothing."""
        return []

    def close(self) -> None:
        """There is nothing to close."""
