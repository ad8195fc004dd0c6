"""A model as a device is to run it, and the settings that are refused for it.

Start at ModelSetup.choose. `require_possible` checks a served model, `require_gpu_kernels` one
that drafts for it.
"""

from dataclasses import dataclass
from typing import Self

import torch

from proto.config import ServeConfig, flag_name
from proto.errors import ConfigError
from proto.prepared_model import PreparedModel
from worker.attention.flashinfer import refuse_unsupported
from worker.attention.flashinfer_latent import require_latent_kernels
from worker.device.devices import Device
from worker.kv_cache import resolve_kv_dtype
from worker.loader.format_choice import activation_dtype, is_batch_invariant, weight_format_for
from worker.loader.formats import WeightFormat
from worker.models.registry import model_spec
from worker.models.spec import ModelSpec
from worker.models.transformers_model import TransformersSpec
from worker.parallel.sharding import shard_model
from worker.routed_experts import require_routed_experts


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
            spec=model_spec(prepared, config),
            weight_format=weight_format or weight_format_for(config, prepared, device),
            ranks=range(num_ranks) if device.shares_memory else range(rank, rank + 1),
        )

    @property
    def on_cuda(self) -> bool:
        return self.device.torch_device.type == "cuda"

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
            self._require_batch_invariance()
        if self.spec.is_bidirectional:
            self._refuse_kv_settings()
        if self.spec.state_layers:
            self._refuse_with_states()
        elif self.config.cache.num_state_slots is not None:
            raise ConfigError(
                f"--num-state-slots: {self.prepared.architecture} has no layers with a recurrent "
                "state",
                "num_state_slots",
            )
        kv_dtype = self.kv_dtype()
        if self.on_cuda and self.spec.attention_shape.latent_dim:
            shard = shard_model(self.spec, self.num_ranks)[self.ranks.start].spec
            self._require_latent_kernels(shard, kv_dtype)
        if self.config.model.enable_return_routed_experts:
            require_routed_experts(self.spec)

    def require_gpu_kernels(self, kv_dtype: torch.dtype) -> None:
        """Raise ConfigError for a model that drafts whose attention a GPU does not compute as set.

        kv_dtype: of the drafting model's KV.
        """
        settings, shape = self.config.device, self.spec.attention_shape
        if settings.batch_invariant:
            self._require_batch_invariance()
        if settings.attention_backend == "flashinfer" or settings.batch_invariant:
            refuse_unsupported(shape, self.dtype, kv_dtype)
        if shape.latent_dim:
            self._require_latent_kernels(self.spec, kv_dtype)

    def _require_latent_kernels(self, shard: ModelSpec, kv_dtype: torch.dtype) -> None:
        """Raise ConfigError if a GPU has no kernels for a rank's attention over latents."""
        require_latent_kernels(
            self.config,
            self.prepared.architecture,
            shard.attention_shape,
            self.dtype,
            kv_dtype,
            self.device.step_tokens(self.config.scheduler),
        )

    def _require_batch_invariance(self) -> None:
        """Raise ConfigError for a model, a setting or a device whose bits depend on the batch."""
        config, spec = self.config, self.spec
        heads, on_cuda = spec.attention_shape, self.on_cuda
        way_out = ""
        if isinstance(spec, TransformersSpec):
            what = f"{spec.architecture} runs on transformers' code"
        elif on_cuda and spec.has_experts:
            what = (
                f"the products of {spec.architecture}'s experts have as many rows as tokens choose"
            )
        elif on_cuda and (heads.latent_dim or heads.bidirectional):
            what = f"{spec.architecture} has attention whose sums depend on the batch"
        elif on_cuda and self.dtype == torch.float32:
            what, way_out = "attention computes 16 bits on a GPU", "--dtype bfloat16"
        elif on_cuda and self.num_ranks > 1:
            what, way_out = "sums over GPUs depend on their size", "--tensor-parallel-size 1"
        elif on_cuda and config.device.cascade_attention_from:
            what = "cascade attention depends on the batch"
            way_out = "--cascade-attention-from 0"
        elif on_cuda and config.device.attention_backend == "reference":
            what = "the reference attention depends on the batch"
            way_out = "--attention-backend auto"
        elif config.cache.kv_cache_dtype == "int8":
            what = "a prompt reads int8 pages otherwise than a decode"
            way_out = "--kv-cache-dtype auto"
        elif not is_batch_invariant(self.weight_format, self.dtype, spec):
            what = f"{self.weight_format.name} products are chosen by the number of rows"
            way_out = "--cpu-weights bf16, packed or int8"
        else:
            return
        raise ConfigError(
            f"--batch-invariant: {what}{f'; {way_out} works' if way_out else ''}",
            "batch_invariant",
        )

    def _refuse_kv_settings(self) -> None:
        """Raise ConfigError for a setting of the KV cache of a model that has none."""
        cache, scheduler = self.config.cache, self.config.scheduler
        for field, is_set in (
            (cache.pool_setting or "", cache.pool_setting is not None),
            ("kv_cache_dtype", cache.kv_cache_dtype != "auto"),
            ("kv_transfer_config", cache.kv_transfer_config is not None),
            ("kv_events_endpoint", cache.kv_events_endpoint is not None),
            ("long_prefill_token_threshold", scheduler.long_prefill_token_threshold > 0),
        ):
            if is_set:
                raise ConfigError(
                    f"{flag_name(field)}: {self.prepared.architecture} attends in both directions: "
                    "it keeps no KV cache, and computes each text in one step",
                    field,
                )

    def _refuse_with_states(self) -> None:
        """Raise ConfigError for what a model with recurrent states does not support so far."""
        what = f"{self.prepared.architecture} has layers with a recurrent state"
        if self.device.torch_device.type != "cpu":
            raise ConfigError(
                f"{what}, which runs on a CPU only so far: --device cpu is needed", "device"
            )
        if self.config.cache.kv_transfer_config is not None:
            raise ConfigError(
                f"--kv-transfer-config: {what}, which KV connectors do not transfer",
                "kv_transfer_config",
            )
