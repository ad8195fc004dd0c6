"""Where memory lies on a machine with several memory nodes.

Calls of mbind are recorded for machines with two nodes; the system call itself places memory on
node 0, which each Linux machine has.
"""

import ctypes
import mmap
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from worker.host import memory_nodes
from worker.host.large_pages import WeightArena
from worker.host.memory_nodes import LARGE_PAGE, MemoryPlacement, find_placement, memory_placement

NODES = {0: [[0, 4], [1, 5]], 1: [[2, 6], [3, 7]]}
GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}.get(platform.machine())
MPOL_F_ADDR = 2
PREFERRED, INTERLEAVE = 1, 3

needs_nodes = pytest.mark.skipif(
    GET_MEMPOLICY is None or not Path("/sys/devices/system/node/node0").exists(),
    reason="the system has no memory nodes",
)


class Policies(list[tuple[int, int, tuple[int, ...]]]):
    """Recorded policies: address, bytes, nodes."""

    def nodes_of(self, address: int) -> tuple[int, ...]:
        (nodes,) = {nodes for begin, size, nodes in self if begin <= address < begin + size}
        return nodes


@pytest.fixture
def policies(monkeypatch: pytest.MonkeyPatch) -> Policies:
    found = Policies()
    monkeypatch.setattr(
        memory_nodes, "_set_policy", lambda *call: found.append((*call[:2], tuple(call[2])))
    )
    return found


@pytest.mark.parametrize(
    ("cpus_of_threads", "by_thread", "nodes"),
    [
        ([[0, 4], [1, 5], [2, 6], [3, 7]], (0, 0, 1, 1), (0, 1)),
        ([[2, 3, 6, 7]] * 3, (1, 1, 1), (1,)),  # a rank on one node
        ([], (), (0, 1)),  # threads are not bound
        ([[0, 4], [0, 2]], (), (0, 1)),  # bound to CPUs of two nodes
        ([[0], [9]], (), (0, 1)),  # an unknown CPU
    ],
)
def test_threads_have_the_node_of_their_cpus(
    cpus_of_threads: list[list[int]], by_thread: tuple[int, ...], nodes: tuple[int, ...]
) -> None:
    assert find_placement(cpus_of_threads, NODES) == MemoryPlacement(by_thread, nodes)


