"""Workers that are processes of the same machine, one link each.

    worker r ──WorkerReady──▶  engine  ──InitializeCache──▶ worker r ──CacheReady──▶ engine
             ◀──SchedulerOutput──      ──ModelRunnerOutput──▶

Owns the links to the workers and what each rank has answered. The supervisor
starts the workers and watches that they live; here only their messages count.
"""

import logging
from collections import deque
from collections.abc import Sequence

from engine_core.executor.base import WorkerFailedError
from proto import PROTOCOL_VERSION
from proto.faults import FaultInjector
from proto.kv_connector import KVConnectorOutput, KVConnectorReport
from proto.lifecycle import CacheReady, InitializeCache, WorkerReady
from proto.model_runner_output import ModelRunnerOutput
from proto.scheduler_output import GrammarOutput, SchedulerOutput
from proto.sockets import Link, PeerStalledError, worker_path

# The reports of one epoch's workers to the KV connector are joined rank by rank: a request's copy
# has ended when every rank has reported it. Invalid blocks are reported at once, because the other
# ranks' parts are useless without the failed one.


class ReportJoiner:
    """Joins the reports of `num_ranks` workers."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._sending: dict[int, int] = {}
        self._recving: dict[int, int] = {}

    def join(self, output: KVConnectorOutput) -> KVConnectorOutput:
        """One rank's report, of which only those seq_ids are left that all ranks have finished."""
        if self._num_ranks == 1:
            return output
        return KVConnectorOutput(
            self._count(self._sending, output.finished_sending),
            self._count(self._recving, output.finished_recving),
            output.invalid_block_ids,
            output.worker_metadata,
        )

    def _count(self, left: dict[int, int], seq_ids: Sequence[int]) -> list[int]:
        finished = []
        for seq_id in seq_ids:
            left[seq_id] = left.get(seq_id, self._num_ranks) - 1
            if not left[seq_id]:
                del left[seq_id]
                finished.append(seq_id)
        return finished


logger = logging.getLogger("tokend.executor")

FromWorker = WorkerReady | CacheReady | ModelRunnerOutput | KVConnectorReport


class LocalExecutor:
    """Every rank gets every step; a step is complete when all ranks have answered it.

    The answer of rank 0 counts: the ranks compute the same tokens, and one that does not is
    not to be trusted.
    """

    def __init__(self, run_dir: str, epoch: int, world_size: int) -> None:
        self._epoch = epoch
        self._links = [
            Link.bind(worker_path(run_dir, epoch, rank), FromWorker) for rank in range(world_size)
        ]
        self._ready: dict[int, WorkerReady] = {}
        self._cache_ready: set[int] = set()
        self._answers: list[deque[ModelRunnerOutput]] = [deque() for _ in self._links]
        self._joiner = ReportJoiner(world_size)
        self._reports: list[KVConnectorOutput] = []
        self._initializing = False
        self._num_submitted = 0
        self._num_answered = [0] * world_size

    @property
    def links(self) -> list[Link]:
        return self._links

    @property
    def workers(self) -> list[WorkerReady]:
        if len(self._ready) < len(self._links):
            return []
        return [self._ready[rank] for rank in range(len(self._links))]

    @property
    def cache_ready(self) -> bool:
        return len(self._cache_ready) == len(self._links)

    @property
    def num_steps(self) -> int:
        return min(self._num_answered)

    @property
    def awaits(self) -> tuple[int, ...]:
        ranks = range(len(self._links))
        if not self._initializing:
            return tuple(rank for rank in ranks if rank not in self._ready)
        if not self.cache_ready:
            return tuple(rank for rank in ranks if rank not in self._cache_ready)
        return tuple(rank for rank in ranks if self._num_answered[rank] < self._num_submitted)

    def initialize_cache(self, num_blocks: int, block_size: int, max_model_len: int) -> None:
        self._initializing = True
        message = InitializeCache(
            PROTOCOL_VERSION,
            self._epoch,
            num_blocks,
            block_size,
            max_model_len,
            self._ready[0].fingerprint,
        )
        for link in self._links:
            link.send(message)

    def submit(self, output: SchedulerOutput) -> None:
        self._num_submitted += 1
        self._send(output)

    def submit_masks(self, masks: GrammarOutput) -> None:
        self._send(masks)

    def receive(self) -> list[ModelRunnerOutput]:
        for rank, link in enumerate(self._links):
            for message in link.receive():
                self._take(rank, message)
            if link.num_undecodable:
                raise WorkerFailedError(rank, "sent a message that cannot be decoded")
        complete = []
        while all(self._answers):
            first, *others = [answers.popleft() for answers in self._answers]
            for rank, other in enumerate(others, 1):
                if other.step != first.step:
                    raise WorkerFailedError(
                        rank, f"answered out of step: {other.step}, and worker 0 {first.step}"
                    )
                if other.sampled_token_ids != first.sampled_token_ids:
                    raise WorkerFailedError(
                        rank, f"has other tokens in step {first.step} than worker 0"
                    )
            complete.append(first)
        return complete

    def take_reports(self) -> list[KVConnectorOutput]:
        taken, self._reports = self._reports, []
        return taken

    def close(self) -> None:
        for link in self._links:
            link.close()

    def _send(self, message: SchedulerOutput | GrammarOutput) -> None:
        for rank, link in enumerate(self._links):
            try:
                link.send(message)
            except PeerStalledError as error:
                raise WorkerFailedError(rank, "does not read its steps") from error

    def _take(self, rank: int, message: FromWorker) -> None:
        if isinstance(message, WorkerReady) and message.protocol_version != PROTOCOL_VERSION:
            raise WorkerFailedError(
                rank,
                f"speaks protocol {message.protocol_version}, the engine {PROTOCOL_VERSION}",
            )
        if message.epoch != self._epoch:
            logger.warning("worker %d: dropped a message of epoch %d", rank, message.epoch)
        elif isinstance(message, ModelRunnerOutput):
            self._num_answered[rank] += 1
            if message.error is None:
                self._answers[rank].append(message)
            else:  # its own last words say more, and the supervisor sends others
                logger.error(
                    "worker %d failed in step %d: %s", rank, message.step, message.error.message
                )
        elif message.rank != rank:
            raise WorkerFailedError(rank, f"calls itself worker {message.rank}")
        elif isinstance(message, KVConnectorReport):
            self._reports.append(self._joiner.join(message.output))
        elif isinstance(message, WorkerReady):
            self._ready[rank] = message
        else:
            self._cache_ready.add(rank)


# Fault injection: only used with --enable-fault-injection.


class FaultyExecutor(LocalExecutor):
    """Does what a fault says before it hands on a step."""

    def __init__(self, run_dir: str, epoch: int, world_size: int, saboteur: FaultInjector) -> None:
        super().__init__(run_dir, epoch, world_size)
        self._saboteur = saboteur

    def submit(self, output: SchedulerOutput) -> None:
        if output.total_num_scheduled_tokens:
            self._saboteur.begin_step()
        super().submit(output)
