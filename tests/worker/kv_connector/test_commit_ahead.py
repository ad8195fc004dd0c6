"""Committing a pool's pages ahead of the first write, without changing their content."""

import mmap
import threading
from pathlib import Path

import pytest
import torch

from worker.kv_connector.offload.cpu_medium import CommitAhead
from worker.large_pages import large_pages

MIB = 1 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def can_commit() -> bool:
    """Return whether the kernel supports MADV_POPULATE_WRITE, found independently."""
    with mmap.mmap(-1, mmap.PAGESIZE) as memory:
        try:
            memory.madvise(23)
        except OSError:
            return False
    return True


@pytest.mark.skipif(not can_commit(), reason="the system does not commit memory on demand")
def test_memory_is_committed_and_keeps_what_it_holds() -> None:
    memory = large_pages(64 * MIB)
    memory[5 * MIB : 6 * MIB].fill_(7)
    before = resident_bytes()
    CommitAhead(memory[MIB + 5 : 60 * MIB]).wait()
    assert resident_bytes() - before > 50 * MIB
    assert memory.sum(dtype=torch.int64).item() == 7 * MIB


def test_all_of_it_is_asked_for_and_nothing_around_it() -> None:
    memory = large_pages(64 * MIB)
    part = memory[MIB + 5 : 9 * MIB + 7]
    asked: list[tuple[int, int]] = []

    def commit(address: int, num_bytes: int) -> bool:
        asked.append((address - memory.data_ptr(), num_bytes))
        return True

    CommitAhead(part, commit).wait()
    assert [begin for begin, _ in asked] == [MIB + 4096 + 2 * MIB * each for each in range(4)]
    assert sum(num_bytes for _, num_bytes in asked) == 8 * MIB - 4096


def test_it_ends_when_the_pool_does() -> None:
    first, goes_on = threading.Event(), threading.Event()
    asked = []

    def commit(address: int, num_bytes: int) -> bool:
        asked.append(address)
        first.set()
        return goes_on.wait(10.0)

    ahead = CommitAhead(large_pages(64 * MIB), commit)
    assert first.wait(10.0)
    closing = threading.Thread(target=ahead.close)
    closing.start()
    while not ahead._closed.is_set():
        first.wait(0.001)
    goes_on.set()
    closing.join()
    ahead.wait()
    assert len(asked) == 1


def test_a_system_that_cannot_is_asked_once() -> None:
    asked = []

    def commit(address: int, num_bytes: int) -> bool:
        asked.append(address)
        return False

    CommitAhead(large_pages(64 * MIB), commit).wait()
    assert len(asked) == 1
