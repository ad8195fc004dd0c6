"""Workers that share a model, as threads with real connections between them."""

import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import TypeVar

import torch

from proto.messages.model_runner_output import ModelRunnerOutput
from proto.messages.scheduler_output import SchedulerOutput
from worker.parallel.torch_group import TorchGroup
from worker.step.model_runner import ModelRunner

LIMIT_SECONDS = 60.0
Result = TypeVar("Result")


class Ranks:
    """A group of joined ranks. waits: ranks that reported waiting for the others."""

    def __init__(self, size: int, epoch: int = 1) -> None:
        self._run_dir = tempfile.TemporaryDirectory(prefix="t-")
        self._threads = ThreadPoolExecutor(size)
        cpu = torch.device("cpu")
        self.waits: list[int] = []
        self.groups = [
            TorchGroup(
                self._run_dir.name, rank, size, cpu, partial(self.waits.append, rank), lambda: False
            )
            for rank in range(size)
        ]
        self.run_on_all(lambda rank: self.groups[rank].join(epoch))

    def run_on_all(self, work: Callable[[int], Result]) -> list[Result]:
        """Run a function on all ranks concurrently; return their results."""
        started = [self._threads.submit(work, rank) for rank in range(len(self.groups))]
        return [each.result(LIMIT_SECONDS) for each in started]

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        for group in self.groups:
            group.leave()
        self._threads.shutdown()
        self._run_dir.cleanup()


class LockstepRunners:
    """The model runners of all ranks, used like one."""

    def __init__(self, ranks: Ranks, runners: Sequence[ModelRunner]) -> None:
        self._ranks = ranks
        self._runners = runners

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Return the output of rank 0, after checking that all ranks have the same tokens."""
        first, *others = self._ranks.run_on_all(lambda rank: self._runners[rank].execute(step))
        for other in others:
            assert other.sampled_token_ids == first.sampled_token_ids
            assert other.candidates == first.candidates
            assert other.logprobs == first.logprobs
            assert other.draft_token_ids == first.draft_token_ids
            assert other.draft_acceptance_probs == first.draft_acceptance_probs
        return first
