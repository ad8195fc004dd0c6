"""Memory for weights: disjoint parts of large mappings."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from worker.host import large_pages
from worker.host.large_pages import WeightArena


def test_parts_are_aligned_and_disjoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """From several threads, across mappings, and parts larger than a mapping."""
    monkeypatch.setattr(large_pages, "_MAP_BYTES", 4096)
    memory = WeightArena()
    sizes = [1, 63, 64, 65, 1000, 4096, 4097, 9000] * 20
    with ThreadPoolExecutor(4) as pool:
        parts = list(pool.map(memory.allocate, sizes))
    assert [len(part) for part in parts] == sizes
    assert all(part.data_ptr() % 64 == 0 for part in parts)
    for number, part in enumerate(parts):
        part.fill_(number % 251)
    assert all((part == number % 251).all() for number, part in enumerate(parts))


def test_a_part_keeps_its_mapping_alive() -> None:
    part = WeightArena().allocate(100)
    part.fill_(7)
    others = [WeightArena().allocate(100).fill_(8) for _ in range(20)]
    assert (part == 7).all()
    assert len(others) == 20


def test_a_mapping_is_zeroed_and_aligned_to_a_large_page() -> None:
    found = large_pages.large_pages(5000)
    assert torch.equal(found, torch.zeros(5000, dtype=torch.uint8))
    assert found.data_ptr() % (2 << 20) == 0
