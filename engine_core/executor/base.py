"""What the engine asks of whatever runs the model.

Knows nothing of how workers are started or reached.
"""

from typing import Protocol

from proto.errors import TokendError
from proto.lifecycle import WorkerReady
from proto.model_runner_output import ModelRunnerOutput
from proto.scheduler_output import SchedulerOutput
from proto.sockets import Link


class WorkerFailedError(TokendError):
    """A worker reported an error, or sent what it must not; its KV can no longer be trusted."""


class RemoteTraceback(Exception):
    """The traceback of another process, as the cause of a local error, so that logs show both."""

    def __str__(self) -> str:
        return "\n" + str(self.args[0])


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

    def initialize_cache(self, num_blocks: int, block_size: int, max_model_len: int) -> None:
        """Have the KV tensors made. num_blocks counts the null block."""
        ...

    def submit(self, output: SchedulerOutput) -> None:
        """Hand a step to the workers; never blocks."""
        ...

    def receive(self) -> list[ModelRunnerOutput]:
        """The steps that are complete on every rank, in order.

        Raises WorkerFailedError, naming the worker, when one failed or sent nonsense.
        """
        ...

    def close(self) -> None:
        """Close the links at once."""
        ...
