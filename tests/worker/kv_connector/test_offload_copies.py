"""Copies of offloaded blocks: host memory by threads, device memory on a stream."""

import random
import threading

import numpy as np
import pytest
import torch

from proto.messages.kv_connector import DeviceBlocks, TransferJob
from tests.fakes.copy_streams import CopyingThread, FakeStream, NoWatcher
from tests.fakes.fake_device import FakeDevice, on_host
from worker.cuda.block_copies import DeviceBlockBytes, DeviceCopies, EventWatcher
from worker.host.block_copies import HostCopies
from worker.kv_connector.offload.base import STORE_NICENESS, OffloadingHandler, TransferResult

BLOCK_BYTES, NUM_BLOCKS, NUM_SLOTS = 48, 12, 5
LIMIT_SECONDS = 20.0


def transfer(job_id: int, is_load: bool, blocks: list[int], slots: list[int], skip: int = 0):
    return TransferJob(job_id, "CPU", is_load, [DeviceBlocks(0, blocks, skip)], [slots])


class Notifications:
    """Counts notifications and lets a test wait for the next one."""

    def __init__(self) -> None:
        self._rung = threading.Semaphore(0)

    def notify(self) -> None:
        self._rung.release()

    def wait(self) -> None:
        assert self._rung.acquire(timeout=LIMIT_SECONDS)


class HostSide:
    """Blocks and pool of random bytes in host memory, with one copy thread per direction."""

    def __init__(self, factor: int) -> None:
        draw = np.random.default_rng(factor)
        self.blocks = draw.integers(0, 256, (NUM_BLOCKS, BLOCK_BYTES), dtype=np.uint8)
        self.pool = draw.integers(0, 256, (NUM_SLOTS, factor, BLOCK_BYTES), dtype=np.uint8)
        self.notifications = Notifications()
        self.store = HostCopies(self.blocks, self.pool, self.notifications.notify, STORE_NICENESS)
        self.load = HostCopies(self.blocks, self.pool, self.notifications.notify, 0)

    def close(self) -> None:
        self.store.close()
        self.load.close()


