"""The worker side of the offloading connector: when copies start and how they are reported."""

import select
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from proto.errors import ConfigError
from proto.messages.kv_connector import (
    NO_PAYLOAD,
    DeviceBlocks,
    OffloadMetadata,
    OffloadReport,
    TransferJob,
    pack,
    unpack,
)
from proto.settings.kv_media import HEADER_BYTES, KEY_BYTES
from proto.settings.kv_transfer_config import KVTransferConfig
from tests.fakes.devices import CPU
from worker.attention.kv_cache import KVCache, StateShape, kv_cache_geometry, kv_layout
from worker.attention.state_cache import StateCache
from worker.kv_connector.base import WorkerContext
from worker.kv_connector.offload.connector import OffloadingWorker

BLOCK_SIZE = 4
NUM_BLOCKS = 10
FLUSHED = 3


def make_cache(dtype: torch.dtype = torch.float32) -> KVCache:
    layout = kv_layout([None, None])
    geometry = kv_cache_geometry(layout, 2, 8, dtype)
    cache = KVCache(geometry, layout, NUM_BLOCKS, BLOCK_SIZE)
    raw = cache.buffer.view(NUM_BLOCKS, -1).view(torch.uint8)
    raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8))
    return cache


def rows(cache: KVCache) -> torch.Tensor:
    return cache.buffer.view(NUM_BLOCKS, -1).view(torch.uint8)


def make(cache: KVCache, **extra: Any) -> OffloadingWorker:
    config = KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_connector_extra_config={"cpu_bytes_to_use": 1 << 20, **extra},
    )
    worker = OffloadingWorker(config, WorkerContext(0, 1, b"f" * 32, BLOCK_SIZE, CPU))
    worker.register_kv_caches(cache)
    return worker


def step(worker: OffloadingWorker, metadata: OffloadMetadata | None = None) -> None:
    """Call the connector as the worker's loop does around a step, without the report."""
    worker.bind_connector_metadata(NO_PAYLOAD if metadata is None else pack(metadata))
    worker.handle_preemptions()
    worker.start_load_kv()
    worker.wait_for_save()


def await_report(worker: OffloadingWorker) -> tuple[list[int], list[int], list[int]]:
    """Return (loaded sequence ids, invalid blocks, finished jobs) of the next report."""
    poll = select.poll()
    poll.register(worker.fileno(), select.POLLIN)
    assert poll.poll(20_000), "no copy ended in time"
    finished = worker.get_finished([])
    metadata = worker.build_connector_worker_meta()
    jobs = [] if metadata == NO_PAYLOAD else unpack(metadata, OffloadReport).finished
    assert finished.sending == []
    return finished.recving, worker.get_block_ids_with_load_errors(), [job.job_id for job in jobs]


def store(job_id: int, blocks: list[int], slots: list[int]) -> TransferJob:
    return TransferJob(job_id, "CPU", False, [DeviceBlocks(0, blocks)], [slots])


def load(job_id: int, blocks: list[int], slots: list[int]) -> TransferJob:
    return TransferJob(job_id, "CPU", True, [DeviceBlocks(0, blocks)], [slots])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_stored_blocks_are_loaded_bit_by_bit(dtype: torch.dtype) -> None:
    """A block holds every layer, K and V, and the int8 scales."""
    cache = make_cache(dtype)
    worker = make(cache)
    before = rows(cache)[[3, 7]].clone()
    step(worker, OffloadMetadata(stores=[store(1, [3, 7], [5, 2])]))
    step(worker)
    assert await_report(worker) == ([], [], [1])
    rows(cache)[[3, 7]] = 0
    step(worker, OffloadMetadata(loads=[load(2, [4, 8], [5, 2])], load_seq_ids=[77]))
    assert await_report(worker) == ([77], [], [2])
    assert torch.equal(rows(cache)[[4, 8]], before)
    worker.close()


def test_stores_start_with_the_following_step() -> None:
    worker = make(make_cache())
    started: list[int] = []
    worker._start_copy = lambda job: started.append(job.job_id)  # type: ignore[method-assign]
    step(worker, OffloadMetadata(stores=[store(1, [3], [0])]))
    assert started == []
    metadata = OffloadMetadata(
        loads=[load(2, [4], [1])], stores=[store(3, [5], [2])], load_seq_ids=[7]
    )
    step(worker, metadata)
    assert started == [1, 2]
    step(worker)
    assert started == [1, 2, 3]
    worker.close()


def test_handle_preemptions_waits_for_the_flushed_jobs() -> None:
    cache = make_cache()
    worker = make(cache)
    step(worker, OffloadMetadata(stores=[store(FLUSHED, [3], [0])]))
    worker.bind_connector_metadata(pack(OffloadMetadata(flush=[FLUSHED, 1000])))
    worker.handle_preemptions()
    assert [
        job.job_id for handler in worker._handlers.values() for job in handler.get_finished()
    ] == [FLUSHED]
    worker.close()


def test_get_finished_reports_a_job_once() -> None:
    worker = make(make_cache())
    step(worker, OffloadMetadata(stores=[store(1, [3], [0])]))
    step(worker)
    await_report(worker)
    assert worker.get_finished([]) == ([], [])
    assert worker.build_connector_worker_meta() == NO_PAYLOAD
    poll = select.poll()
    poll.register(worker.fileno(), select.POLLIN)
    assert poll.poll(0) == []
    worker.close()


def test_a_failed_load_names_its_blocks() -> None:
    worker = make(make_cache())
    step(worker, OffloadMetadata(loads=[load(1, [4, 8], [0, 10**6])], load_seq_ids=[77]))
    assert await_report(worker) == ([77], [4, 8], [1])
    assert worker.get_block_ids_with_load_errors() == []
    worker.close()


