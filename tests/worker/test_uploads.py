"""Uploads of a step's arrays to the device."""

import numpy as np
import torch

from tests.fakes.fake_device import FakeDevice, on_host
from worker.cuda.transfers import QueuedTransfers


def test_uploaded_arrays_keep_their_dtype() -> None:
    device = FakeDevice()
    transfers = QueuedTransfers(device)
    rng = np.random.default_rng(0)
    for size in (3, 500, 1, 0, 77):
        arrays = [
            rng.integers(0, 1 << 40, size, dtype=np.int64),
            rng.integers(0, 1 << 20, 2 * size + 1, dtype=np.int32),
            rng.integers(0, 1 << 20, (size, 3), dtype=np.int32)[:, ::2],
        ]
        sent = transfers.to_device(arrays)
        for array, tensor in zip(arrays, sent, strict=True):
            assert device.holds(tensor)
            assert tensor.data_ptr() % 16 == 0 or not len(tensor)
            assert torch.equal(on_host(tensor), torch.from_numpy(array.reshape(-1)))


def test_an_upload_waits_only_for_the_second_to_last_copy() -> None:
    device = FakeDevice()
    transfers = QueuedTransfers(device)
    copied = []
    for step in range(5):
        transfers.to_device([np.full(4, step)])
        copied.append(device.queued)
        assert device.completed == (copied[step - 2] if step >= 2 else 0)
