"""The workers of the engine: processes of the same machine, joined to it by one channel each.

    engine  ◀── WorkerReady ─────── worker r     it has loaded its weights
            ─── InitializeCache ──▶              once all ranks have
            ◀── CacheReady ────────              it has allocated its KV tensors
            ─── SchedulerOutput ──▶              once all ranks have; every rank gets every step
            ─── GrammarOutput ────▶              masks of a step, if it needs any
            ◀── ModelRunnerOutput ─
            ─── ProfileCall ──────▶              to start or write a profile
            ◀── ProfileReply ──────
            ─── LoadAdapter ──────▶              read while steps go on; DropAdapter frees it
            ◀── AdapterLoaded ─────

The supervisor starts and watches the worker processes; here only their messages count. If a
worker dies or sends something invalid, the supervisor replaces all of them, and the workers of
the next epoch connect to new channels.
"""

import logging
from collections import deque
from collections.abc import Sequence

import msgspec

from engine_core.pool_plan import PoolPlan, check_ranks, plan_pool
from proto import PROTOCOL_VERSION
from proto.codec import changed
from proto.errors import ModelError, TokendError
from proto.messages.kv_connector import KVConnectorOutput, KVConnectorReport
from proto.messages.lifecycle import (
    CacheReady,
    InitializeCache,
    ProcessBoot,
    ProtocolViolation,
    WorkerReady,
    WorkersReady,
)
from proto.messages.lora import AdapterLoaded, DropAdapter, LoadAdapter
from proto.messages.model_runner_output import ModelRunnerOutput
from proto.messages.profiler import ProfileAction, ProfileCall, ProfileReply
from proto.messages.scheduler_output import GrammarOutput, SchedulerOutput
from proto.runtime.faults import FaultInjector
from proto.runtime.sockets import Link, PeerStalledError, Poller, worker_path

logger = logging.getLogger("tokend.worker_group")

FromWorker = (
    WorkerReady | CacheReady | ModelRunnerOutput | KVConnectorReport | ProfileReply | AdapterLoaded
)


class WorkerFailedError(TokendError):
    """A worker sent an invalid message, so its KV can no longer be trusted. rank: of the worker."""

    def __init__(self, rank: int, what: str) -> None:
        super().__init__(f"rank {rank} {what}")
        self.rank = rank


