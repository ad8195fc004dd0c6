"""The device of a worker: everything that differs between a CPU, a CUDA GPU and plain torch.

Code outside of the devices' folders (worker/host, worker/reference, worker/cpu, worker/cuda) asks a
Device and does not know which one it has. `create_device` (worker/create_device.py) chooses it;
docs/internals/devices.md says what a new device brings. ModelSetup is a model as a device is to run
it, and refuses settings that are impossible for it.
"""

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

import torch

from proto.errors import ConfigError
from proto.messages.prepared_model import PreparedModel
from proto.settings.config import (
    CacheConfig,
    DeviceConfig,
    DType,
    KVCacheDType,
    LoRAConfig,
    SchedulerConfig,
    ServeConfig,
    flag_name,
)
from proto.settings.kv_media_checks import require_copies_of_states
from worker.attention.backend import AttentionShape
from worker.attention.kv_cache import StateShape, resolve_kv_dtype
from worker.attention.state_cache import StateCache
from worker.batch.transfers import Transfers
from worker.kv_connector.offload.base import BlockDevice
from worker.layers.layer_progress import LayerProgress
from worker.loader.formats import WeightFormat, activation_dtype
from worker.models.layer_device import LayerDevice
from worker.models.registry import model_spec
from worker.models.spec import ModelSpec
from worker.models.transformers_model import TransformersSpec
from worker.sampling.sampler import Sampler
from worker.speculation.drafter import Drafter
from worker.step.routed_experts import require_routed_experts
from worker.step.runner_parts import DrafterParts, Runner, RunnerParts

