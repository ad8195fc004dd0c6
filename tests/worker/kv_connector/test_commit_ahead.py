"""Committing a pool's pages ahead of the first write, without changing their content."""

import mmap
import threading
from pathlib import Path

import pytest
import torch

from worker.host.block_copies import CommitAhead
from worker.host.large_pages import large_pages

MIB = 1 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def can_commit() -> bool:
    """Return whether the kernel supports MADV_POPULATE_WRITE, by a call of our own."""
    with mmap.mmap(-1, mmap.PAGESIZE) as memory:
        try:
            memory.madvise(23)
        except OSError:
            return False
    return True


@pytest.mark.skipif(not can_commit(), reason="the system does not commit memory on demand")
def test_committed_memory_keeps_its_content() -> None:
    memory = large_pages(64 * MIB)
    memory[5 * MIB : 6 * MIB].fill_(7)
    before = resident_bytes()
    CommitAhead(memory[MIB + 5 : 60 * MIB]).wait()
    assert resident_bytes() - before > 50 * MIB
    assert memory.sum(dtype=torch.int64).item() == 7 * MIB


def test_all_pages_of_the_pool_are_committed_and_no_others() -> None:
    memory = large_pages(64 * MIB)
    part = memory[MIB + 5 : 9 * MIB + 7]
    committed: list[tuple[int, int]] = []

    def commit(address: int, num_bytes: int) -> bool:
        committed.append((address - memory.data_ptr(), num_bytes))
        return True

    CommitAhead(part, commit).wait()
    assert [begin for begin, _ in committed] == [MIB + 4096 + 2 * MIB * each for each in range(4)]
    assert sum(num_bytes for _, num_bytes in committed) == 8 * MIB - 4096


def test_committing_ends_when_the_pool_is_freed() -> None:
    first, goes_on = threading.Event(), threading.Event()
    committed = []

    def commit(address: int, num_bytes: int) -> bool:
        committed.append(address)
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
    assert len(committed) == 1


def test_committing_stops_at_the_first_refusal() -> None:
    committed = []

    def commit(address: int, num_bytes: int) -> bool:
        committed.append(address)
        return False

    CommitAhead(large_pages(64 * MIB), commit).wait()
    assert len(committed) == 1
