"""The fake device refuses what would wait for a real one, or race with it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.fakes.fake_device import DeviceError, FakeDevice
from worker.device.staging import Staging


def filled_too_early(device: FakeDevice) -> None:
    memory, target = device.staging(4), device.zeros(4, torch.uint8)
    target.copy_(memory, non_blocking=True)
    target.copy_(memory, non_blocking=True)


def written_too_early(device: FakeDevice) -> None:
    memory, target, event = device.staging(4), device.zeros(4, torch.uint8), device.event()
    target.copy_(memory, non_blocking=True)
    event.record()
    memory[0] = 1
    event.synchronize()


def unchecked_staging(device: FakeDevice) -> None:
    staging = Staging(device)
    for turn in staging._turns:
        turn.copied = device.event()  # never recorded
        turn.copied.record = lambda: None  # type: ignore[method-assign]
    for _ in range(3):
        staging.upload([np.arange(4)])


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
    "filled too early": filled_too_early,
    "written too early": written_too_early,
    "staging without events": unchecked_staging,
}


@pytest.mark.parametrize("name", WAITS_AND_RACES)
def test_waits_and_races_are_refused(name: str) -> None:
    with pytest.raises(DeviceError):
        WAITS_AND_RACES[name](FakeDevice())