if TYPE_CHECKING:
    from worker.parallel.torch_group import TorchGroup

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""The torch dtype of each `--dtype` setting except "auto"."""


class Device(LayerDevice, BlockDevice):
    """The device of one worker.

    head_dims: sizes of heads that attention has kernels for, ascending; empty for any.
    runs_largest_step: whether `peak_bytes` runs a step, in which all ranks take part.
    computes_ahead: whether a step is launched before the tokens of the step before are known.
    steps_in_flight: the most steps that are launched at once.
    drafted_positions: sampled positions of drafts for which a step's memory is planned.
    commits_lazily: whether memory is taken when it is first written to.
    converts_here: whether converting weights takes memory that steps and KV use later.
    drafts_on_ranks: whether a model of several ranks may have drafts by a model.
    """

    head_dims: tuple[int, ...] = ()
    runs_largest_step: bool
    computes_ahead: bool
    steps_in_flight: int
    drafted_positions: int
    commits_lazily: bool
    converts_here: bool
    drafts_on_ranks: bool

    # ---- Settings ----

    @property
    @abstractmethod
    def name(self) -> str:
        """A description for people: the hardware and how it is used."""

    @property
    def kernels(self) -> str:
        """What computes, for the operator; "" where nothing is chosen."""
        return ""

    @property
    def placement(self) -> str:
        """Where weights and KV lie, for the operator; "" on a device with one memory."""
        return ""

    @property
    def division(self) -> str:
        """How ranks share the cores of a device, for the operator; "" if they share none."""
        return ""

    @abstractmethod
    def resolve_dtype(self, dtype: DType) -> torch.dtype:
        """Return the torch dtype of a setting; "auto" is the fastest one of the device."""

    @abstractmethod
    def step_tokens(self, config: SchedulerConfig) -> int:
        """Return the token budget of a step: the setting, or a default of the device."""

    @abstractmethod
    def check_kv_dtype(self, setting: KVCacheDType) -> None:
        """Raise ConfigError for a KV dtype that no kernel of the device reads."""

    def refuse(self, setup: "ModelSetup") -> None:
        """Raise ConfigError for a model or a setting that the device does not support."""

    def refuse_draft(self, setup: "ModelSetup", kv_dtype: torch.dtype) -> None:
        """Raise ConfigError for a model that drafts, and whose KV has this dtype."""

    def batch_dependence(self, setup: "ModelSetup") -> tuple[str, str] | None:
        """Return why bits depend on the batch, and a flag that avoids it, or ""; None: they do not.

        What weight formats answer themselves is left out.
        """
        return None

    @abstractmethod
    def layer_progress(self, num_layers: int) -> LayerProgress:
        """Return what says which layers of a step are computed, for connectors."""

    # ---- Memory ----

    @property
    @abstractmethod
    def memory_name(self) -> str:
        """The memory that weights and KV take, in words."""

    @abstractmethod
    def ranks(self, rank: int, num_ranks: int) -> range:
        """Return the ranks of a model whose memory is this one, that of worker `rank` included."""

    @abstractmethod
    def row_memory(self, config: ServeConfig, row_bytes: int) -> Counter[str]:
        """Return what the rows of steps, and other processes, take of this memory, by purpose.

        row_bytes: of the rows of one worker. Raises ConfigError if they do not fit the host.
        """

    def adapter_memory(self, config: LoRAConfig, adapter_bytes: int) -> Counter[str]:
        """Return what a worker's adapters take of this memory, by purpose.

        adapter_bytes: of the largest adapter. Raises ConfigError if they do not fit the host.
        """
        return Counter({f"{config.num_resident} adapters": config.num_resident * adapter_bytes})

    def standby_bytes(self, config: ServeConfig, own_bytes: int) -> int:
        """Return the bytes of this device's memory that standby processes take.

        own_bytes: of weights that each worker has for itself.
        """
        return 0

    @abstractmethod
    def smaller_settings(self) -> list[tuple[str, str, tuple[str | int | float, ...]]]:
        """Return section, field and values, the mildest first, that take less memory."""

    @abstractmethod
    def peak_bytes(self, run: Callable[[], None]) -> int:
        """Return the bytes that the largest step needs beside weights and KV pool.

        run: computes that step.
        """

    @abstractmethod
    def free_bytes(self, config: CacheConfig, loaded_bytes: int = 0) -> int:
        """Return the bytes that weights, steps and KV pool may take now.

        loaded_bytes: of weights that are in memory already, and count as if they were not.
        """

    def shared_bytes(self, descriptor: int) -> int:
        """Return the bytes of memory that a file takes in which `sharing_weights` loads weights."""
        return 0

    def weight_share(self, rank: int) -> float:
        """Return the part of the weights of `WeightFormat.shared_forms` that one engine counts.

        1 unless workers of several engines have them in the same memory. rank: of their workers.
        """
        return 1.0

    @abstractmethod
    def total_bytes(self) -> int:
        """Return the bytes of the memory that `memory_name` names, taken ones included."""

    @abstractmethod
    def default_pool_bytes(self, left: int) -> int:
        """Return the size of a KV pool without a setting. left: bytes beside weights and steps."""

    @abstractmethod
    def kv_cache_bytes(self, config: CacheConfig, planned: int, peak: int, states: int = 0) -> int:
        """Return the bytes of this worker's KV pool, once the weights are loaded.

        planned: by the sizes of the files. peak: bytes of the largest step. states: bytes of the
        slots for recurrent states. Raises ConfigError if they are not free.
        """

    @abstractmethod
    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return memory of zeros for KV, states or experts of all tokens."""

    def state_cache(self, shape: StateShape, num_slots: int, block_size: int) -> StateCache:
        """Return the states of recurrent layers, with the plans of steps that the layers read."""
        return StateCache(shape, num_slots, block_size, self.zeros)

    # ---- Weights ----

    @abstractmethod
    def weight_format(self, config: ServeConfig, prepared: PreparedModel) -> WeightFormat:
        """Return the format that a model's weights get."""

    def sharing_weights(
        self, descriptor: int, facts: Sequence[object], on_growth: Callable[[int], None]
    ) -> AbstractContextManager[bool]:
        """Return a context in which weights are loaded into a file that workers share.

        Its value is whether they are; a worker that is not the first finds them there. Other
        arguments as in worker.host.shared_weights.shared_weights.

        facts: for JSON, all that weights depend on beside the device.
        """
        return nullcontext(False)

    def load_kernels(
        self,
        config: DeviceConfig,
        prepared: PreparedModel,
        spec: ModelSpec,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        show_progress: Callable[[float], None],
    ) -> None:
        """Load the kernels of a library that a model runs on, so that no step compiles any."""

    def why_not_timed(self, prepared: PreparedModel, dtype: torch.dtype) -> str:
        """Return what products cannot be timed for before a model is loaded; "" if they can."""
        return ""

    def choose_attention(
        self, shape: AttentionShape, dtype: torch.dtype, kv_dtype: torch.dtype, folder: str
    ) -> str:
        """Return the name of the fastest kernels for a model's attention; "" for the default."""
        return ""

    def weights_tag(self, weight_format: WeightFormat) -> str:
        """Return what tells products apart in a KV fingerprint: device and format."""
        return weight_format.name

    def kernel_variants(self, attention: str) -> tuple[str, ...]:
        """Return the kernels in a KV fingerprint. attention: from `choose_attention`."""
        return ()

    # ---- Steps ----

    @abstractmethod
    def transfers(self) -> Transfers:
        """Return new transfers between the host and this memory, for one thread."""

    @abstractmethod
    def sampler(self) -> Sampler:
        """Return the sampler of steps that are sampled on the host."""

    @abstractmethod
    def build_runner(self, parts: RunnerParts) -> Runner:
        """Return what computes the steps of an engine, warmed up."""

    @abstractmethod
    def build_drafter(self, parts: DrafterParts) -> Drafter:
        """Return what drafts for the model of an engine, warmed up."""

    @abstractmethod
    def run_largest_step(self, parts: RunnerParts, num_tokens: int, num_seqs: int) -> None:
        """Compute the step that takes the most memory, in block 0; for `peak_bytes`."""

    @abstractmethod
    def run_largest_pass(self, parts: DrafterParts, num_tokens: int, num_seqs: int) -> None:
        """Compute the largest pass of a drafter, as `run_largest_step` does."""

    @abstractmethod
    def rank_group(self) -> "type[TorchGroup]":
        """Return the kind of group through which the ranks of a model exchange tensors."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until everything that was launched has run."""

    def profiler_activities(self) -> list[torch.profiler.ProfilerActivity]:
        """Return what a profile of steps records."""
        return [torch.profiler.ProfilerActivity.CPU]


