"""A scheduler with the offloading connector's scheduler half, and workers whose memory is a dict.

A copy moves the digests that a PagedRunner keeps in its slots, late: when the test finishes the
copy. So the runner, which reads every position back, detects a block that is reallocated during its
copy or found before it is loaded.
"""

from collections.abc import Callable, Sequence
from typing import Any

from engine_core.kv_cache.pool import TransferRefs
from engine_core.kv_connector.base import SchedulerConnector, SchedulerContext
from engine_core.kv_connector.offload.connector import OffloadingScheduler
from engine_core.request import Request
from engine_core.scheduler.features.base import NO_OBSERVER, SchedulerObserver, Unblock
from engine_core.scheduler.features.speculative_decoding import DraftProvider
from engine_core.scheduler.kv_transfer import IsStorable
from engine_core.scheduler.request_lifecycle import OutputsByFrontEnd
from engine_core.scheduler.scheduler import Scheduler
from proto.messages.engine_io import EngineCoreOutput
from proto.messages.kv_connector import (
    NO_PAYLOAD,
    FinishedJob,
    KVConnectorOutput,
    LoadFailurePolicy,
    OffloadMetadata,
    OffloadReport,
    TransferJob,
    pack,
    unpack,
)
from proto.messages.lifecycle import RECURRENT_STATE, KVCacheGeometry, KVGroup
from proto.messages.scheduler_output import SchedulerOutput
from proto.settings.config import SchedulerConfig, ServeConfig
from proto.settings.kv_transfer_config import KVTransferConfig
from tests.fakes.engine_harness import VOCAB_SIZE, EngineHarness
from tests.fakes.paged_runner import PagedRunner

BYTES_PER_TOKEN = 64
JUNK = b"not loaded"
Content = dict[int, bytes]


def device_of(job: TransferJob) -> list[int]:
    """Return the device blocks of a copy."""
    return [block for each in job.device for block in each.block_ids]


def groups_of(windows: Sequence[int | None], num_state_slots: int) -> tuple[KVGroup, ...]:
    """Return the groups of a model; that of states is the last."""
    states = [KVGroup(kind=RECURRENT_STATE)] if num_state_slots else []
    return (*map(KVGroup, windows), *states)