def test_register_kv_caches_refuses_a_pool_beyond_the_free_memory() -> None:
    with pytest.raises(ConfigError, match="cpu_bytes_to_use is more than"):
        make(make_cache(), cpu_bytes_to_use=1 << 60)


def test_offloaded_blocks_of_several_device_blocks_are_loaded() -> None:
    cache = make_cache()
    worker = make(cache, block_size=2 * BLOCK_SIZE)
    before = rows(cache)[[1, 2, 3, 4]].clone()
    step(worker, OffloadMetadata(stores=[store(1, [1, 2, 3, 4], [1, 0])]))
    step(worker)
    await_report(worker)
    job = TransferJob(2, "CPU", True, [DeviceBlocks(0, [5, 6], skip=1)], [[1, 0]])
    step(worker, OffloadMetadata(loads=[job], load_seq_ids=[7]))
    await_report(worker)
    assert torch.equal(rows(cache)[[5, 6]], before[1:3])
    worker.close()


SHAPE = StateShape((12, 5))


def make_states() -> StateCache:
    states = StateCache(SHAPE, 6, BLOCK_SIZE)
    states.buffer.copy_(torch.randn(states.buffer.shape))
    return states


def make_with_states(states: StateCache, **extra: Any) -> tuple[KVCache, OffloadingWorker]:
    layout = replace(kv_layout([None]), states=SHAPE)
    cache = KVCache(kv_cache_geometry(layout, 2, 8, torch.float32), layout, NUM_BLOCKS, BLOCK_SIZE)
    worker = make(cache, **extra)
    worker.register_states(states)
    return cache, worker


def of_state(job_id: int, slot: int, medium_slot: int, *, is_load: bool) -> TransferJob:
    return TransferJob(
        job_id, "CPU", is_load, [DeviceBlocks(1, [slot])], [[medium_slot]], is_of_states=True
    )


def test_a_request_waits_for_its_kv_and_its_state() -> None:
    """Both have their own slots of the medium: slot 0 has a block and a state."""
    states = make_states()
    cache, worker = make_with_states(states)
    rows(cache)[3] = 7
    before = states.buffer[4].clone()
    stores = [store(1, [3], [0]), of_state(2, 4, 0, is_load=False)]
    step(worker, OffloadMetadata(stores=stores))
    step(worker)
    done: list[int] = []
    while len(done) < 2:
        done += await_report(worker)[2]
    rows(cache)[3] = 0
    states.buffer.zero_()
    loads = [load(3, [5], [0]), of_state(4, 2, 0, is_load=True)]
    step(worker, OffloadMetadata(loads=loads, load_seq_ids=[77, 77]))
    received, finished = [], []
    while len(finished) < 2:
        loaded, invalid, jobs = await_report(worker)
        received += loaded
        finished += jobs
        assert invalid == []
        assert bool(received) == (len(finished) == 2), "the request waits for both"
    assert received == [77]
    assert torch.equal(states.buffer[2], before)
    assert bool((rows(cache)[5] == 7).all())
    assert states.buffer[[0, 1, 3, 4, 5]].count_nonzero() == 0
    worker.close()


def test_a_state_that_cannot_be_loaded_is_reported_as_a_slot() -> None:
    """The medium has no such slot."""
    _, worker = make_with_states(make_states())
    step(
        worker,
        OffloadMetadata(loads=[of_state(1, 2, 10**9, is_load=True)], load_seq_ids=[5]),
    )
    assert await_report(worker) == ([5], [], [1])
    assert worker.get_state_slots_with_load_errors() == [2]
    assert worker.get_state_slots_with_load_errors() == []
    worker.close()


def test_states_have_a_share_of_the_memory_and_files_of_their_own(tmp_path: Path) -> None:
    states = make_states()
    _, worker = make_with_states(states, cpu_bytes_to_use=1 << 20, state_share=0.25)
    pools = [
        len(handlers["GPU", "CPU"]._pool)  # type: ignore[attr-defined]
        for handlers in (worker._handlers, worker._state_handlers)
    ]
    assert pools == [3 * 2**18 // (2 * 2 * 8 * 4 * BLOCK_SIZE), 2**18 // SHAPE.slot_bytes]
    worker.close()
    extra = {"disk_path": str(tmp_path / "kv"), "disk_bytes_to_use": 1 << 20}
    config = KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_connector_extra_config={"spec_name": "DiskOffloadingSpec", **extra},
    )
    on_disk = OffloadingWorker(config, WorkerContext(0, 1, b"f" * 32, BLOCK_SIZE, CPU))
    layout = replace(kv_layout([None]), states=SHAPE)
    geometry = kv_cache_geometry(layout, 2, 8, torch.float32)
    on_disk.register_kv_caches(KVCache(geometry, layout, NUM_BLOCKS, BLOCK_SIZE))
    on_disk.register_states(states)
    key = bytes(KEY_BYTES)
    kv, state = (
        TransferJob(1, "disk", False, [DeviceBlocks(0, [3])], keys=[[key]]),
        TransferJob(2, "disk", False, [DeviceBlocks(1, [3])], keys=[[key]], is_of_states=True),
    )
    step(on_disk, OffloadMetadata(stores=[kv, state]))
    step(on_disk)
    done: list[int] = []
    while len(done) < 2:
        done += await_report(on_disk)[2]
    on_disk.close()
    found = {
        path.relative_to(tmp_path / "kv").parts[0][-4:]: path.stat().st_size - HEADER_BYTES
        for path in (tmp_path / "kv").rglob("*.0")
    }
    assert found == {"-1x1": 2 * 2 * 8 * 4 * BLOCK_SIZE, "-1x0": SHAPE.slot_bytes}
