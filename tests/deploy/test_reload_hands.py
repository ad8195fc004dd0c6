"""When a second generation fits beside the first: on a made-up machine."""

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from deploy.reload.actions import ProcessActions
from proto.config import GIB, CacheConfig, DeviceConfig, ServeConfig
from proto.host_resources import resident_memory
from proto.sockets import Poller
from tests.fakes import boots

POOL = 4 * GIB
RESIDENT = 1 * GIB


@dataclass
class Worker:
    pid: int
    role: str = "worker"
    generation: int = 1


def machine(root: Path, free: int) -> Path:
    """With so many bytes free, and a worker of 1 GiB with the id 7."""
    (root / "proc" / "7").mkdir(parents=True)
    (root / "proc" / "meminfo").write_text(f"MemAvailable: {free // 1024} kB\n")
    pages = RESIDENT // os.sysconf("SC_PAGE_SIZE")
    (root / "proc" / "7" / "statm").write_text(f"99 {pages} 1 1 0 1 0")
    return root


def actions(root: Path, config: ServeConfig) -> ProcessActions:
    engine = boots.engine_ready(kv_cache_bytes=POOL)
    running = [Worker(7), Worker(8, "api_server")]
    return ProcessActions(
        running, lambda boot: None, Poller(), config, (), {}, lambda: engine, set(), root
    )


@pytest.mark.parametrize(
    ("cache", "needed"),
    [
        (CacheConfig(kv_cache_memory=POOL), RESIDENT + POOL),
        (CacheConfig(num_gpu_blocks_override=9), RESIDENT + POOL),
        (CacheConfig(), RESIDENT + 2 * POOL),
    ],
)
def test_it_fits_where_as_much_is_free_as_is_taken(
    tmp_path: Path, cache: CacheConfig, needed: int
) -> None:
    """A pool that takes half of what is free needs twice its size."""
    config = ServeConfig(cache=cache)
    assert actions(machine(tmp_path / "enough", needed), config).fits()
    assert not actions(machine(tmp_path / "less", needed - (1 << 20)), config).fits()


def test_nobody_knows_what_a_gpu_has_free(tmp_path: Path) -> None:
    config = ServeConfig(device=DeviceConfig(device="cuda"))
    assert not actions(machine(tmp_path, 1 << 50), config).fits()


def test_two_engines_cannot_publish_at_one_endpoint(tmp_path: Path) -> None:
    root = machine(tmp_path, 1 << 50)
    assert actions(root, ServeConfig(cache=CacheConfig(kv_events_endpoint="ipc"))).fits()
    fixed = CacheConfig(kv_events_endpoint="tcp://127.0.0.1:5557")
    assert not actions(root, ServeConfig(cache=fixed)).fits()


def test_the_members_of_a_generation_are_engine_and_workers(tmp_path: Path) -> None:
    found = actions(machine(tmp_path, 0), ServeConfig())
    assert [each.pid for each in found.members(1)] == [7]
    assert found.members(2) == []


def test_a_process_that_is_gone_holds_nothing(tmp_path: Path) -> None:
    assert resident_memory(8, machine(tmp_path, 0)) == 0
    assert resident_memory(os.getpid()) > 1 << 20