def test_each_page_of_weights_is_placed_once_where_it_is_read(policies: Policies) -> None:
    by_thread = (0, 0, 0, 1, 1, 3)
    arena = WeightArena(MemoryPlacement(by_thread, (0, 1, 3)))
    sizes = [5 << 20, 100, 12 << 20, (9 << 20) + 7, 3000, 7 << 20, 80 << 20]
    weights = [arena.allocate(size) for size in sizes]
    pages = set()
    for weight in weights:
        first = -(-weight.data_ptr() // LARGE_PAGE) * LARGE_PAGE
        for page in range(first, weight.data_ptr() + weight.nbytes, LARGE_PAGE):
            thread = (page - weight.data_ptr()) * len(by_thread) // weight.nbytes
            assert policies.nodes_of(page) == (by_thread[thread],)
            assert policies.nodes_of(page + LARGE_PAGE - 1) == (by_thread[thread],)
            pages.add(page)
    assert sum(size for _, size, _ in policies) == len(pages) * LARGE_PAGE
    assert {nodes for _, _, nodes in policies} == {(0,), (1,), (3,)}


@pytest.mark.parametrize(
    ("by_thread", "groups"),
    [((), ()), ((1, 1), ()), ((0, 0, 1, 1), (2, 4)), ((0, 1, 1, 3), (1, 3, 4))],
)
def test_threads_of_a_node_are_a_group(by_thread: tuple[int, ...], groups: tuple[int, ...]) -> None:
    assert MemoryPlacement(by_thread, (0, 1, 3)).thread_groups == groups


def test_memory_without_a_reader_of_its_own_lies_on_all_nodes_in_turn(policies: Policies) -> None:
    placement = MemoryPlacement((), (0, 1))
    weight = WeightArena(placement).allocate(5 << 20)
    assert policies == [(weight.data_ptr(), 6 << 20, (0, 1))]
    policies.clear()
    page = mmap.PAGESIZE
    memory = torch.zeros(10 * page, dtype=torch.uint8)
    begin = -memory.data_ptr() % page
    placement.interleave(memory[begin + 5 : begin + 5 * page + 5])
    assert policies == [(memory.data_ptr() + begin + page, 5 * page, (0, 1))]
    placement.interleave(memory[begin + 5 : begin + 9])
    assert len(policies) == 1


def test_nothing_is_placed_on_a_machine_with_one_node(
    policies: Policies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_nodes, "cores_by_node", lambda: {0: [[0], [1]]})
    memory_placement.cache_clear()
    try:
        assert memory_placement() is None
    finally:
        memory_placement.cache_clear()
    WeightArena(None).allocate(5 << 20)
    assert not policies


def policy_at(address: int) -> tuple[int, int]:
    """The kernel's policy for an address, and the mask of its nodes up to 63."""
    mode, mask = ctypes.c_int(), (ctypes.c_uint64 * 16)()
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.syscall(
        ctypes.c_long(GET_MEMPOLICY or 0),
        ctypes.byref(mode),
        mask,
        ctypes.c_long(1024),
        ctypes.c_long(address),
        ctypes.c_long(MPOL_F_ADDR),
    )
    assert not failed, os.strerror(ctypes.get_errno())
    return mode.value, mask[0]


@needs_nodes
def test_the_kernel_applies_the_policies() -> None:
    memory_nodes._report_refusal.cache_clear()
    weight = WeightArena(MemoryPlacement((0, 0), (0,))).allocate(5 << 20)
    if memory_nodes._report_refusal.cache_info().currsize:
        pytest.skip("this container does not allow mbind")
    assert policy_at(weight.data_ptr()) == (PREFERRED, 1)
    assert policy_at(weight.data_ptr() + (6 << 20) - 1) == (PREFERRED, 1)
    weight.fill_(1)
    maps = Path("/proc/self/numa_maps")
    if maps.exists():
        lines = {line.split()[0]: line for line in maps.read_text().splitlines()}
        line = lines[f"{weight.data_ptr():08x}"]
        assert "prefer:0" in line
        assert " N0=" in line
    spread = WeightArena(MemoryPlacement((), (0, 1023))).allocate(5 << 20)
    assert policy_at(spread.data_ptr()) == (INTERLEAVE, 1)  # without nodes that do not exist


@needs_nodes
def test_a_refusal_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    memory_nodes._report_refusal.cache_clear()
    arena = WeightArena(MemoryPlacement((1023,), (1023,)))  # no such node
    for _ in range(2):
        assert not arena.allocate(5 << 20).any()
    (record,) = caplog.records
    assert "memory is not placed on its node" in record.getMessage()


PRINT_CPUS = """
import os, torch
from worker.host.memory_nodes import _cpus_of_threads
torch.ones(512, 512) @ torch.ones(512, 512)  # starts the team
print(_cpus_of_threads())
"""


@pytest.mark.parametrize(
    ("places", "num_threads", "expected"),
    [
        ("{FIRST}", 2, "[[FIRST], [FIRST]]"),
        ("{FIRST},{LAST}", 2, "[[FIRST], [LAST]]"),
        ("", 2, "[]"),
    ],
)
def test_openmp_tells_the_cpus_of_its_threads(places: str, num_threads: int, expected: str) -> None:
    """In a process of its own, as OpenMP reads its environment once."""
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("one CPU")

    def filled(text: str) -> str:
        return text.replace("FIRST", str(cpus[0])).replace("LAST", str(cpus[-1]))

    env = {**os.environ, "OMP_NUM_THREADS": str(num_threads)}
    if places:
        env |= {"OMP_PROC_BIND": "true", "OMP_PLACES": filled(places)}
    done = subprocess.run(
        [sys.executable, "-c", PRINT_CPUS], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == filled(expected)
