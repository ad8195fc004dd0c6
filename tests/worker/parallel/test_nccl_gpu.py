"""NCCL between two GPUs: collectives run eagerly and as part of a replayed graph."""

import tempfile
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as processes

from worker.cuda.accelerator import Accelerator
from worker.cuda.nccl_group import NcclGroup

pytestmark = pytest.mark.gpu

SIZE = 2


@pytest.fixture(autouse=True)
def two_gpus() -> None:
    found = torch.cuda.device_count()
    if found < SIZE:
        pytest.skip(f"needs {SIZE} GPUs, {found} found")


def exchange(rank: int, run_dir: str) -> None:
    """Run one rank; every rank has a process of its own."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    accelerator = Accelerator(device)
    group = NcclGroup(run_dir, rank, SIZE, device, lambda: None, lambda: False)
    group.join(1, "memory")
    group.join(1)
    x = torch.full((3, 64), 1.0 + rank, dtype=torch.bfloat16, device=device)
    assert group.gather(x)[:, 0, 0].tolist() == [1.0, 2.0]
    graph, parts = accelerator.capture(lambda: group.gather(x) * 2)
    for turn in range(20):
        x.fill_(turn + rank)
        graph.replay()
        assert parts[:, 2, 63].tolist() == [2.0 * turn, 2.0 * turn + 2]
    del graph, parts  # leaving waits for graphs that use the group
    group.leave()
    Path(run_dir, f"done{rank}").touch()


def test_two_processes_gather_eagerly_and_in_a_graph() -> None:
    with tempfile.TemporaryDirectory(prefix="t-") as run_dir:
        processes.spawn(exchange, (run_dir,), SIZE)  # type: ignore[no-untyped-call]
        assert all(Path(run_dir, f"done{rank}").exists() for rank in range(SIZE))
