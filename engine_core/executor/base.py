"""What the engine asks of whatever runs the model.

Knows nothing of how workers are started or reached.
"""

from typing import Protocol

from proto.errors import TokendError
from proto.kv_connector import KVConnectorOutput
from proto.lifecycle import WorkerReady
from proto.model_runner_output import ModelRunnerOutput
from proto.scheduler_output import GrammarOutput, SchedulerOutput
from proto.sockets import Link


class WorkerFailedError(TokendError):
    """A worker sent what it must not; its KV can no longer be trusted. rank: of that worker."""

    def __init__(self, rank: int, what: str) -> None:
        super().__init__(f"worker {rank} {what}")
        self.rank = rank


class Executor(Protocol):
    """Runs steps on every device of one engine, in the order in which they are submitted."""

    @property
    def links(self) -> list[Link]:
        """To wait on; call `receive` when one of them is readable."""
        ...

    @property
    def workers(self) -> list[WorkerReady]:
        """What the workers said of themselves, by rank; empty until all of them have loaded."""
        ...

    @property
    def cache_ready(self) -> bool:
        """All workers have made their KV tensors and take steps."""
        ...

    @property
    def num_steps(self) -> int:
        """Steps that every rank has answered."""
        ...

    @property
    def awaits(self) -> tuple[int, ...]:
        """Ranks whose answer is missing: to a step, or to what comes before the first one."""
        ...

    def initialize_cache(self, num_blocks: int, block_size: int, max_model_len: int) -> None:
        """Have the KV tensors made. num_blocks counts the null block."""
        ...

    def submit(self, output: SchedulerOutput) -> None:
        """Hand a step to the workers; never blocks."""
        ...

    def submit_masks(self, masks: GrammarOutput) -> None:
        """Hand over what a step waits for before it samples; never blocks."""
        ...

    def receive(self) -> list[ModelRunnerOutput]:
        """The steps that are complete on every rank, in order.

        A step that failed has none: its worker dies. Raises WorkerFailedError, naming the
        worker, when one sent nonsense.
        """
        ...

    def take_reports(self) -> list[KVConnectorOutput]:
        """What workers have finished for the KV connector, told before `receive`'s steps.

        One for each report of each rank, in order; the seq_ids are those that all ranks have
        finished with it.
        """
        ...

    def close(self) -> None:
        """Close the links at once."""
        ...