class WorkerGroup:
    """Sends steps to the workers of the current epoch and receives their results.

    epoch: of the current workers. is_ready: whether they accept steps.
    num_kv_reports: KVConnectorReports so far, of all epochs, received while no rank owed a message.
    profile_replies: to the last ProfileCall, by rank.
    first_index: of the worker of rank 0 among those of all engines.
    poller: polls the channels of the current workers; updated here.
    """

    def __init__(self, boot: ProcessBoot, poller: Poller, supervisor: Link) -> None:
        self._run_dir = boot.run_dir
        self._world_size = boot.config.parallel.tensor_parallel_size
        self.first_index = boot.engine * self._world_size
        self._config = boot.config
        self._max_position = boot.model.max_position
        self._faults = FaultInjector.of(boot.faults, boot.role, boot.index, boot.incarnation)
        self._poller = poller
        self._supervisor = supervisor
        self._first_workers: list[WorkerReady] = []
        self._plan: PoolPlan | None = None
        self.num_kv_reports = 0
        self._connect(boot.worker_epoch)

    def _connect(self, epoch: int) -> None:
        self.epoch = epoch
        self.is_ready = False
        self._links = [
            Link.bind(worker_path(self._run_dir, epoch, rank), FromWorker)
            for rank in range(self._world_size)
        ]
        for link in self._links:
            self._poller.add(link)
        self._loaded: dict[int, WorkerReady] = {}  # by rank
        self._initializing = False
        self._cache_ready: set[int] = set()  # ranks
        self._num_sent = 0  # steps and profile calls
        self._num_profile_calls = 0
        self._adapter_loads: dict[int, dict[int, AdapterLoaded]] = {}  # by lora_int_id and rank
        self._loaded_adapters: list[list[AdapterLoaded]] = []
        self.profile_replies: dict[int, ProfileReply] = {}
        self._num_answered = [0] * self._world_size
        self._results: list[deque[ModelRunnerOutput]] = [deque() for _ in self._links]
        self._kv_reports: list[KVConnectorOutput] = []
        self._aggregator = KVOutputAggregator(self._world_size)

    def close(self) -> None:
        """Close the channels; messages of these workers are lost."""
        for link in self._links:
            self._poller.remove(link)
            link.close()
        self._links = []

    def connect_workers(self, epoch: int) -> None:
        self.close()
        self._connect(epoch)

    def request_replacement(self, error: WorkerFailedError) -> None:
        """Disconnect all workers and have the supervisor replace them.

        The group has no workers until `connect_workers` is called.
        """
        logger.error("%s", error)
        self.close()
        self.is_ready = False
        index = self.first_index + error.rank
        self._supervisor.send(ProtocolViolation("worker", index, self.epoch, str(error)))

    @property
    def workers(self) -> list[WorkerReady]:
        """Return what the workers reported after loading, by rank; empty until all have loaded."""
        if not self._links or len(self._loaded) < len(self._links):
            return []
        return [self._loaded[rank] for rank in range(len(self._links))]

    @property
    def plan(self) -> PoolPlan:
        """Return the size of the KV pool, which is known once the first workers have loaded."""
        assert self._plan is not None, "the workers have not loaded"
        return self._plan

    @property
    def num_steps(self) -> int:
        """Number of steps and profile calls that all ranks have answered."""
        return min(self._num_answered) if self._links else 0

    @property
    def awaited_ranks(self) -> tuple[int, ...]:
        """Ranks that owe the engine a message: the result of a step, or one of their start."""
        ranks = range(len(self._links))
        if not self._initializing:
            return tuple(rank for rank in ranks if rank not in self._loaded)
        if len(self._cache_ready) < len(self._links):
            return tuple(rank for rank in ranks if rank not in self._cache_ready)
        return tuple(rank for rank in ranks if self._num_answered[rank] < self._num_sent)

    def send_step(self, output: SchedulerOutput) -> None:
        """Send a step to all ranks; never blocks. Raises WorkerFailedError if a worker stalls."""
        assert self.is_ready, "no worker accepts steps"
        if output.has_result:
            self._faults.begin_step()
        self._num_sent += 1
        self._send(output)

    def send_masks(self, masks: GrammarOutput) -> None:
        self._send(masks)

    def send_profile_call(self, action: ProfileAction) -> None:
        self._num_sent += 1
        self._num_profile_calls += 1
        self.profile_replies = {}
        self._send(ProfileCall(self.epoch, self._num_profile_calls, action))

    def load_adapter(self, lora_int_id: int, path: str, digest: bytes) -> None:
        """Have all ranks load an adapter; `pop_loaded_adapters` returns their answers."""
        self._adapter_loads[lora_int_id] = {}
        self._send(LoadAdapter(self.epoch, lora_int_id, path, digest))

    def drop_adapter(self, lora_int_id: int) -> None:
        """Have all ranks free an adapter. One that is still being loaded is not answered for.

        Its id must not be loaded again then: a rank may have answered already.
        """
        self._adapter_loads.pop(lora_int_id, None)
        self._send(DropAdapter(self.epoch, lora_int_id))

    def pop_loaded_adapters(self) -> list[list[AdapterLoaded]]:
        """Return the loads that all ranks have answered, with the answers by rank."""
        if not self._loaded_adapters:
            return self._loaded_adapters
        loaded, self._loaded_adapters = self._loaded_adapters, []
        return loaded

    @property
    def has_profile_replies(self) -> bool:
        """Whether all ranks have answered the last ProfileCall."""
        return len(self.profile_replies) == len(self._links)

    def receive_results(self) -> list[ModelRunnerOutput]:
        """Return the results of steps that all ranks have answered, in order; never blocks.

        A failed step has no result: its worker dies. Also starts workers that have loaded.
        Raises WorkerFailedError for an invalid message, ModelError if the ranks have loaded
        different models, or new workers another one than the first workers.
        """
        for rank, link in enumerate(self._links):
            for message in link.receive():
                self._process_message(rank, message)
            if link.num_undecodable:
                raise WorkerFailedError(rank, "sent a message that cannot be decoded")
        results = self._pop_complete_results()
        if not self.is_ready:
            self._continue_start()
        return results

    def pop_kv_reports(self) -> list[KVConnectorOutput]:
        """Return the workers' reports to the KV connector, in order; empties the list.

        Process them before results that were received at the same time. Each contains the
        transfers that the last missing rank has finished with it. A worker whose GPU or rank hangs
        in a step may still report, so reports are no progress while a step is owed.
        """
        reports, self._kv_reports = self._kv_reports, []
        if not self.awaited_ranks:
            self.num_kv_reports += len(reports)
        return reports

    def _send(self, message: msgspec.Struct) -> None:
        for rank, link in enumerate(self._links):
            try:
                link.send(message)
            except PeerStalledError as error:
                raise WorkerFailedError(rank, "does not read its steps") from error

    def _process_message(self, rank: int, message: FromWorker) -> None:
        if isinstance(message, WorkerReady) and message.protocol_version != PROTOCOL_VERSION:
            raise WorkerFailedError(
                rank,
                f"speaks protocol {message.protocol_version}, the engine {PROTOCOL_VERSION}",
            )
        if message.epoch != self.epoch:
            logger.warning("rank %d: dropped a message of epoch %d", rank, message.epoch)
        elif isinstance(message, ModelRunnerOutput):
            self._num_answered[rank] += 1
            if message.error is None:
                self._results[rank].append(message)
            else:  # the worker ends, and the supervisor reports its exit
                logger.error(
                    "rank %d failed in step %d: %s", rank, message.step, message.error.message
                )
        elif message.rank != rank:
            raise WorkerFailedError(rank, f"calls itself rank {message.rank}")
        elif isinstance(message, KVConnectorReport):
            self._kv_reports.append(self._aggregator.aggregate(message.output))
        elif isinstance(message, ProfileReply):
            self._num_answered[rank] += 1
            if message.number == self._num_profile_calls:
                self.profile_replies[rank] = message
        elif isinstance(message, AdapterLoaded):
            self._note_loaded_adapter(rank, message)
        elif isinstance(message, WorkerReady):
            self._loaded[rank] = message
        else:
            self._cache_ready.add(rank)

    def _note_loaded_adapter(self, rank: int, message: AdapterLoaded) -> None:
        """Note an answer to a load, unless the adapter was dropped meanwhile."""
        answers = self._adapter_loads.get(message.lora_int_id)
        if answers is None:
            return
        answers[rank] = message
        if len(answers) == len(self._links):
            self._loaded_adapters.append([answers[each] for each in sorted(answers)])
            del self._adapter_loads[message.lora_int_id]

    def _pop_complete_results(self) -> list[ModelRunnerOutput]:
        """Return rank 0's results of complete steps; all ranks must have sampled the same.

        An image has failed if any rank could not encode it.
        """
        complete: list[ModelRunnerOutput] = []
        while self._links and all(self._results):
            first, *others = [results.popleft() for results in self._results]
            for rank, other in enumerate(others, 1):
                if other.step != first.step:
                    raise WorkerFailedError(
                        rank, f"answered out of step: {other.step}, and rank 0 {first.step}"
                    )
                if other.sampled_token_ids != first.sampled_token_ids:
                    raise WorkerFailedError(
                        rank, f"has other tokens in step {first.step} than rank 0"
                    )
                if other.failed_mm_hashes:
                    failed = [*first.failed_mm_hashes, *other.failed_mm_hashes]
                    first = changed(first, failed_mm_hashes=failed)
            complete.append(first)
        return complete

    def _continue_start(self) -> None:
        """Send InitializeCache once all ranks have loaded; ready once all have their KV tensors."""
        workers = self.workers
        if not workers:
            return
        if not self._initializing:
            if self._plan is None:
                check_ranks(workers)
                self._first_workers = workers
                self._plan = plan_pool(workers, self._config, self._max_position)
            _check_same_model(self._first_workers, workers)
            message = InitializeCache(
                PROTOCOL_VERSION,
                self.epoch,
                self._plan.num_blocks,
                self._plan.block_size,
                self._plan.max_model_len,
                workers[0].fingerprint,
                self._plan.num_state_slots,
            )
            for link in self._links:
                link.send(message)
            self._initializing = True
        if len(self._cache_ready) == len(self._links):
            self.is_ready = True
            self._supervisor.send(WorkersReady(self.epoch))


