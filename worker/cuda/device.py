"""A CUDA GPU, whose memory is divided like this:

    total     [ others | weights | largest step | KV pool .......... | left alone ]
              <-------------- gpu_memory_utilization ----------------->

The memory of the largest step is measured by running it, before the KV pool is allocated.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from proto.errors import ConfigError
from proto.messages.prepared_model import PreparedModel
from proto.runtime.host_resources import available_memory
from proto.settings.config import (
    GIB,
    CacheConfig,
    DeviceConfig,
    DType,
    KVCacheDType,
    LoRAConfig,
    SchedulerConfig,
    ServeConfig,
    memory_size,
)
from worker.attention.kv_cache import StateShape
from worker.attention.state_cache import StateCache
from worker.batch.transfers import Transfers
from worker.cpu.sampling import create_sampler
from worker.cuda.accelerator import Accelerator, CopyStream
from worker.cuda.attention.flashinfer import load_library, refuse_unsupported
from worker.cuda.attention.flashinfer_latent import require_latent_kernels
from worker.cuda.attention.kv_store import TritonStore
from worker.cuda.flashinfer_library import HEAD_DIMS
from worker.cuda.flashinfer_modules import load_modules
from worker.cuda.formats import FixedRowsFormat, GpuFormat, multiplies_blocks
from worker.cuda.layers.adapter_slots import SlotAdapters
from worker.cuda.layers.dense_linear import StackedHeadLinears
from worker.cuda.layers.flashinfer_kernels import (
    GATES,
    FlashInferExperts,
    FlashInferNorm,
    flashinfer_gate,
    has_prebuilt_experts,
    is_hopper,
    takes_experts,
    usable_flashinfer,
)
from worker.cuda.layers.recurrence import TRITON_RECURRENCES
from worker.cuda.layers.triton_experts import TritonExperts
from worker.cuda.layers.triton_kernels import TritonNorm, triton_gate
from worker.cuda.runner_builder import (
    DeviceKernels,
    Gpu,
    build_drafter,
    build_runner,
    run_largest_pass,
    run_largest_step,
)
from worker.cuda.sampling.device_kernels import TritonDraw, TritonEdits
from worker.cuda.states import CudaStates
from worker.cuda.transfers import QueuedTransfers
from worker.device import DTYPES, Device, ModelSetup
from worker.layers.activation import Activation, Gate
from worker.layers.activation import is_gated as has_gate
from worker.layers.experts import ExpertRanks, Experts, StackedWeights
from worker.layers.linear import DenseLinear, HeadLinears, Linear
from worker.layers.norm import Norm, NormWeight
from worker.layers.recurrence import Recurrence, RecurrenceShape
from worker.loader.files import read_index
from worker.loader.formats import WeightFormat, activation_dtype
from worker.models.sharding import shard_model
from worker.models.spec import ModelSpec
from worker.models.transformers_model import TransformersSpec
from worker.sampling.sampler import Sampler
from worker.speculation.drafter import Drafter
from worker.step.runner_parts import DrafterParts, Runner, RunnerParts

if TYPE_CHECKING:
    from worker.cuda.block_copies import DeviceBlockBytes, DeviceCopies
    from worker.cuda.layer_progress import EventProgress
    from worker.cuda.nccl_group import NcclGroup
    from worker.kv_connector.offload.base import HandlerContext

logger = logging.getLogger("tokend.device")

_FIRST_BFLOAT16_CAPABILITY: Final = (8, 0)
"""The first CUDA compute capability with matrix products of bfloat16."""
_TABLES: Final = ("embed_tokens", "lm_head")
_STEP_TOKENS: Final = ((64 * GIB, 8192), (30 * GIB, 4096), (0, 2048))
"""(least bytes of GPU memory, default token budget of a step). From 2048 rows on, a matrix product
takes longer to compute than to read its weight; larger steps are fewer and longer."""


def create_cuda_device(config: ServeConfig, index: int) -> "CudaDevice":
    """Return the GPU of worker i: the i-th that CUDA_VISIBLE_DEVICES leaves.

    Raises ConfigError without a GPU, or with fewer GPUs than workers.
    """
    if not torch.cuda.is_available():
        raise ConfigError(f"--device cuda: {_why_no_cuda()}; --device cpu works here")
    number, found = config.parallel.num_workers, torch.cuda.device_count()
    if number > found:
        raise ConfigError(
            f"{config.parallel.flags}: each worker needs a GPU of its own, {found} found; "
            "--device cpu shares a model among workers without any"
        )
    sizes = {torch.cuda.get_device_properties(each).total_memory for each in range(number)}
    if len(sizes) > 1 and config.scheduler.max_num_batched_tokens is None:
        raise ConfigError(
            f"{config.parallel.flags}: the GPUs have {min(sizes)} to {max(sizes)} bytes of "
            "memory, so no step suits all of them; give --max-num-batched-tokens",
            "max_num_batched_tokens",
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return CudaDevice(device, CudaRuntime(device))


def _why_no_cuda() -> str:
    if torch.version.cuda is None:
        return f"the installed torch {torch.__version__} is built without CUDA"
    return "torch finds no NVIDIA GPU"


class DeviceMemory(NamedTuple):
    """Bytes of a GPU's memory."""

    free: int
    total: int