@dataclass(frozen=True, kw_only=True)
class ModelSetup:
    """A model with the settings, the device and the arithmetic that it runs with.

    spec: of the whole model. dtype: of the activations. ranks: those that this device computes.
    """

    config: ServeConfig
    prepared: PreparedModel
    device: Device
    spec: ModelSpec
    dtype: torch.dtype
    weight_format: WeightFormat
    ranks: range

    @classmethod
    def choose(
        cls,
        config: ServeConfig,
        prepared: PreparedModel,
        device: Device,
        rank: int,
        weight_format: WeightFormat | None,
    ) -> Self:
        """Return how a worker runs the served model.

        weight_format: None for the one that settings and device choose.
        """
        num_ranks = config.parallel.tensor_parallel_size
        return cls(
            config=config,
            prepared=prepared,
            device=device,
            dtype=device.resolve_dtype(activation_dtype(config.model)),
            spec=model_spec(prepared, config, device.head_dims),
            weight_format=weight_format or device.weight_format(config, prepared),
            ranks=device.ranks(rank, num_ranks),
        )

    @property
    def num_ranks(self) -> int:
        """Ranks that compute the model together, on this device and on others."""
        return self.config.parallel.tensor_parallel_size

    def kv_dtype(self) -> torch.dtype:
        """Return the dtype of a served model's KV; raises ConfigError for an impossible setting."""
        heads, cache = self.spec.attention_shape, self.config.cache
        return resolve_kv_dtype(cache.kv_cache_dtype, self.dtype, heads.head_dim, heads.latent_dim)

    def require_possible(self) -> None:
        """Raise ConfigError for a setting that is impossible for a served model on this device."""
        if self.config.device.batch_invariant:
            self.require_batch_invariance()
        if self.spec.is_bidirectional:
            self._refuse_kv_settings()
        self.device.refuse(self)
        if self.spec.state_layers:
            require_copies_of_states(self.config)
        elif self.config.cache.num_state_slots is not None:
            raise ConfigError(
                f"--num-state-slots: {self.prepared.architecture} has no layers with a recurrent "
                "state"
            )
        self.kv_dtype()
        if self.config.model.enable_return_routed_experts:
            require_routed_experts(self.spec)

    def require_batch_invariance(self) -> None:
        """Raise ConfigError for a model, a setting or a device whose bits depend on the batch."""
        spec, way_out = self.spec, ""
        if isinstance(spec, TransformersSpec):
            what = f"{spec.architecture} runs on transformers' code"
        elif reason := self.device.batch_dependence(self):
            what, way_out = reason
        elif self.config.cache.kv_cache_dtype == "int8":
            what = "a prompt reads int8 pages otherwise than a decode"
            way_out = "--kv-cache-dtype auto"
        elif not self.weight_format.is_batch_invariant(self.dtype):
            what = f"{self.weight_format.name} products are chosen by the number of rows"
            way_out = "--cpu-weights bf16, packed or int8"
        else:
            return
        raise ConfigError(f"--batch-invariant: {what}{f'; {way_out} works' if way_out else ''}")

    def _refuse_kv_settings(self) -> None:
        """Raise ConfigError for a setting of the KV cache of a model that has none."""
        cache, scheduler = self.config.cache, self.config.scheduler
        for field, is_set in (
            (cache.pool_setting or "", cache.pool_setting is not None),
            ("kv_cache_dtype", cache.kv_cache_dtype != "auto"),
            ("kv_transfer_config", cache.kv_transfer_config is not None),
            ("kv_events_config", cache.parsed_kv_events() is not None),
            ("long_prefill_token_threshold", scheduler.long_prefill_token_threshold > 0),
            ("cascade_attention_from", self.config.device.cascade_attention_from > 0),
        ):
            if is_set:
                raise ConfigError(
                    f"{flag_name(field)}: {self.prepared.architecture} attends in both directions: "
                    "it keeps no KV cache, and computes each text in one step"
                )
