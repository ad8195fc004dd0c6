"""A CPU with the C++ kernels of worker/csrc."""

import functools
import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from proto.errors import ConfigError
from proto.messages.prepared_model import PreparedModel
from proto.runtime.host_resources import node_of_worker
from proto.settings.config import DeviceConfig, ParallelConfig, ServeConfig
from worker.attention.backend import AttentionBackend, AttentionShape
from worker.attention.kv_cache import KVCache
from worker.batch.transfers import HostTransfers, Transfers
from worker.cpu.adapters import KernelAdapters
from worker.cpu.attention import CpuAttention, UnsupportedShapeError
from worker.cpu.build_kernels import machine_variants
from worker.cpu.formats import choose_format, dense_format
from worker.cpu.kernel_choice import choose_attention
from worker.cpu.kernels import DTYPE_CODES, Kernels, candidate_kernels, load_kernels
from worker.cpu.layers import KernelNorm, kernel_gate
from worker.cpu.linear import OneDnnLinear, is_reordered_by_onednn
from worker.cpu.moe import KernelMoe
from worker.cpu.recurrence import KERNEL_RECURRENCES
from worker.cpu.sampling import KernelBackend
from worker.cpu.stack import KernelStack, is_describable
from worker.cpu.thread_team import TeamModelRunner, ThreadTeam, thread_team
from worker.cpu.tower_attention import CpuTowerAttention
from worker.cpu.weights import block_table
from worker.host.device import ALONE, HostDevice
from worker.host.memory_nodes import memory_placement
from worker.host.shared_weights import bytes_in_memory, shared_weights
from worker.layers.activation import Activation, Gate
from worker.layers.adapters import StepAdapters
from worker.layers.embedding import EmbeddingTable
from worker.layers.experts import AdaptedExperts, LinearExperts
from worker.layers.linear import DenseLinear, Linear
from worker.layers.norm import Norm, NormWeight
from worker.layers.recurrence import Recurrence, RecurrenceShape
from worker.layers.tower_attention import TowerAttention
from worker.loader.files import read_index
from worker.loader.formats import WeightFormat, activation_dtype
from worker.models.layer_stack import DecoderLayer, LayerStack
from worker.models.moe import FusedMixture, Mixture
from worker.models.registry import runs_on_transformers
from worker.reference.attention import ReferenceAttention
from worker.sampling.sampler import Sampler
from worker.step.runner_parts import Runner, RunnerParts

logger = logging.getLogger("tokend.attention")


