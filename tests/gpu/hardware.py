"""The hardware of phases: the GPU, or in a rehearsal the strict fake with small sizes."""

import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from worker.kv_connector.offload.base import OffloadingHandler

REHEARSAL: Final = "TOKEND_GPU_REHEARSAL"
"""Set in the environment of a rehearsal."""


def rehearsing() -> bool:
    """Whether phases run with small sizes on the strict fake."""
    return REHEARSAL in os.environ


@dataclass(frozen=True)
class Sizes:
    """Problem sizes of the phases. configs: model configurations by name, see random_model.py.

    experts: mixtures: number of experts, experts of a token, hidden and inner size.
    uneven_contexts: the shortest and the longest of a batch of decodes whose K and V fit beside 8B.
    recurrent: layers of tests/gpu/states.py. state_prompt: tokens of a prompt.
    """

    configs: dict[str, dict[str, Any]]
    rate_bytes: int = 8 << 30
    product_size: int = 8192
    rounds: int = 50
    batches: tuple[int, ...] = (1, 8, 32, 64, 128)
    contexts: tuple[int, ...] = (512, 2048)
    prompts: tuple[tuple[int, ...], ...] = ((2048,), (8192,), (1024,) * 8)
    vocab_size: int = 128256
    drawn_vocab: int = 8192
    num_draws: int = 1 << 20
    drawn_rows: int = 256
    batch: int = 64
    input: int = 512
    output: int = 128
    parity_vocab: int = 4096
    parity_hidden: int = 1024
    parity_heads: int = 16
    parity_tokens: int = 300
    long_context: int = 32768
    uneven_contexts: tuple[int, int] = (512, 8192)
    captured: tuple[int, ...] = (8, 64, 128)
    copied_blocks: int = 1024
    swap_bytes: int = 4 << 30
    at_once: int = 256
    arriving_seconds: float = 15.0
    answers: int = 12
    experts: tuple[tuple[int, int, int, int], ...] = ((128, 8, 2048, 768), (8, 2, 4096, 14336))
    expert_batches: tuple[int, ...] = (1, 8, 64, 512)
    recurrent: tuple[str, ...] = ("Granite 4 micro", "Qwen3-Next", "LFM2 1.2B")
    state_batches: tuple[int, ...] = (1, 8, 64, 256)
    state_prompt: int = 2048


class Hardware:
    """A GPU and its kernels."""

    def __init__(self, sizes: Sizes) -> None:
        import torch

        self.sizes = sizes
        from worker.cuda.device import CudaDevice, CudaRuntime

        self.device = torch.device("cuda", 0)
        self.gpu = CudaDevice(self.device, CudaRuntime(self.device))
        self.daemon_flags: tuple[str, ...] = ("--device", "cuda", "--attention-backend")
        self.daemon_flags += ("flashinfer", "--max-model-len", "2048")
        self.invariant_flags: tuple[str, ...] = ("--batch-invariant",)
        self.eight_bits = "fp8"
        self.preemption = "swap"
        self.pytest_marks = "gpu"
        self.sanitizer: tuple[str, ...] = (
            "compute-sanitizer",
            "--tool",
            "memcheck",
            "--error-exitcode",
            "99",
        )

    def accelerator(self) -> Any:
        """A new stream of the device."""
        from worker.cuda.accelerator import Accelerator

        return Accelerator(self.device)

    def kernels(self) -> Any:
        """The kernels of a runner, see worker/cuda/runner_builder.py."""
        from worker.cuda.attention.flashinfer import load_library
        from worker.cuda.attention.kv_store import TritonStore
        from worker.cuda.runner_builder import DeviceKernels
        from worker.cuda.sampling.device_kernels import TritonDraw, TritonEdits

        return DeviceKernels(load_library, TritonStore(), TritonDraw(), TritonEdits())

    def experts(self, stacked: Any) -> dict[str, Any]:
        """The implementations of stacked experts that this device has, by name."""
        from worker.cuda.layers import flashinfer_kernels as library
        from worker.cuda.layers.triton_experts import TritonExperts
        from worker.cuda.layers.triton_kernels import triton_gate
        from worker.layers.experts import ExpertRanks

        found: dict[str, Any] = {"triton": TritonExperts(stacked, triton_gate("silu"))}
        if (
            library.is_hopper(self.device)
            and (module := library.usable_flashinfer())
            and library.has_prebuilt_experts()
        ):
            ranks = ExpertRanks(len(stacked.down))
            found["flashinfer"] = library.FlashInferExperts(module, stacked, ranks)
        return found

    def states(self, shape: Any, num_slots: int, block_size: int) -> Any:
        """The states of recurrent layers, see worker/cuda/states.py."""
        return self.gpu.state_cache(shape, num_slots, block_size)

    def recurrence(self, shape: Any, weights: Any) -> Any:
        """A recurrent layer."""
        return self.gpu.recurrence(shape, weights)

    def progress(self, num_layers: int) -> Any:
        """What records the layers of steps that are computed."""
        from worker.cuda.layer_progress import EventProgress

        return EventProgress(self.accelerator(), num_layers)

    def block_bytes(self, rows: Any) -> Any:
        """What copies single blocks beside the queue of steps."""
        return self.gpu.block_bytes(rows)

    def block_copies(
        self, rows: Any, num_bytes: int, context: Any
    ) -> "tuple[OffloadingHandler, OffloadingHandler]":
        """What stores blocks in host memory, and what loads them."""
        return self.gpu.block_copies(rows, num_bytes, context)

    def name(self) -> str:
        """The name of the device."""
        import torch

        return torch.cuda.get_device_name(self.device)

    def capability(self) -> tuple[int, int]:
        """Compute capability (major, minor)."""
        import torch

        return torch.cuda.get_device_capability(self.device)

    def synchronize(self) -> None:
        """Wait for all queued work."""
        import torch

        torch.cuda.synchronize()

    def median_seconds(
        self, run: Callable[[], object], rounds: int | None = None, warm_ups: int = 3
    ) -> float:
        """Median device time of a round; rounds are queued without waiting."""
        import torch

        for _ in range(warm_ups):
            run()
        count = rounds or self.sizes.rounds
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for event in events[1:]:
            run()
            event.record()
        torch.cuda.synchronize()
        times = [a.elapsed_time(b) for a, b in pairwise(events)]
        return statistics.median(times) / 1000

    def captured(self, run: Callable[[], object]) -> Callable[[], object]:
        """A function that replays what `run` queues as a CUDA graph, without the host's time."""
        run()
        return self.accelerator().capture(run)[0].replay

    def kernel_times(self, run: Callable[[], object], rounds: int = 10) -> dict[str, float]:
        """Microseconds per round of the slowest kernels by name, and of all kernels."""
        from torch.profiler import ProfilerActivity, profile

        run()
        self.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            for _ in range(rounds):
                run()
            self.synchronize()
        return longest(
            {each.key: each.self_device_time_total for each in found.key_averages()}, rounds
        )


def longest(times: dict[str, float], rounds: int, most: int = 10) -> dict[str, float]:
    """The largest times and the sum of all, divided by `rounds`."""
    names = sorted(times, key=lambda name: -times[name])
    listed = {name[:60]: times[name] / rounds for name in names[:most]}
    return {"all": sum(times.values()) / rounds} | listed


def hardware() -> Hardware:
    """The hardware of this process."""
    if rehearsing():
        from tests.gpu.rehearsal import the_fake

        return the_fake()
    from tests.gpu.random_model import CONFIGS

    return Hardware(Sizes(CONFIGS))
