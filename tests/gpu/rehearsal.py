"""The strict fake replaces a GPU: all phases run with small sizes without one.

Results are those of a GPU; times are those of this host and meaningless.
"""

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.fakes.copy_streams import CopyingThread, FakeStream, NoWatcher
from tests.fakes.cuda_runner import compute_by_torch
from tests.fakes.fake_cuda import ExpertsWithoutTriton, FakeCuda, StatesWithoutTriton
from tests.fakes.fake_flashinfer import FakeFlashInfer
from tests.gpu.hardware import Hardware, Sizes, longest
from tests.gpu.random_model import CONFIGS
from tests.worker.reference.torch_kernels import TorchEdits, draw_by_torch, store_by_index
from worker.cuda.block_copies import DeviceBlockBytes, DeviceCopies
from worker.cuda.runner_builder import DeviceKernels
from worker.kv_connector.offload.cpu_medium import pool_rows
from worker.reference.layers import torch_gate

SMALL = CONFIGS["1B"] | {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "head_dim": 64,
}
SMALL_LATENT = CONFIGS["latent"] | {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
}
SIZES = Sizes(
    configs={"1B": SMALL, "8B": SMALL, "latent": SMALL_LATENT},
    rate_bytes=1 << 16,
    product_size=32,
    rounds=2,
    batches=(1, 4),
    contexts=(20,),
    prompts=((16,), (8, 8)),
    vocab_size=256,
    drawn_vocab=64,
    num_draws=1 << 12,
    drawn_rows=256,
    batch=4,
    input=20,
    output=16,
    parity_vocab=64,
    parity_hidden=256,
    parity_heads=4,
    parity_tokens=30,
    long_context=250,
    uneven_contexts=(5, 200),
    captured=(2,),
    copied_blocks=8,
    swap_bytes=16 << 20,
    at_once=6,
    arriving_seconds=1.0,
    answers=3,
    experts=((4, 2, 64, 32),),
    expert_batches=(1, 5),
    recurrent=("small",),
    state_batches=(1, 3),
    state_prompt=20,
)


class Rehearsal(Hardware):
    """The strict fake as hardware; daemons run on the CPU."""

    def __init__(self) -> None:
        super().__init__(SIZES)
        self.cuda = FakeCuda()
        self.daemon_flags = (
            *("--device", "cpu", "--dtype", "float32"),
            *("--num-gpu-blocks-override", "200", "--disable-log-requests"),
        )
        self.invariant_flags = ("--batch-invariant", "--cpu-weights", "packed")
        self.eight_bits = "int8"
        self.preemption = "auto"  # swapping needs a GPU
        self.pytest_marks = "not gpu"
        # Replaces the memory checker by the plain command.
        self.sanitizer = ("env",)

    def accelerator(self) -> Any:
        return self.cuda.device

    def kernels(self) -> Any:
        library = FakeFlashInfer(self.cuda.device)
        store: Any = store_by_index
        draw: Any = draw_by_torch
        edits: Any = TorchEdits()
        return DeviceKernels(lambda: library, store, draw, edits)

    def experts(self, stacked: Any) -> dict[str, Any]:
        return {"without triton": ExpertsWithoutTriton(stacked, torch_gate("silu"))}

    def states(self, shape: Any, num_slots: int, block_size: int) -> Any:
        accelerator: Any = self.cuda.device
        return StatesWithoutTriton(accelerator, shape, num_slots, block_size, self.gpu.zeros)

    def block_bytes(self, rows: Any) -> Any:
        stream: Any = CopyingThread(self.cuda.device)
        device: Any = self.cuda.device
        return DeviceBlockBytes(rows, device, stream)

    def block_copies(self, rows: Any, num_bytes: int, context: Any) -> Any:
        device = self.cuda.device
        pool = pool_rows(device.pinned(num_bytes), context.factor, rows.shape[1])
        stream: Any = FakeStream(device)
        watcher: Any = NoWatcher()
        return tuple(DeviceCopies(rows, pool, stream, watcher) for _ in range(2))

    def name(self) -> str:
        return "the strict fake"

    def capability(self) -> tuple[int, int]:
        return (9, 0)

    def synchronize(self) -> None:
        self.cuda.device.complete(self.cuda.device.enqueue())

    def median_seconds(
        self, run: Callable[[], object], rounds: int | None = None, warm_ups: int = 3
    ) -> float:
        started = time.monotonic()
        run()
        self.synchronize()
        return time.monotonic() - started

    def captured(self, run: Callable[[], object]) -> Callable[[], object]:
        return run

    def kernel_times(self, run: Callable[[], object], rounds: int = 10) -> dict[str, float]:
        return longest({"nothing is profiled": 1e6 * self.median_seconds(run)}, 1)


@functools.cache
def the_fake() -> Rehearsal:
    """The fake of this process."""
    return Rehearsal()


@contextmanager
def rehearsed() -> Iterator[None]:
    """Redirect torch's "cuda" to the fake, and disable GPU kernels."""
    patch = pytest.MonkeyPatch()
    compute_by_torch(patch)
    cuda = the_fake().cuda
    try:
        with cuda, cuda.loading():
            yield
    finally:
        patch.undo()