class CpuDevice(HostDevice):
    """The CPU cores that this process may run on, with the instructions that --cpu-kernels allows.

    kernels: None for the best ones that run here; raises KernelsUnavailableError without any.
    Other arguments as in HostDevice.
    """

    maps_blocks = True

    def __init__(
        self,
        config: DeviceConfig,
        root: Path = Path("/"),
        *,
        parallel: ParallelConfig = ALONE,
        starts_alone: bool = False,
        has_standby: bool = False,
        kernels: Kernels | None = None,
    ) -> None:
        super().__init__(config, root, parallel=parallel, starts_alone=starts_alone)
        self._kernels = kernels or load_kernels()
        self._must_share = parallel.data_parallel_size > 1 or has_standby
        self._limit = "" if config.cpu_kernels == "auto" else config.cpu_kernels
        for variant in machine_variants():
            if variant.name == self._limit:
                self._flags &= variant.cpu_flags

    def _facts(self) -> list[str]:
        limit = [f"kernels held to {self._limit}"] if self._limit else []
        return super()._facts() + limit

    @property
    def kernels(self) -> str:
        """The instruction sets of the kernels."""
        names = [kernels.variant for kernels in candidate_kernels()]
        return ", ".join(names) + ("; the fastest for each product" if names[1:] else "")

    @property
    def placement(self) -> str:
        placement = memory_placement()
        return "" if placement is None else str(placement)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        memory = super().zeros(shape, dtype)
        if (placement := memory_placement()) is not None:
            placement.interleave(memory)
        return memory

    def shared_bytes(self, descriptor: int) -> int:
        return bytes_in_memory(descriptor)

    def weight_share(self, rank: int) -> float:
        """Return the copies, one for each memory node that workers of this rank are on, by engine.

        As in deploy/supervisor/processes.py:WeightFiles.
        """
        indices = range(rank, self._num_workers, self._num_workers // self._num_engines)
        nodes = {
            node_of_worker(index, self._num_workers, self.num_threads, self._root)
            for index in indices
        }
        return len(nodes) / len(indices)

    # ---- Weights ----

    @contextmanager
    def sharing_weights(
        self, descriptor: int, facts: Sequence[object], on_growth: Callable[[int], None]
    ) -> Iterator[bool]:
        kernels = self._kernels
        all_facts = json.dumps([kernels.variant, kernels.digest, *facts])
        with shared_weights(
            descriptor,
            hashlib.sha256(all_facts.encode()).digest(),
            memory_placement(),
            must_share=self._must_share,
            on_growth=on_growth,
        ) as memory:
            private, kernels.memory = kernels.memory, memory
            try:
                yield memory.is_shared
            finally:
                kernels.memory = private

    def weight_format(self, config: ServeConfig, prepared: PreparedModel) -> WeightFormat:
        dtype = self.resolve_dtype(activation_dtype(config.model))
        if runs_on_transformers(prepared, config.model.model_impl):
            return dense_format(dtype, self._kernels)
        return choose_format(config.model, dtype, read_index(prepared), self._kernels)

    def choose_attention(
        self, shape: AttentionShape, dtype: torch.dtype, kv_dtype: torch.dtype, folder: str
    ) -> str:
        kernels, _ = choose_attention(shape, dtype, kv_dtype, folder)
        return "" if kernels is None else kernels.variant

    def kernel_variants(self, attention: str) -> tuple[str, ...]:
        default = self._kernels.variant
        return tuple(dict.fromkeys((default, attention or default)))

    def block_table(
        self, block_type: str, stored: npt.NDArray[np.uint8], columns: int, dtype: torch.dtype
    ) -> EmbeddingTable:
        return block_table(self._kernels, block_type, stored, columns, dtype)

    def copies_weight(self, dtype: torch.dtype) -> bool:
        return is_reordered_by_onednn(dtype)

    # ---- Parts of layers ----

    def norm(self, weight: NormWeight) -> Norm:
        return KernelNorm(self._kernels, weight)

    def gate(self, name: Activation, is_gated: bool = True) -> Gate:
        return kernel_gate(self._kernels, name, is_gated)

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        reorders = is_reordered_by_onednn(weight.dtype)
        return OneDnnLinear(weight, bias) if reorders else DenseLinear(weight, bias)

    def step_adapters(self) -> StepAdapters:
        return KernelAdapters(self._kernels)

    def adapter_head(self, weight: torch.Tensor) -> Linear:
        return dense_format(weight.dtype, self._kernels).build(self, weight, None)

    def fused_mixture(self, mixture: Mixture) -> FusedMixture | None:
        spec = mixture.spec
        is_plain = spec.is_gated and not spec.latent_size
        adapted = mixture.experts if isinstance(mixture.experts, AdaptedExperts) else None
        experts = mixture.experts if adapted is None else adapted.base
        if not isinstance(experts, LinearExperts) or not is_plain:
            return None
        return KernelMoe(self._kernels, mixture, experts, adapted)

    def recurrence(self, shape: RecurrenceShape, weights: object) -> Recurrence:
        return KERNEL_RECURRENCES[type(shape)](self._kernels, shape, weights)

    def tower_attention(self, num_heads: int, head_dim: int, dtype: torch.dtype) -> TowerAttention:
        return CpuTowerAttention(self._kernels, num_heads, head_dim, dtype)

    def layer_stacks(
        self, layers: Sequence[DecoderLayer], hidden_size: int
    ) -> tuple[LayerStack, ...]:
        stacks = super().layer_stacks(layers, hidden_size)
        if not is_describable(layers):
            return stacks
        return (KernelStack(self._kernels, hidden_size, layers), *stacks)

    # ---- Steps ----

    def attention(
        self, name: str, kv_cache: KVCache, shape: AttentionShape, kernels: str = ""
    ) -> AttentionBackend:
        """Return the kernels' attention; with "auto" the reference for heads without kernels."""
        if name not in ("auto", "cpu"):
            raise ConfigError(f"--attention-backend {name} does not run on a CPU")
        chosen = self._kernels
        if kernels:
            chosen = next(each for each in candidate_kernels() if each.variant == kernels)
        try:
            backend = CpuAttention(chosen, kv_cache, shape)
        except UnsupportedShapeError as reason:
            if name == "cpu":
                raise ConfigError(f"--attention-backend cpu needs kernels: {reason}") from None
            logger.warning("attention runs on the slow reference: %s", reason)
            return ReferenceAttention(kv_cache, shape)
        logger.info("attention runs on the %s kernels", chosen.variant)
        return backend

    def transfers(self) -> Transfers:
        return CpuTransfers(self._kernels)

    def sampler(self) -> Sampler:
        return Sampler(KernelBackend(self._kernels))

    def build_runner(self, parts: RunnerParts) -> Runner:
        # Other products may have other bits with other threads.
        if not parts.is_batch_invariant or self._team is None:
            return super().build_runner(parts)
        return TeamModelRunner(self.model_runner(parts), self._team)

    @functools.cached_property
    def _team(self) -> ThreadTeam | None:
        return thread_team(self._kernels)


class CpuTransfers(HostTransfers):
    """HostTransfers with a kernel that finds NaN and infinities."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def nonfinite_sequences(
        self, hidden: torch.Tensor, query_start: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.bool_]:
        hidden = hidden.contiguous()
        nonfinite = np.empty(len(query_start) - 1, dtype=np.bool_)
        self._kernels.find_nonfinite(
            DTYPE_CODES[hidden.dtype],
            len(nonfinite),
            query_start.ctypes.data,
            hidden.shape[1],
            hidden.data_ptr(),
            nonfinite.ctypes.data,
        )
        return nonfinite