class KVOutputAggregator:
    """Joins the KV connector reports of `num_ranks` workers.

    A transfer of a request is finished when all ranks have reported it. Invalid blocks are passed
    on at once, because the KV of the other ranks is useless without the missing part.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._sending: dict[int, int] = {}  # ranks that have not reported, by seq_id
        self._recving: dict[int, int] = {}

    def aggregate(self, output: KVConnectorOutput) -> KVConnectorOutput:
        """Return a rank's report with only those seq_ids that all ranks have finished by now."""
        if self._num_ranks == 1:
            return output
        return KVConnectorOutput(
            self._finished_by_all(self._sending, output.finished_sending),
            self._finished_by_all(self._recving, output.finished_recving),
            output.invalid_block_ids,
            output.worker_metadata,
        )

    def _finished_by_all(self, num_missing: dict[int, int], seq_ids: Sequence[int]) -> list[int]:
        finished = []
        for seq_id in seq_ids:
            num_missing[seq_id] = num_missing.get(seq_id, self._num_ranks) - 1
            if not num_missing[seq_id]:
                del num_missing[seq_id]
                finished.append(seq_id)
        return finished


def _check_same_model(first: list[WorkerReady], workers: list[WorkerReady]) -> None:
    """Raise ModelError if the KV of new workers does not fit the pool and the tokens so far."""
    for before, now in zip(first, workers, strict=True):
        for field in ("geometry", "vocab_size", "fingerprint"):
            if getattr(before, field) != getattr(now, field):
                raise ModelError(
                    f"rank {now.rank} came back with another {field.replace('_', ' ')}: "
                    "the model was changed while it was served"
                )
