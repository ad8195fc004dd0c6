"""Where memory lies on a machine with several memory nodes: on the node of the cores that read it.

Threads share the outputs of a product in order, and the kernels lay out a weight by outputs. So a
thread that is bound to a core reads the same range of a weight in every step:

    weight   | thread 0 | thread 1 | thread 2 | thread 3 |
    lies on  | node 0              | node 1              |

Experts of a mixture that a step needs differ, so the threads of a node share its ranges of all of
them evenly (`thread_groups`). Pages are 2 MiB: a weight of an expert that is smaller than a few
pages does not follow its ranges.

Threads take tasks of attention in no fixed order, so KV pages lie on all nodes of the threads in
turn, and so do weights if threads are not bound. All threads of a tensor-parallel rank are on one
node if possible (deploy/supervisor/processes.py), and then all of this is on that node.

On a machine with one node nothing is placed. Start at `memory_placement`.
"""

import ctypes
import functools
import itertools
import logging
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import torch

from proto.runtime.host_resources import cores_by_node

logger = logging.getLogger("tokend.worker")

LARGE_PAGE: Final = 2 << 20
_MBIND: Final = {"x86_64": 237, "aarch64": 235}.get(platform.machine())
_MPOL_PREFERRED: Final = 1
_MPOL_INTERLEAVE: Final = 3
_MASK_BITS: Final = 1024
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class MemoryPlacement:
    """Places memory on the nodes of this process's OpenMP threads.

    by_thread: node of each thread, in order; empty if threads are not bound to one.
    nodes: nodes of all threads.
    """

    by_thread: tuple[int, ...]
    nodes: tuple[int, ...]

    @property
    def thread_groups(self) -> tuple[int, ...]:
        """The end of each group of neighbouring threads on one node; empty if it is one group."""
        ends = tuple(itertools.accumulate(len(list(alike)) for _, alike in groupby(self.by_thread)))
        return ends if len(ends) > 1 else ()

    def place_weight(self, memory: torch.Tensor) -> None:
        """Place the large pages that begin in a weight, before the first write to them.

        memory: uint8 [n]; the last page is mapped to its end. A page that begins in another weight
        lies where that one needs it.
        """
        if not self.by_thread:
            self.interleave(memory, LARGE_PAGE)
            return
        begin, size, num_threads = memory.data_ptr(), memory.nbytes, len(self.by_thread)
        first = -(-begin // LARGE_PAGE) * LARGE_PAGE

        def node_of(page: int) -> int:
            return self.by_thread[(page - begin) * num_threads // size]

        for node, alike in groupby(range(first, begin + size, LARGE_PAGE), node_of):
            pages = list(alike)
            _set_policy(pages[0], pages[-1] + LARGE_PAGE - pages[0], (node,))

    def interleave(self, memory: torch.Tensor, page: int = os.sysconf("SC_PAGE_SIZE")) -> None:
        """Let the pages that begin in this memory lie on all nodes in turn."""
        begin, end = (
            -(-address // page) * page
            for address in (memory.data_ptr(), memory.data_ptr() + memory.nbytes)
        )
        if begin < end:
            _set_policy(begin, end - begin, self.nodes)

    def __str__(self) -> str:
        nodes = f"node{'s' if len(self.nodes) > 1 else ''} {', '.join(map(str, self.nodes))}"
        if len(self.nodes) == 1:
            return f"weights and KV cache on memory {nodes}, which all threads are bound to"
        if not self.by_thread:
            return (
                f"weights and KV cache on memory {nodes} in turn, as threads are not bound to cores"
            )
        return (
            f"weights on memory {nodes}, each range on the node of the thread that reads it; "
            "KV cache on these nodes in turn"
        )


@functools.cache
def memory_placement() -> MemoryPlacement | None:
    """Return the placement for this process's threads; None on a machine with one memory node.

    Asks the OpenMP library that torch has loaded.
    """
    nodes = cores_by_node()
    if len(nodes) < 2:
        return None
    return find_placement(_cpus_of_threads(), nodes)


def find_placement(
    cpus_of_threads: Sequence[Sequence[int]], nodes: dict[int, list[list[int]]]
) -> MemoryPlacement:
    """Return the placement for threads, each bound to some CPUs. nodes: their cores."""
    node_of_cpu = {cpu: node for node, cores in nodes.items() for cpus in cores for cpu in cpus}
    found = [{node_of_cpu.get(cpu) for cpu in cpus} for cpus in cpus_of_threads]
    by_thread = [node for of_thread in found if len(of_thread) == 1 for node in of_thread]
    known = tuple(node for node in by_thread if node is not None)
    if not known or len(known) < len(found):
        return MemoryPlacement((), tuple(nodes))
    return MemoryPlacement(known, tuple(sorted(set(known))))


def _cpus_of_threads() -> list[list[int]]:
    """Return the CPUs that each OpenMP thread is bound to; none if threads are not bound.

    Called by the thread that computes, the first of its team. The others are on the places that
    follow its own (OpenMP 5.2, section 10.1.3, policy `close`, which is libgomp's for `true`).
    """
    openmp = ctypes.CDLL(None)  # torch loads it for all libraries
    num_places, num_threads = openmp.omp_get_num_places(), openmp.omp_get_max_threads()
    if num_places == 0 or not openmp.omp_get_proc_bind():
        return []
    first, per_place = openmp.omp_get_place_num(), -(-num_threads // num_places)
    cpus = []
    for thread in range(num_threads):
        place = (first + thread // per_place) % num_places
        ids = (ctypes.c_int * openmp.omp_get_place_num_procs(place))()
        openmp.omp_get_place_proc_ids(place, ids)
        cpus.append(list(ids))
    return cpus


def _set_policy(address: int, num_bytes: int, nodes: Sequence[int]) -> None:
    """Let the kernel take future pages of this memory from these nodes, or others if they are full.

    See mbind(2). A refusal is logged, and pages lie on the node of the thread that first writes.
    """
    mode = _MPOL_PREFERRED if len(nodes) == 1 else _MPOL_INTERLEAVE
    mask = (ctypes.c_uint64 * (_MASK_BITS // 64))()
    for node in nodes:
        mask[node // 64] |= 1 << node % 64
    if _MBIND is None:
        _report_refusal(f"unknown on {platform.machine()}")
    elif _LIBC.syscall(
        *map(ctypes.c_long, (_MBIND, address, num_bytes, mode)),
        mask,
        ctypes.c_long(_MASK_BITS + 1),
        ctypes.c_long(0),
    ):
        _report_refusal(os.strerror(ctypes.get_errno()))


@functools.cache
def _report_refusal(reason: str) -> None:
    """Log a reason once."""
    logger.warning(
        "memory is not placed on its node, so products are slower: mbind: %s (a container needs "
        "the capability SYS_NICE)",
        reason,
    )
