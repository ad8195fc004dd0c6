"""The fake device refuses calls that would wait for a real device or race with it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.fakes.fake_cuda import CUDA, FakeCuda
from tests.fakes.fake_device import DeviceError, FakeDevice, on_host
from tests.fakes.fake_graph import CaptureError
from worker.cuda.transfers import Downloader, QueuedTransfers


def filled_too_early(device: FakeDevice) -> None:
    memory, target = device.pinned(4), device.zeros(4, torch.uint8)
    target.copy_(memory, non_blocking=True)
    target.copy_(memory, non_blocking=True)


def written_too_early(device: FakeDevice) -> None:
    memory, target, event = device.pinned(4), device.zeros(4, torch.uint8), device.event()
    target.copy_(memory, non_blocking=True)
    event.record()
    memory[0] = 1
    event.synchronize()


def read_too_early(device: FakeDevice) -> None:
    """Not refused, but garbage: the copy has not run."""
    memory, source = device.pinned(4), device.zeros(4, torch.uint8)
    memory.copy_(source, non_blocking=True)
    if memory.any():
        raise DeviceError("not what was copied")


def unchecked_uploads(device: FakeDevice) -> None:
    transfers = QueuedTransfers(device)
    for buffer in transfers._buffers:
        buffer.copied = device.event()  # never recorded
        buffer.copied.record = lambda: None  # type: ignore[method-assign]
    for _ in range(3):
        transfers.to_device([np.arange(4)])


WAITS_AND_RACES: dict[str, Callable[[FakeDevice], Any]] = {
    "item": lambda device: device.zeros(1, torch.int32).item(),
    "a condition": lambda device: bool(device.zeros(1, torch.int32)[0] > 0),
    "a list": lambda device: device.zeros(1, torch.int32).tolist(),
    "numpy": lambda device: device.zeros(1, torch.int32).numpy(),
    "a mask": lambda device: device.zeros(3, torch.int32)[device.zeros(3, torch.bool)],
    "nonzero": lambda device: device.zeros(3, torch.int32).nonzero(),
    "repeats to be counted": lambda device: device.zeros(2, torch.int32).repeat_interleave(
        device.zeros(2, torch.int32)
    ),
    "both sides": lambda device: device.zeros(2, torch.int32) + torch.zeros(2),
    "pageable memory": lambda device: device.zeros(2, torch.uint8).copy_(
        torch.zeros(2, dtype=torch.uint8), non_blocking=True
    ),
    "numbers of the host": lambda device: device.zeros(1, torch.int32).new_tensor([1, 2]),
    "a copy by index of 8 bits": lambda device: device.zeros(4, torch.float8_e4m3fn).index_copy_(
        0, device.zeros(1, torch.int64), device.zeros(1, torch.float8_e4m3fn)
    ),
    "filled too early": filled_too_early,
    "written too early": written_too_early,
    "uploads without events": unchecked_uploads,
    "pageable memory, to the host": lambda device: torch.zeros(2, dtype=torch.uint8).copy_(
        device.zeros(2, torch.uint8), non_blocking=True
    ),
    "a result that is read too early": read_too_early,
}


@pytest.mark.parametrize("name", WAITS_AND_RACES)
def test_waits_and_data_races_are_refused(name: str) -> None:
    with pytest.raises(DeviceError):
        WAITS_AND_RACES[name](FakeDevice())


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor([1, 2], device=CUDA),
        lambda: torch.as_tensor(np.arange(2), device=CUDA),
        lambda: torch.zeros(2).to(CUDA),
    ],
)
def test_host_numbers_reach_the_device_only_during_loading(
    make: Callable[[], torch.Tensor],
) -> None:
    with FakeCuda() as cuda:
        with cuda.loading():
            assert cuda.device.holds(make())
        with pytest.raises(DeviceError, match="waits for the device"):
            make()


def test_a_result_is_valid_after_its_event() -> None:
    device = FakeDevice()
    downloader = Downloader(device)
    sent = [torch.arange(5), torch.tensor([0.5]), torch.tensor([True, False])]
    downloads = [downloader.start_download([device.adopt(each) for each in sent]) for _ in range(3)]
    for download in downloads:
        assert not download.is_ready()
        found = download.arrays()
        assert [each.tolist() for each in found] == [each.tolist() for each in sent]
        assert [each.dtype for each in found] == [each.numpy().dtype for each in sent]


def capture(device: FakeDevice, run: Callable[[torch.Tensor], Any]) -> Any:
    """Capture `run` over a tensor of the device as a graph."""
    given = device.zeros(2, torch.float32)

    def running() -> torch.Tensor:
        run(given)
        return given + 1

    return device.capture(running)


def test_a_replay_reads_current_tensor_contents() -> None:
    device = FakeDevice()
    given, chosen = device.zeros(2, torch.float32), [1.0]
    graph, result = device.capture(lambda: (given * 2 + chosen[0]).relu_())
    assert on_host(result).isnan().all()
    given += 3
    chosen[0] = 100.0  # fixed at capture
    graph.replay()
    assert on_host(result).tolist() == [7.0, 7.0]
    given -= 9
    graph.replay()
    assert on_host(result).tolist() == [0.0, 0.0]


def test_a_replay_ignores_a_rebound_tensor() -> None:
    device = FakeDevice()
    places = [device.zeros(1, torch.float32)]
    graph, result = device.capture(lambda: places[0] + 1)
    places[0] = device.adopt(torch.full((1,), 5.0))
    graph.replay()
    assert on_host(result).tolist() == [1.0]


NOT_CAPTURED: dict[str, Callable[[FakeDevice, torch.Tensor], Any]] = {
    "memory that lasts": lambda device, given: device.zeros(2, torch.int64),
    "page-locked memory": lambda device, given: device.pinned(2),
    "a number on the host": lambda device, given: on_host(given)[0].item(),
    "a wait": lambda device, given: device.event().synchronize(),
    "a look": lambda device, given: device.event().query(),
    "a result": lambda device, given: device.fetch(given),
    "a copy from the host": lambda device, given: QueuedTransfers(device).to_device([np.arange(2)]),
    "another capture": lambda device, given: device.capture(lambda: given + 1),
}


@pytest.mark.parametrize("name", NOT_CAPTURED)
def test_calls_that_cannot_be_captured_are_refused(name: str) -> None:
    device = FakeDevice()
    capture(device, lambda given: given.add_(1))
    with pytest.raises((DeviceError, CaptureError)):
        capture(device, lambda given: NOT_CAPTURED[name](device, given))