class FakeOffloadWorkers:
    """The workers' side of the connector, for all ranks.

    under_way: copies in progress, oldest first. content: the content of offloaded blocks: by (slot,
    part), then by offset in a device block. states: the offloaded states by slot of the medium.
    """

    def __init__(self, factor: int, num_ranks: int) -> None:
        self.factor = factor
        self.num_ranks = num_ranks
        self.under_way: list[TransferJob] = []
        self.put_off: list[TransferJob] = []
        self.flushed: list[int] = []
        self.content: dict[tuple[int, int], Content] = {}
        self.states: dict[int, bytes] = {}
        self._seq_ids: dict[int, int] = {}

    def begin(self, metadata: OffloadMetadata) -> None:
        """Begin the deferred copies, then the loads of a step."""
        self.under_way += self.put_off + metadata.loads
        self.put_off = list(metadata.stores)
        self.flushed += metadata.flush
        for job, seq_id in zip(metadata.loads, metadata.load_seq_ids, strict=True):
            self._seq_ids[job.job_id] = seq_id

    def finish(
        self, job: TransferJob, runner: PagedRunner, succeeds: bool = True
    ) -> list[KVConnectorOutput]:
        """Make a copy; yield the reports of the ranks.

        A failing copy fails on the last rank only.
        """
        self.under_way.remove(job)
        self._copy(job, runner, succeeds)
        failed = [block for each in job.device for block in each.block_ids]
        seq_id = self._seq_ids.pop(job.job_id, None)
        if seq_id in self._seq_ids.values():
            seq_id = None  # it waits for another copy, too
        reports = []
        for rank in range(self.num_ranks):
            is_last = rank == self.num_ranks - 1
            is_bad = job.is_load and is_last and not succeeds
            done = FinishedJob(job.job_id, succeeds or not is_last, 100, 0.5)
            reports.append(
                KVConnectorOutput(
                    finished_recving=[seq_id] if is_last and seq_id is not None else [],
                    invalid_block_ids=failed if is_bad and not job.is_of_states else [],
                    worker_metadata=pack(OffloadReport([done])),
                    invalid_state_slots=failed if is_bad and job.is_of_states else [],
                )
            )
        return reports

    def _copy(self, job: TransferJob, runner: PagedRunner, succeeds: bool) -> None:
        if job.is_of_states:
            ((slot,),), (device,) = job.slots, job.device
            (state,) = device.block_ids
            if job.is_load:
                runner.states[state] = self.states[slot] if succeeds else JUNK
            else:
                self.states[slot] = runner.states[state]
            return
        for device, slots in zip(job.device, job.slots, strict=True):
            for at, block in enumerate(device.block_ids, device.skip):
                place = (slots[at // self.factor], at % self.factor)
                offsets = range(runner.block_size)
                if not job.is_load:
                    self.content[place] = {each: runner.slots[block, each] for each in offsets}
                    continue
                for offset in offsets:
                    held = self.content[place][offset]
                    runner.slots[block, offset] = held if succeeds else JUNK


class OffloadRig(EngineHarness):
    """An engine harness with an offloading connector.

    size: tokens of an offloaded block. num_slots: capacity of the medium, in blocks and in states.
    num_state_slots: of the pool of recurrent states; 0: the model has none. finishes: called for
    every copy in progress after a step; returns None while it runs, else whether it succeeded.
    """

    def __init__(
        self,
        *,
        num_slots: int = 1000,
        block_size: int = 4,
        size: int = 12,
        num_blocks: int = 1000,
        num_ranks: int = 1,
        windows: Sequence[int | None] = (None,),
        num_state_slots: int = 0,
        finishes: Callable[[TransferJob], bool | None] = lambda job: True,
        role: str = "kv_both",
        extra: dict[str, Any] | None = None,
        load_failure_policy: LoadFailurePolicy = "recompute",
        drafting: DraftProvider | None = None,
        num_dropped_blocks: int = 0,
        serve_config: ServeConfig | None = None,
        observer: SchedulerObserver = NO_OBSERVER,
        **scheduler: Any,
    ) -> None:
        super().__init__(
            num_blocks=num_blocks,
            block_size=block_size,
            windows=windows,
            groups=(groups := groups_of(windows, num_state_slots)),
            num_state_slots=num_state_slots,
            num_dropped_blocks=num_dropped_blocks,
            **scheduler,
        )
        slot_bytes = size * BYTES_PER_TOKEN * num_ranks
        transfer = KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role=role,  # type: ignore[arg-type]
            kv_connector_extra_config={
                "cpu_bytes_to_use": num_slots * slot_bytes * (2 if num_state_slots else 1),
                "block_size": size,
                **(extra or {}),
            },
        )
        state_bytes = size * BYTES_PER_TOKEN if num_state_slots else 0
        geometry = KVCacheGeometry(
            1, 1, 8, "float32", BYTES_PER_TOKEN, groups, state_bytes=state_bytes
        )
        self.finishes = finishes
        self.trusts = True
        self.num_ranks = num_ranks
        self.loads: list[TransferJob] = []
        self.stores: list[TransferJob] = []
        self.half = FakeOffloadWorkers(size // block_size, num_ranks)

        def connect(
            holds: TransferRefs, unblock: Unblock, is_storable: IsStorable
        ) -> SchedulerConnector:
            context = SchedulerContext(
                geometry,
                block_size,
                num_blocks,
                b"f" * 32,
                num_ranks,
                holds,
                self.kv_cache.block_ids,
                unblock,
                serve_config or ServeConfig(),
                is_storable=lambda seq_id: self.trusts and is_storable(seq_id),
                state_slots=self.kv_cache if num_state_slots else None,
            )
            self.offloading = OffloadingScheduler(transfer, context)
            return self.offloading

        self.scheduler = Scheduler(
            SchedulerConfig(**{"max_num_batched_tokens": 8192, **scheduler}),
            self.kv_cache,
            epoch=1,
            max_model_len=8192,
            vocab_size=VOCAB_SIZE,
            connect=connect,
            load_failure_policy=load_failure_policy,
            drafting=drafting,
            observer=observer,
        )

    def collect(self, output: SchedulerOutput) -> dict[int, list[EngineCoreOutput]]:
        if output.connector_metadata != NO_PAYLOAD:
            metadata = unpack(output.connector_metadata, OffloadMetadata)
            self.loads += metadata.loads
            self.stores += metadata.stores
        else:
            metadata = OffloadMetadata()
        self.half.begin(metadata)
        for job in list(self.half.under_way):
            if job.job_id in metadata.flush:
                self.finish(job)
        outputs = super().collect(output)
        self.finish_some()
        return outputs

    def finish_some(self) -> None:
        """Finish the copies that are due by now."""
        for job in list(self.half.under_way):
            succeeds = self.finishes(job)
            if succeeds is not None:
                self.finish(job, succeeds)

    def finish(self, job: TransferJob, succeeds: bool = True) -> None:
        """Finish a copy and report it."""
        for report in self.half.finish(job, self.runner, succeeds):
            self.record_outputs(self.scheduler.update_from_connector(report))

    def lose_workers(self, epoch: int = 2) -> OutputsByFrontEnd:
        """Replace the workers; their memory is lost."""
        self.half = FakeOffloadWorkers(self.half.factor, self.num_ranks)
        return super().lose_workers(epoch)

    def run_until_idle(self, max_steps: int = 2000) -> None:
        """Step until all requests and copies have finished."""
        while self.scheduler.num_unfinished or self.scheduler.has_work or self.half.under_way:
            max_steps -= 1
            assert max_steps > 0, "requests or copies that never finish"
            self.step()
            self.finish_some()

    def generate(self, prompt: list[int], max_tokens: int = 1, **params: object) -> Request:
        """Run a request to its end, including its copies."""
        request = self.add_one(prompt, max_tokens, **params)
        self.run_until_idle()
        return request

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache."""
        assert self.scheduler.reset_prefix_cache()

    def assert_idle(self) -> None:
        super().assert_idle()
        assert not self.half.under_way
        assert not self.half.put_off
        assert self.kv_cache.num_copied == 0
