"""What devices have in common that compute in the memory of the host, whose cores all ranks share.

free   [ weights | work space | states | KV pool ................ | left to the machine ]
"""

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from proto.errors import ConfigError
from proto.messages.lifecycle import LEAST_STATE_SLOTS
from proto.runtime.host_resources import (
    available_memory,
    cores_of_worker,
    is_memory_limited,
    total_memory,
    usable_cores,
)
from proto.settings.config import (
    DEFAULT_POOL_SHARE,
    CacheConfig,
    DeviceConfig,
    DType,
    KVCacheDType,
    ParallelConfig,
    SchedulerConfig,
    ServeConfig,
)
from proto.settings.speculative_config import DRAFT_POSITIONS
from worker.attention.backend import AttentionBackend, AttentionShape
from worker.attention.kv_cache import KVCache, lazy_zeros
from worker.attention.state_cache import AttentionWithStates
from worker.device import DTYPES, Device, ModelSetup
from worker.layers.layer_progress import HostProgress
from worker.models.decoder import Decoder
from worker.speculation.draft_model import DraftModel
from worker.speculation.draft_sampler import host_draw
from worker.speculation.drafter import Drafter
from worker.speculation.eagle import EagleDrafter
from worker.step.model_runner import ModelRunner, SyncModelRunner
from worker.step.pooling import PoolingRunner
from worker.step.runner_parts import DrafterParts, Runner, RunnerParts

if TYPE_CHECKING:
    from worker.host.block_copies import HostBlockBytes, HostCopies
    from worker.kv_connector.offload.base import HandlerContext
    from worker.parallel.torch_group import TorchGroup

_MATRIX_FLAGS: Final = ("avx512_bf16", "amx_bf16")
"""CPU features that multiply bfloat16 matrices faster than float32 ones."""
ALONE: Final = ParallelConfig()
"""One engine with one worker."""
PROCESS_BYTES: Final = 300 << 20
"""Memory of supervisor, engine and the first front end, and of a worker beyond its imports."""
API_SERVER_BYTES: Final = 130 << 20
"""Memory of every further front end."""
STANDBY_ENGINE_BYTES: Final = 30 << 20
STANDBY_WORKER_BYTES: Final = 170 << 20
"""Memory of a standby process, of a worker without weights."""
PREFILL_TOKENS: Final = 256
"""Most tokens of a sequence in a pass of a draft model."""