@pytest.mark.parametrize("factor", [1, 2, 4])
def test_host_copies_equal_a_simple_loop(factor: int) -> None:
    rng = random.Random(factor)
    side = HostSide(factor)
    blocks, pool = side.blocks.copy(), side.pool.copy()
    for job_id in range(40):
        slots = rng.sample(range(NUM_SLOTS), rng.randint(1, 3))
        skip = rng.randrange(factor)
        count = rng.randint((len(slots) - 1) * factor + 1 - skip, len(slots) * factor - skip)
        ids = rng.sample(range(NUM_BLOCKS), max(1, min(count, NUM_BLOCKS)))
        is_load = rng.random() < 0.5
        handler: OffloadingHandler = side.load if is_load else side.store
        handler.transfer_async(transfer(job_id, is_load, ids, slots, skip))
        handler.wait({job_id})
        for at, block in enumerate(ids, skip):
            slot, part = slots[at // factor], at % factor
            if is_load:
                blocks[block] = pool[slot, part]
            else:
                pool[slot, part] = blocks[block]
        (result,) = handler.get_finished()
        assert result.job_id == job_id
        assert result.succeeded
        assert result.num_bytes == len(ids) * BLOCK_BYTES
        assert result.failed_blocks == []
        assert np.array_equal(side.blocks, blocks)
        assert np.array_equal(side.pool, pool)
    side.close()


def test_host_copies_notify_when_a_copy_ends() -> None:
    side = HostSide(1)
    side.store.transfer_async(transfer(1, False, [3], [0]))
    side.notifications.wait()
    assert [result.job_id for result in side.store.get_finished()] == [1]
    assert side.store.get_finished() == []
    side.close()


def test_host_copies_are_made_in_order() -> None:
    side = HostSide(1)
    for job_id in range(200):
        side.store.transfer_async(transfer(job_id, False, [job_id % NUM_BLOCKS], [0]))
    side.store.wait({199})
    assert [result.job_id for result in side.store.get_finished()] == list(range(200))
    assert np.array_equal(side.pool[0, 0], side.blocks[199 % NUM_BLOCKS])
    side.close()


def test_host_copies_end_with_close() -> None:
    side = HostSide(1)
    for job_id in range(500):
        side.load.transfer_async(transfer(job_id, True, [1], [job_id % NUM_SLOTS]))
    side.close()
    assert not side.load._thread.is_alive()
    assert not side.store._thread.is_alive()


@pytest.mark.parametrize("is_load", [True, False])
def test_a_slot_beyond_the_pool_fails_the_copy(is_load: bool) -> None:
    """Ranks have different numbers of heads: a slot beyond a rank's pool fails the copy."""
    side = HostSide(1)
    handler = side.load if is_load else side.store
    handler.transfer_async(transfer(1, is_load, [3, 4], [0, NUM_SLOTS]))
    handler.wait({1})
    (result,) = handler.get_finished()
    assert not result.succeeded
    assert result.failed_blocks == ([3, 4] if is_load else [])
    side.close()


@pytest.mark.parametrize("is_load", [True, False])
def test_an_error_fails_only_its_copy(is_load: bool) -> None:
    side = HostSide(1)
    handler = side.load if is_load else side.store
    handler.transfer_async(transfer(1, is_load, [3, NUM_BLOCKS + 7], [0, 1]))
    handler.transfer_async(transfer(2, is_load, [4], [2]))
    side.notifications.wait()
    side.notifications.wait()
    handler.wait({1, 2})
    failed, copied = handler.get_finished()
    assert (failed.job_id, failed.succeeded) == (1, False)
    assert failed.failed_blocks == ([3, NUM_BLOCKS + 7] if is_load else [])
    assert (copied.job_id, copied.succeeded) == (2, True)
    side.close()


def test_a_copy_interrupted_by_close_has_failed() -> None:
    side = HostSide(1)
    side.close()
    result = side.load._try_copy(transfer(1, True, [3, 4], [0, 1]))
    assert (result.succeeded, result.failed_blocks) == (False, [3, 4])


class DeviceSide:
    """Blocks on a fake device, and a pool in its pinned memory."""

    def __init__(self) -> None:
        self.device = FakeDevice()
        blocks = torch.randint(0, 256, (NUM_BLOCKS, BLOCK_BYTES), dtype=torch.uint8)
        self.blocks = self.device.adopt(blocks)
        self.pool = self.device.pinned(NUM_SLOTS * 2 * BLOCK_BYTES)
        self.pool = self.pool.view(NUM_SLOTS, 2, BLOCK_BYTES)
        self.stream = FakeStream(self.device)
        self.watcher = NoWatcher()
        self.copies = DeviceCopies(self.blocks, self.pool, self.stream, self.watcher)

    def results(self) -> list[TransferResult]:
        return self.copies.get_finished()


def test_device_copies_follow_earlier_steps_and_end_with_their_event() -> None:
    side = DeviceSide()
    held = on_host(side.blocks).clone()
    side.stream.compute()
    side.copies.transfer_async(transfer(1, False, [3, 4, 5], [0, 1]))
    side.stream.compute()
    side.copies.transfer_async(transfer(2, False, [6], [2], skip=1))
    assert side.results() == [], "the device has not reached the copy"
    results = side.results()
    assert [(each.job_id, each.num_bytes) for each in results] == [(1, 3 * BLOCK_BYTES)]
    assert torch.equal(side.pool[0], held[3:5])
    assert torch.equal(side.pool[1, 0], held[5])
    side.copies.wait({2})
    side.results()
    assert torch.equal(side.pool[2, 1], held[6])


def test_device_loads_write_the_right_block() -> None:
    side = DeviceSide()
    side.pool.copy_(torch.randint(0, 256, side.pool.shape, dtype=torch.uint8))
    side.copies.transfer_async(transfer(1, True, [9], [4], skip=1))
    side.copies.wait({1})
    assert [each.job_id for each in side.results() + side.results()] == [1]
    assert torch.equal(on_host(side.blocks)[9], side.pool[4, 1])


def test_closing_device_copies_waits_for_the_device() -> None:
    side = DeviceSide()
    side.copies.transfer_async(transfer(1, False, [3], [0]))
    side.copies.close()
    assert side.device.completed == side.device.queued
    assert side.watcher.closed


def test_a_device_copy_beyond_the_pool_fails() -> None:
    side = DeviceSide()
    side.copies.transfer_async(transfer(1, True, [3, 7], [NUM_SLOTS]))
    (result,) = side.results()
    assert (result.succeeded, result.failed_blocks) == (False, [3, 7])
    assert side.device.queued == 0


def test_the_event_watcher_notifies_when_events_are_reached() -> None:
    notifications = Notifications()
    reached = threading.Event()

    class StepEvent:
        def record(self) -> None: ...

        def query(self) -> bool:
            return reached.is_set()

        def synchronize(self) -> None:
            assert reached.wait(LIMIT_SECONDS)

    watcher = EventWatcher(notifications.notify)
    watcher.watch(StepEvent())
    reached.set()
    notifications.wait()
    watcher.close()
    assert not watcher._thread.is_alive()


def test_device_blocks_are_copied_out_and_in_through_a_pinned_page() -> None:
    device = FakeDevice()
    held = torch.randint(0, 256, (NUM_BLOCKS, BLOCK_BYTES), dtype=torch.uint8)
    rows = device.adopt(held.clone())
    blocks = DeviceBlockBytes(rows, device, CopyingThread(device))
    sevens, eights = device.pinned(BLOCK_BYTES).fill_(7), device.pinned(BLOCK_BYTES).fill_(8)
    rows[3].copy_(sevens, non_blocking=True)  # written by a queued step
    wait = blocks.record_steps()
    rows[4].copy_(eights, non_blocking=True)  # written by a later step
    wait()
    assert device.completed < device.queued, "the copy does not wait for later steps"
    memory = bytearray(BLOCK_BYTES)
    blocks.copy_out(3, memoryview(memory))
    assert bytes(memory) == bytes([7]) * BLOCK_BYTES
    blocks.copy_in(memoryview(held[9].numpy()), 5)
    assert torch.equal(on_host(rows)[5], held[9])
    assert torch.equal(on_host(rows)[6], held[6])
