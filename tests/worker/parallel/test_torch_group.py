"""How ranks meet, exchange and part."""

import tempfile
import threading
from datetime import timedelta
from typing import ClassVar

import pytest
import torch

from tests.fakes.fake_cuda import CUDA, FakeCuda
from tests.fakes.ranks import Ranks
from worker.parallel import torch_group
from worker.parallel.group import GroupLostError, RankGroup
from worker.parallel.torch_group import TorchGroup

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 5), (7, 3), (0, 4), (4,)])
def test_what_all_have_comes_in_the_order_of_the_ranks(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    with Ranks(3) as ranks:
        found = ranks.run_on_all(
            lambda rank: ranks.groups[rank].gather(torch.full(shape, 1.5 + rank, dtype=dtype))
        )
    for each in found:
        assert each.dtype == dtype
        assert each.shape == (3, *shape)
        assert [part.unique().tolist() for part in each] == [
            [1.5 + rank] if part.numel() else [] for rank, part in enumerate(each)
        ]


def test_one_that_leaves_ends_the_calls_of_the_others_and_all_meet_again() -> None:
    with Ranks(2) as ranks:

        def part(rank: int) -> str:
            if rank == 1:
                ranks.groups[1].leave()
                return ""
            with pytest.raises(GroupLostError, match="worker 0 has lost its rank group") as lost:
                ranks.groups[0].gather(torch.zeros(1))
            return str(lost.value)

        assert ranks.run_on_all(part)[0]
        with pytest.raises(GroupLostError):
            ranks.groups[1].gather(torch.zeros(1))
        ranks.run_on_all(lambda rank: ranks.groups[rank].join(2))
        sums = ranks.run_on_all(
            lambda rank: ranks.groups[rank].gather(torch.ones(1) * rank).sum().item()
        )
    assert sums == [1.0, 1.0]


def test_who_waits_for_long_says_so_once_and_goes_on_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_group, "_LONG_WAIT", timedelta(milliseconds=20))
    with Ranks(2) as ranks:
        said = threading.Event()

        def come(rank: int) -> float:
            group = ranks.groups[rank]
            group._on_long_wait = said.set
            if rank == 1:
                assert said.wait(20.0)
            return group.gather(torch.ones(1) * rank).sum().item()

        assert ranks.run_on_all(come) == [1.0, 1.0]


def test_an_interrupted_rank_stops_waiting_for_the_others() -> None:
    away = iter((False, False, True))
    with tempfile.TemporaryDirectory(prefix="t-") as run_dir:
        group = TorchGroup(run_dir, 1, 3, CPU, lambda: None, lambda: next(away))
        with pytest.raises(GroupLostError, match="worker 1: 1 of 3 workers had met"):
            group.join(1)


def test_one_rank_alone_has_all_there_is() -> None:
    group = RankGroup()
    group.join(1)
    assert group.gather(torch.arange(3)).tolist() == [[0, 1, 2]]
    group.leave()


class QueuedWork:
    """What NCCL does in a device's queue: waiting with a limit would stop the host."""

    def __init__(self, waits: list[str]) -> None:
        self._waits = waits

    def wait(self, *limit: object) -> None:
        assert not limit, "the host waits for the device"
        self._waits.append("queued")


class FakeNcclGroup:
    """torch's process group over NCCL of one rank."""

    waits: ClassVar[list[str]] = []

    class Options:
        _timeout = timedelta(minutes=10)

    def __init__(self, store: object, rank: int, size: int, options: Options) -> None:
        assert options._timeout > timedelta(days=1), "a daemon that was stopped goes on"

    def _allgather_base(self, parts: torch.Tensor, x: torch.Tensor) -> QueuedWork:
        parts.copy_(x)
        return QueuedWork(self.waits)

    def abort(self) -> None:
        self.waits.append("abort")


def test_between_gpus_the_host_does_not_wait_for_an_exchange(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_group.dist, "ProcessGroupNCCL", FakeNcclGroup, raising=False)
    monkeypatch.setattr(FakeNcclGroup, "waits", [])
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory(prefix="t-") as run_dir, FakeCuda() as cuda:
        group = TorchGroup(run_dir, 0, 1, CUDA, lambda: None, lambda: False)
        group.join(1, "memory")
        group.join(1)
        _, parts = cuda.device.capture(lambda: group.gather(cuda_zeros(3)))
        assert parts.shape == (1, 3)
        group.leave()
    assert FakeNcclGroup.waits == ["queued", "abort", "queued", "queued", "abort"]


def cuda_zeros(size: int) -> torch.Tensor:
    return torch.zeros(size, device=CUDA)
