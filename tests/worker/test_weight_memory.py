"""Weights share ranges of memory and nothing else."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import torch

from worker.weight_memory import WeightMemory


def test_parts_are_zeros_on_cache_lines_and_apart() -> None:
    memory = WeightMemory()
    sizes = [1, 64, 65, 3 << 20, 100 << 20, 7, 40 << 20, 40 << 20]
    parts = [memory.take(size) for size in sizes]
    assert [part.nbytes for part in parts] == sizes
    assert all(part.data_ptr() % 64 == 0 for part in parts)
    assert not any(part[-1] or part[0] for part in parts)
    places = sorted((part.data_ptr(), part.data_ptr() + part.nbytes) for part in parts)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(places))


def test_small_parts_share_a_large_page() -> None:
    memory = WeightMemory()
    first, second = memory.take(100), memory.take(100)
    assert first.data_ptr() % (2 << 20) == 0
    assert second.data_ptr() == first.data_ptr() + 128


def test_threads_never_get_the_same_part() -> None:
    memory = WeightMemory()
    with ThreadPoolExecutor(8) as pool:
        parts = list(pool.map(memory.take, [200] * 400))
    for number, part in enumerate(parts):
        part.fill_(number % 251)
    assert all(torch.all(part == number % 251) for number, part in enumerate(parts))


def test_a_part_outlives_the_memory_it_came_from() -> None:
    memory = WeightMemory()
    part = memory.take(1000)
    memory.take(65 << 20)
    del memory
    part.fill_(9)
    assert int(part.sum()) == 9000
