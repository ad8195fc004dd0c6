"""Rank groups: joining, gathering, leaving, and waiting for other ranks."""

import tempfile
import threading
from datetime import timedelta
from typing import ClassVar

import pytest
import torch

from tests.fakes.clock import FakeClock
from tests.fakes.fake_cuda import CUDA, FakeCuda
from tests.fakes.ranks import Ranks
from worker.cuda import nccl_group
from worker.cuda.nccl_group import NcclGroup
from worker.parallel import torch_group
from worker.parallel.group import LONG_WAIT_SECONDS, GroupLostError, RankGroup
from worker.parallel.torch_group import TorchGroup
from worker.worker import RankWaitTimer

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 5), (7, 3), (0, 4), (4,)])
def test_gathered_tensors_are_in_rank_order(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    with Ranks(3) as ranks:
        found = ranks.run_on_all(
            lambda rank: ranks.groups[rank].gather(torch.full(shape, 1.5 + rank, dtype=dtype))
        )
    for gathered in found:
        assert gathered.dtype == dtype
        assert gathered.shape == (3, *shape)
        assert [part.unique().tolist() for part in gathered] == [
            [1.5 + rank] if part.numel() else [] for rank, part in enumerate(gathered)
        ]


def test_a_leaving_rank_ends_the_calls_of_the_others_and_all_can_rejoin() -> None:
    with Ranks(2) as ranks:

        def leave_or_gather(rank: int) -> str:
            if rank == 1:
                ranks.groups[1].leave()
                return ""
            with pytest.raises(GroupLostError, match="worker 0 has lost its rank group") as lost:
                ranks.groups[0].gather(torch.zeros(1))
            return str(lost.value)

        assert ranks.run_on_all(leave_or_gather)[0]
        with pytest.raises(GroupLostError):
            ranks.groups[1].gather(torch.zeros(1))
        ranks.run_on_all(lambda rank: ranks.groups[rank].join(2))
        sums = ranks.run_on_all(
            lambda rank: ranks.groups[rank].gather(torch.ones(1) * rank).sum().item()
        )
    assert sums == [1.0, 1.0]


def test_a_long_wait_is_reported_once_and_continues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_group, "_LONG_WAIT", timedelta(milliseconds=20))
    with Ranks(2) as ranks:
        reported = threading.Event()

        def gather_late(rank: int) -> float:
            group = ranks.groups[rank]
            group._on_long_wait = reported.set
            if rank == 1:
                assert reported.wait(20.0)
            return group.gather(torch.ones(1) * rank).sum().item()

        assert ranks.run_on_all(gather_late) == [1.0, 1.0]


def test_a_step_that_waits_long_is_reported_once() -> None:
    clock = FakeClock()
    timer = RankWaitTimer(clock)
    assert not timer.is_due(7)
    clock.now += 0.9 * LONG_WAIT_SECONDS
    assert not timer.is_due(7)
    clock.now += 0.2 * LONG_WAIT_SECONDS
    assert timer.is_due(7)
    assert not timer.is_due(7)
    assert not timer.is_due(8)
    clock.now += 2 * LONG_WAIT_SECONDS
    assert timer.is_due(8)


def test_without_a_step_in_flight_no_wait_is_reported() -> None:
    clock = FakeClock()
    timer = RankWaitTimer(clock)
    for step in (None, 1, None, None, 2):
        assert not timer.is_due(step)
        clock.now += 2 * LONG_WAIT_SECONDS


def test_an_interrupted_rank_stops_waiting_for_the_others() -> None:
    away = iter((False, False, True))
    with tempfile.TemporaryDirectory(prefix="t-") as run_dir:
        group = TorchGroup(run_dir, 1, 3, CPU, lambda: None, lambda: next(away))
        with pytest.raises(GroupLostError, match="worker 1: 1 of 3 workers had met"):
            group.join(1)


def test_a_single_rank_gathers_its_own_tensor() -> None:
    group = RankGroup()
    group.join(1)
    assert group.gather(torch.arange(3)).tolist() == [[0, 1, 2]]
    group.leave()


class QueuedWork:
    """Work in a device's queue, as of NCCL: waiting with a timeout would block the host."""

    def __init__(self, waits: list[str]) -> None:
        self._waits = waits

    def wait(self, *limit: object) -> None:
        assert not limit, "the host waits for the device"
        self._waits.append("queued")


class FakeNcclGroup:
    """Replaces torch's NCCL process group, with one rank."""

    waits: ClassVar[list[str]] = []

    class Options:
        _timeout = timedelta(minutes=10)

    def __init__(self, store: object, rank: int, size: int, options: Options) -> None:
        assert options._timeout > timedelta(days=1), "a daemon may be stopped and continued"

    def _allgather_base(self, parts: torch.Tensor, x: torch.Tensor) -> QueuedWork:
        parts.copy_(x)
        return QueuedWork(self.waits)

    def abort(self) -> None:
        self.waits.append("abort")


def test_gathering_between_gpus_does_not_block_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nccl_group.dist, "ProcessGroupNCCL", FakeNcclGroup, raising=False)
    monkeypatch.setattr(FakeNcclGroup, "waits", [])
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory(prefix="t-") as run_dir, FakeCuda() as cuda:
        group = NcclGroup(run_dir, 0, 1, CUDA, lambda: None, lambda: False)
        group.join(1, "memory")
        group.join(1)
        _, parts = cuda.device.capture(lambda: group.gather(cuda_zeros(3)))
        assert parts.shape == (1, 3)
        group.leave()
    assert FakeNcclGroup.waits == ["queued", "abort", "queued", "queued", "abort"]


def cuda_zeros(size: int) -> torch.Tensor:
    return torch.zeros(size, device=CUDA)