class CudaRuntime:
    """The calls of torch.cuda that CudaDevice makes; tests replace it by a made-up GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def name(self) -> str:
        return torch.cuda.get_device_name(self._device)

    def capability(self) -> tuple[int, int]:
        """Return the compute capability, for example (9, 0)."""
        return torch.cuda.get_device_capability(self._device)

    def memory(self) -> DeviceMemory:
        """Return free and total memory after emptying torch's cache."""
        torch.cuda.empty_cache()
        return DeviceMemory(*torch.cuda.mem_get_info(self._device))

    def peak_bytes(self, run: Callable[[], None]) -> int:
        """Return the most bytes that tensors took while `run` computed, beyond those before."""
        torch.cuda.synchronize(self._device)
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        run()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - before


class CudaDevice(Device):
    """One CUDA GPU."""

    head_dims = HEAD_DIMS
    has_results = False
    runs_largest_step = True
    computes_ahead = True
    steps_in_flight = 2
    drafted_positions = 0
    commits_lazily = False
    converts_here = False
    drafts_on_ranks = False

    def __init__(self, device: torch.device, runtime: CudaRuntime) -> None:
        self.torch_device = device
        self._runtime = runtime

    @property
    def name(self) -> str:
        """For example "NVIDIA H100 80GB HBM3 (79.2 GiB)"."""
        return f"{self._runtime.name()} ({memory_size(self._runtime.memory().total)})"

    def resolve_dtype(self, dtype: DType) -> torch.dtype:
        """Return the dtype; "auto" is bfloat16 if the GPU multiplies it, else float16."""
        if dtype != "auto":
            return DTYPES[dtype]
        has_bfloat16 = self._runtime.capability() >= _FIRST_BFLOAT16_CAPABILITY
        return torch.bfloat16 if has_bfloat16 else torch.float16

    def step_tokens(self, config: SchedulerConfig) -> int:
        """Return the setting, or a default by the size of the GPU's memory."""
        if config.max_num_batched_tokens is not None:
            return config.max_num_batched_tokens
        total = self._runtime.memory().total
        return next(tokens for least_bytes, tokens in _STEP_TOKENS if total >= least_bytes)

    def check_kv_dtype(self, setting: KVCacheDType) -> None:
        """Accept every dtype; attention backends refuse the ones they cannot read."""

    def refuse(self, setup: ModelSetup) -> None:
        """Raise ConfigError for images, latents without kernels, and some adapters."""
        spec, lora = setup.spec, setup.config.lora
        if lora.enable_lora and isinstance(spec, TransformersSpec):
            raise ConfigError(
                f"--enable-lora: {setup.prepared.architecture} runs on transformers' code, which "
                "has adapters on a CPU only so far: --device cpu is needed"
            )
        if setup.prepared.vision is not None:
            raise ConfigError(
                f"{setup.prepared.vision.architecture} reads images, which runs on a CPU only so "
                "far: --device cpu is needed, or --limit-mm-per-prompt '{\"image\": 0}'",
                "device",
            )
        tables = [each for each in lora.lora_target_modules if each in _TABLES]
        if lora.enable_lora and tables:
            raise ConfigError(
                f"--lora-target-modules {tables[0]}: on a GPU adapters change neither embedding "
                "nor head: --device cpu is needed"
            )
        if spec.attention_shape.latent_dim:
            shard = shard_model(spec, setup.num_ranks)[setup.ranks.start].spec
            self._require_latent_kernels(setup, shard, setup.kv_dtype())

    def refuse_draft(self, setup: ModelSetup, kv_dtype: torch.dtype) -> None:
        """Raise ConfigError for attention that no kernel computes as the settings ask."""
        settings, shape = setup.config.device, setup.spec.attention_shape
        if settings.batch_invariant:
            setup.require_batch_invariance()
        if settings.attention_backend == "flashinfer" or settings.batch_invariant:
            refuse_unsupported(shape, setup.dtype, kv_dtype)
        if shape.latent_dim:
            self._require_latent_kernels(setup, setup.spec, kv_dtype)

    def _require_latent_kernels(
        self, setup: ModelSetup, shard: ModelSpec, kv_dtype: torch.dtype
    ) -> None:
        """Raise ConfigError if there are no kernels for a rank's attention over latents."""
        require_latent_kernels(
            setup.config,
            setup.prepared.architecture,
            shard.attention_shape,
            setup.dtype,
            kv_dtype,
            self.step_tokens(setup.config.scheduler),
        )

    def batch_dependence(self, setup: ModelSetup) -> tuple[str, str] | None:
        spec, settings, heads = setup.spec, setup.config.device, setup.spec.attention_shape
        if spec.has_experts:
            what = f"the products of {spec.architecture}'s experts have as many rows as tokens"
            return f"{what} choose", ""
        if heads.latent_dim or heads.bidirectional:
            return f"{spec.architecture} has attention whose sums depend on the batch", ""
        if setup.dtype == torch.float32:
            return "attention computes 16 bits on a GPU", "--dtype bfloat16"
        if setup.num_ranks > 1:
            return "sums over GPUs depend on their size", "--tensor-parallel-size 1"
        if settings.cascade_attention_from:
            return "cascade attention depends on the batch", "--cascade-attention-from 0"
        return None

    # ---- Memory ----

    def ranks(self, rank: int, num_ranks: int) -> range:
        return range(rank, rank + 1)

    def row_memory(self, config: ServeConfig, row_bytes: int) -> Counter[str]:
        free = available_memory()
        if row_bytes > free:
            raise ConfigError(
                f"--max-num-seqs {config.scheduler.max_num_seqs}: {row_bytes} bytes "
                f"({memory_size(row_bytes)}) of rows is more than the {free} bytes "
                f"({memory_size(free)}) of memory that are free"
            )
        return Counter()

    def adapter_memory(self, config: LoRAConfig, adapter_bytes: int) -> Counter[str]:
        """Return the memory of a step's adapters; the host has all of them."""
        held, free = config.num_resident * adapter_bytes, available_memory()
        if held > free:
            raise ConfigError(
                f"--max-cpu-loras {config.num_resident}: adapters of {held} bytes "
                f"({memory_size(held)}) are more than the {free} bytes ({memory_size(free)}) of "
                "the host's memory that are free; give a smaller one, or a smaller --max-lora-rank"
            )
        return Counter({f"{config.max_loras} adapters": config.max_loras * adapter_bytes})

    def smaller_settings(self) -> list[tuple[str, str, tuple[str | int | float, ...]]]:
        return [
            ("cache", "gpu_memory_utilization", (0.95, 0.98)),
            ("cache", "kv_cache_dtype", ("fp8",)),
            ("scheduler", "max_num_batched_tokens", (4096, 2048, 1024, 512)),
            ("scheduler", "max_num_seqs", (128, 64, 32, 16)),
            ("lora", "max_lora_rank", (32, 16, 8)),
            ("lora", "max_loras", (4, 2, 1)),
        ]

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.torch_device)

    def block_bytes(self, rows: torch.Tensor) -> "DeviceBlockBytes":
        from worker.cuda.block_copies import DeviceBlockBytes

        return DeviceBlockBytes(rows, Accelerator(rows.device), CopyStream(rows.device))

    def layer_progress(self, num_layers: int) -> "EventProgress":
        from worker.cuda.layer_progress import EventProgress

        return EventProgress(Accelerator(self.torch_device), num_layers)

    def block_copies(
        self, blocks: torch.Tensor, num_bytes: int, context: "HandlerContext"
    ) -> "tuple[DeviceCopies, DeviceCopies]":
        from worker.cuda.block_copies import gpu_copies

        return gpu_copies(blocks, num_bytes, context)

    def peak_bytes(self, run: Callable[[], None]) -> int:
        """Run the largest step and return its memory; raise ConfigError if it does not fit."""
        try:
            peak = self._runtime.peak_bytes(run)
        except torch.cuda.OutOfMemoryError:
            free, total = self._runtime.memory()
            raise ConfigError(
                f"the largest step has no room: beside the weights {free} bytes "
                f"({memory_size(free)}) of {total} ({memory_size(total)}) are free; give a smaller "
                "--max-num-batched-tokens or --max-num-seqs",
                "max_num_batched_tokens",
            ) from None
        logger.info("the largest step takes %s beside the weights", memory_size(peak))
        return peak

    @property
    def memory_name(self) -> str:
        return "memory of the GPU"

    def free_bytes(self, config: CacheConfig, loaded_bytes: int = 0) -> int:
        """Return what --gpu-memory-utilization leaves; with a pool of a fixed size, all of it."""
        free, total = self._runtime.memory()
        if config.pool_setting is not None:
            return free
        return int(total * config.gpu_memory_utilization) - (total - free)

    def total_bytes(self) -> int:
        return self._runtime.memory().total

    def default_pool_bytes(self, left: int) -> int:
        """Return all of it: --gpu-memory-utilization leaves a share already."""
        return left

    def kv_cache_bytes(self, config: CacheConfig, planned: int, peak: int, states: int = 0) -> int:
        """Return the planned size of a pool with a setting, else all that is left now."""
        free, total = self._runtime.memory()
        left = self.free_bytes(config) - peak - states
        beside = f"the states of {memory_size(states)} and " if states else ""
        if config.pool_setting is not None:
            if planned > left:
                raise ConfigError(
                    f"the KV pool of {planned} bytes ({memory_size(planned)}) is more than the "
                    f"{left} bytes ({memory_size(left)}) of the device's memory that are free "
                    f"beside {beside}the largest step",
                    config.pool_setting,
                )
            return planned
        if left <= 0:
            raise ConfigError(
                f"--gpu-memory-utilization {config.gpu_memory_utilization} leaves nothing for the "
                f"KV pool: it allows {left + peak + states + total - free} bytes of {total} "
                f"({memory_size(total)}), {total - free} ({memory_size(total - free)}) are taken "
                f"and {beside}the largest step needs {peak} ({memory_size(peak)})"
            )
        return left

    # ---- Weights ----

    def weight_format(self, config: ServeConfig, prepared: PreparedModel) -> WeightFormat:
        dtype = self.resolve_dtype(activation_dtype(config.model))
        return FixedRowsFormat(dtype) if config.device.batch_invariant else GpuFormat(dtype)

    def load_kernels(
        self,
        config: DeviceConfig,
        prepared: PreparedModel,
        spec: ModelSpec,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        show_progress: Callable[[float], None],
    ) -> None:
        fp8_blocks = multiplies_blocks(read_index(prepared), self.torch_device, dtype)
        load_modules(config, spec, dtype, kv_dtype, show_progress, fp8_blocks=fp8_blocks)

    def why_not_timed(self, prepared: PreparedModel, dtype: torch.dtype) -> str:
        if multiplies_blocks(read_index(prepared), self.torch_device, dtype):
            return "FP8 in blocks, whose kernels may have to be compiled"
        return ""

    def weights_tag(self, weight_format: WeightFormat) -> str:
        return f"cuda {'+'.join(sorted(weight_format.memory))}"

    # ---- Parts of layers ----

    def norm(self, weight: NormWeight) -> Norm:
        library, own = usable_flashinfer(), TritonNorm(weight)
        has_kernel = library is not None and not weight.is_layer_norm
        return FlashInferNorm(library, own) if has_kernel else own

    def gate(self, name: Activation, is_gated: bool = True) -> Gate:
        library, own = usable_flashinfer(), triton_gate(name, is_gated)
        has_kernel = library is not None and is_gated and name in GATES
        return flashinfer_gate(library, name, own) if has_kernel else own

    def step_adapters(self) -> SlotAdapters:
        return SlotAdapters(lambda: Accelerator(self.torch_device))

    def head_linears(self, linears: Sequence[Linear]) -> HeadLinears:
        dense = [each for each in linears if isinstance(each, DenseLinear)]
        return StackedHeadLinears(dense) if len(dense) == len(linears) else HeadLinears(linears)

    def stacked_experts(
        self, stacked: StackedWeights, activation: Activation, ranks: ExpertRanks
    ) -> Experts:
        library = usable_flashinfer() if is_hopper(self.torch_device) else None
        fits = library is not None and takes_experts(stacked, activation, ranks)
        if fits and has_prebuilt_experts():
            return FlashInferExperts(library, stacked, ranks)
        return TritonExperts(stacked, self.gate(activation, has_gate(activation)), ranks.first)

    def recurrence(self, shape: RecurrenceShape, weights: object) -> Recurrence:
        return TRITON_RECURRENCES[type(shape)](shape, weights)

    def state_cache(self, shape: StateShape, num_slots: int, block_size: int) -> StateCache:
        accelerator = Accelerator(self.torch_device)
        return CudaStates(accelerator, shape, num_slots, block_size, self.zeros)

    # ---- Steps ----

    def transfers(self) -> Transfers:
        return QueuedTransfers(Accelerator(self.torch_device))

    def sampler(self) -> Sampler:
        return create_sampler()

    def build_runner(self, parts: RunnerParts) -> Runner:
        return build_runner(self._gpu(), parts)

    def build_drafter(self, parts: DrafterParts) -> Drafter:
        return build_drafter(self._gpu(), parts)

    def run_largest_step(self, parts: RunnerParts, num_tokens: int, num_seqs: int) -> None:
        run_largest_step(self._gpu(), parts, num_tokens, num_seqs)

    def run_largest_pass(self, parts: DrafterParts, num_tokens: int, num_seqs: int) -> None:
        run_largest_pass(self._gpu(), parts, num_tokens, num_seqs)

    def _gpu(self) -> Gpu:
        kernels = DeviceKernels(load_library, TritonStore(), TritonDraw(), TritonEdits())
        return Gpu(Accelerator(self.torch_device), kernels, self.sampler())

    def rank_group(self) -> "type[NcclGroup]":
        from worker.cuda.nccl_group import NcclGroup  # torch.distributed takes time to import

        return NcclGroup

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def profiler_activities(self) -> list[torch.profiler.ProfilerActivity]:
        return [*super().profiler_activities(), torch.profiler.ProfilerActivity.CUDA]