class HostDevice(Device):
    """A device that computes in the host's memory, one step at a time.

    root: folder with the `proc` and `sys` trees that describe the machine. parallel: the workers
    that share its cores, and the engines that share its memory. starts_alone: the others have taken
    what they need of the memory.
    """

    torch_device = torch.device("cpu")
    has_results = True
    maps_tables = True
    runs_largest_step = False
    computes_ahead = False
    steps_in_flight = 1
    drafted_positions = DRAFT_POSITIONS
    commits_lazily = True
    converts_here = True
    drafts_on_ranks = True

    def __init__(
        self,
        config: DeviceConfig,
        root: Path = Path("/"),
        *,
        parallel: ParallelConfig = ALONE,
        starts_alone: bool = False,
    ) -> None:
        self._root = root
        self._num_workers = parallel.num_workers
        self._num_engines = 1 if starts_alone else parallel.data_parallel_size
        self._model_name, self._flags = _read_cpuinfo(root)
        self.num_threads = config.cpu_threads or cores_of_worker(self._num_workers, root)

    @property
    def matrix_flags(self) -> tuple[str, ...]:
        """Features of the CPU that multiply bfloat16 matrices."""
        return tuple(flag for flag in _MATRIX_FLAGS if flag in self._flags)

    @property
    def division(self) -> str:
        """For example "2 workers share 8 cores: 4 threads each"."""
        if self._num_workers == 1:
            return ""
        cores, threads = usable_cores(self._root), torch.get_num_threads()
        each = f"{threads} thread{'s' if threads > 1 else ''} each"
        too_many = ", more than there are" if self._num_workers * threads > cores else ""
        return f"{self._num_workers} workers share {cores} cores: {each}{too_many}"

    @property
    def name(self) -> str:
        """For example "AMD EPYC (2 threads, avx512_bf16)"."""
        return f"{self._model_name} ({', '.join(self._facts())})"

    def _facts(self) -> list[str]:
        threads = f"{self.num_threads} thread{'s' if self.num_threads > 1 else ''}"
        return [threads, *self.matrix_flags]

    def resolve_dtype(self, dtype: DType) -> torch.dtype:
        """Return the dtype; "auto" is bfloat16 if the CPU multiplies it in hardware."""
        if dtype == "auto":
            return torch.bfloat16 if self.matrix_flags else torch.float32
        return DTYPES[dtype]

    def step_tokens(self, config: SchedulerConfig) -> int:
        return config.step_tokens

    def check_kv_dtype(self, setting: KVCacheDType) -> None:
        if setting == "fp8":
            raise ConfigError("--kv-cache-dtype fp8 needs --device cuda; a CPU has int8")

    def refuse(self, setup: ModelSetup) -> None:
        if setup.config.device.cascade_attention_from:
            raise ConfigError(
                "--cascade-attention-from needs --device cuda: attention on a CPU reads the pages "
                "of each sequence by themselves"
            )

    # ---- Memory ----

    @property
    def memory_name(self) -> str:
        limited = is_memory_limited(self._root)
        name = "memory of this container" if limited else "memory of this machine"
        return f"{name} for each of {self._num_engines} engines" if self._num_engines > 1 else name

    def ranks(self, rank: int, num_ranks: int) -> range:
        return range(num_ranks)

    def row_memory(self, config: ServeConfig, row_bytes: int) -> Counter[str]:
        num_rows = config.scheduler.max_num_seqs
        num_further = config.frontend.api_server_count - 1
        return Counter(
            {
                f"{num_rows:,} sequences": row_bytes * config.parallel.tensor_parallel_size,
                "processes": PROCESS_BYTES + num_further * API_SERVER_BYTES // self._num_engines,
            }
        )

    def standby_bytes(self, config: ServeConfig, own_bytes: int) -> int:
        settings = config.reliability
        of_engines = settings.standby_engines * STANDBY_ENGINE_BYTES
        of_workers = settings.standby_workers * (STANDBY_WORKER_BYTES + own_bytes)
        return (of_engines + of_workers) // self._num_engines

    def smaller_settings(self) -> list[tuple[str, str, tuple[str | int | float, ...]]]:
        return [
            ("cache", "kv_cache_dtype", ("int8",)),
            ("model", "cpu_weights", ("packed", "int8")),
            ("cache", "num_state_slots", (64, 16, LEAST_STATE_SLOTS)),
            ("scheduler", "max_num_seqs", (256, 128, 64, 32, 16, 8, 4, 1)),
            ("scheduler", "max_num_batched_tokens", (128, 64, 32)),
            ("lora", "max_lora_rank", (32, 16, 8)),
            ("lora", "max_cpu_loras", (16, 8, 4, 2, 1)),
        ]

    def peak_bytes(self, run: Callable[[], None]) -> int:
        """Return 0 without running: the operating system provides a step's memory on demand."""
        return 0

    def free_bytes(self, config: CacheConfig, loaded_bytes: int = 0) -> int:
        return (available_memory(self._root) + loaded_bytes) // self._num_engines

    def total_bytes(self) -> int:
        return total_memory(self._root)

    def default_pool_bytes(self, left: int) -> int:
        """Return DEFAULT_POOL_SHARE of it: other programs take more now and then."""
        return int(left * DEFAULT_POOL_SHARE)

    def kv_cache_bytes(self, config: CacheConfig, planned: int, peak: int, states: int = 0) -> int:
        """Return the planned size: weights of mapped files would count as free memory now."""
        return planned

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return lazy_zeros(shape, dtype)

    def block_bytes(self, rows: torch.Tensor) -> "HostBlockBytes":
        from worker.host.block_copies import HostBlockBytes

        return HostBlockBytes(rows)

    def layer_progress(self, num_layers: int) -> HostProgress:
        return HostProgress(num_layers)

    def block_copies(
        self, blocks: torch.Tensor, num_bytes: int, context: "HandlerContext"
    ) -> "tuple[HostCopies, HostCopies]":
        from worker.host.block_copies import host_copies

        return host_copies(blocks, num_bytes, context)

    # ---- Steps ----

    @abstractmethod
    def attention(
        self, name: str, kv_cache: KVCache, shape: AttentionShape, kernels: str = ""
    ) -> AttentionBackend:
        """Return the attention backend of this name; raises ConfigError if there is none here.

        kernels: from `choose_attention`.
        """

    def model_runner(self, parts: RunnerParts) -> ModelRunner:
        """Return a runner whose `execute` computes a step, warmed up."""
        backend = self.attention(
            parts.config.attention_backend,
            parts.kv_cache,
            parts.model.spec.attention_shape,
            parts.attention_kernels,
        )
        attention = backend
        if parts.states is not None:
            attention = AttentionWithStates(backend, parts.states)
        fields: dict[str, Any] = {
            "model": parts.model,
            "attention": attention,
            "sampler": self.sampler(),
            "batch": parts.batch,
            "kv_cache": parts.kv_cache,
            "transfers": self.transfers(),
            "fault_injector": parts.fault_injector,
            "adapters": parts.adapters,
        }
        runner = (
            ModelRunner(
                **fields,
                experts=parts.experts,
                drafter=parts.drafter,
                encoder_cache=parts.encoder_cache,
            )
            if parts.pooling_head is None
            else PoolingRunner(parts.pooling_head, **fields)
        )
        runner.warm_up()
        return runner

    def build_runner(self, parts: RunnerParts) -> Runner:
        return SyncModelRunner(self.model_runner(parts))

    def build_drafter(self, parts: DrafterParts) -> Drafter:
        model, target = parts.model, parts.target
        attention = self.attention(
            parts.config.attention_backend,
            parts.kv_cache,
            model.spec.attention_shape,
            parts.attention_kernels,
        )
        draw, transfers = host_draw(self.sampler()), self.transfers()
        drafter: Drafter
        if isinstance(model, Decoder):
            drafter = DraftModel(
                model, attention, parts.kv_cache, draw, target, transfers, PREFILL_TOKENS
            )
        else:
            drafter = EagleDrafter(model, attention, parts.kv_cache, draw, target, transfers)
        drafter.warm_up()
        return drafter

    def run_largest_step(self, parts: RunnerParts, num_tokens: int, num_seqs: int) -> None:
        """Run nothing: `peak_bytes` measures no step."""

    def run_largest_pass(self, parts: DrafterParts, num_tokens: int, num_seqs: int) -> None:
        """Run nothing, as `run_largest_step`."""

    def rank_group(self) -> "type[TorchGroup]":
        from worker.parallel.torch_group import TorchGroup  # torch.distributed takes time

        return TorchGroup

    def synchronize(self) -> None:
        """Return at once: calls have run when they return."""


def cpu_model_name() -> str:
    """Return the name of the processor."""
    return _read_cpuinfo(Path("/"))[0]


def _read_cpuinfo(root: Path) -> tuple[str, frozenset[str]]:
    """Return model name and feature flags of the first CPU, as far as /proc/cpuinfo has them."""
    name, flags = "CPU", frozenset[str]()
    try:
        text = (root / "proc/cpuinfo").read_text()
    except OSError:
        return name, flags
    for line in text.split("\n\n", 1)[0].splitlines():
        key, _, value = (part.strip() for part in line.partition(":"))
        if key == "model name":
            name = value
        elif key in ("flags", "Features"):
            flags = frozenset(value.split())
    return name, flags
