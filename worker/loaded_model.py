"""The model of a worker, which stays loaded while engines come and go.

Start at load, which chooses dtype and weight format and makes a LoadedModel of a prepared model.
kv_fingerprint says whose KV blocks are interchangeable.
"""

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

import torch

from proto.codec import changed
from proto.config import ModelConfig, ServeConfig
from proto.lifecycle import (
    KVCacheGeometry,
    Notice,
    Progress,
    WeightFormatMemory,
    describe_weights,
)
from proto.prepared_model import PreparedModel
from worker.device.devices import Device
from worker.flashinfer_modules import load_modules
from worker.kernels import load_kernels
from worker.kv_cache import KVLayout, kv_cache_geometry, kv_layout, resolve_kv_dtype
from worker.loader.files import read_index
from worker.loader.format_choice import activation_dtype, choose_format, describe_dense_weights
from worker.loader.formats import DenseFormat, WeightFormat
from worker.loader.weights import load_model
from worker.models.decoder import Decoder
from worker.models.registry import read_config, spec_from_config
from worker.parallel.group import RankGroup
from worker.parallel.sharding import shard_model

logger = logging.getLogger("tokend.worker")
LAYOUT_VERSION: Final = 4
"""Counts changes of the cache layout or of the arithmetic of a layer."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on its device.

    dtype: of the activations. config: the model's own config.json. group: the ranks that compute
    the model together with this worker.
    """

    prepared: PreparedModel
    config: dict[str, Any]
    model: Decoder
    dtype: torch.dtype
    weight_format: WeightFormat
    device: Device
    group: RankGroup
    layout: KVLayout
    geometry: KVCacheGeometry

    @property
    def on_cuda(self) -> bool:
        return is_cuda(self.device)

    @property
    def part_of_kv(self) -> Fraction:
        """The share of the KV heads of all workers together that this worker holds."""
        if self.group.size == 1:
            return Fraction(1)
        spec = spec_from_config(self.config)
        shards = shard_model(spec, self.group.size)
        held = [shard.spec.attention_shape.num_kv_heads for shard in shards]
        return Fraction(held[self.group.rank], sum(held))

    @property
    def weights(self) -> tuple[WeightFormatMemory, ...]:
        return tuple(WeightFormatMemory(*item) for item in self.weight_format.memory.items())

    def fingerprint(self, block_size: int) -> bytes:
        """Return the fingerprint of the model's KV blocks, 32 bytes; see kv_fingerprint."""
        return self._fingerprint(block_size, self.geometry, self.group.rank)

    def model_fingerprint(self, block_size: int) -> bytes:
        """Return the fingerprint without what tells the ranks of one model apart."""
        geometry = changed(self.geometry, num_kv_heads=0)
        return self._fingerprint(block_size, geometry, rank=0)

    def _fingerprint(self, block_size: int, geometry: KVCacheGeometry, rank: int) -> bytes:
        return kv_fingerprint(
            self.prepared.weights_sha256,
            self.config,
            geometry,
            block_size,
            str(self.dtype),
            # Another device sums in another order.
            f"cuda {self.weight_format.name}" if self.on_cuda else self.weight_format.name,
            (rank, self.group.size),
        )


def load(
    config: ServeConfig,
    prepared: PreparedModel,
    device: Device,
    group: RankGroup,
    report: Callable[[Progress | Notice], None],
    weight_format: WeightFormat | None = None,
) -> LoadedModel:
    """Load this rank's part of a model.

    report: sends progress and notices to the supervisor.
    weight_format: None for the one that settings and device choose.
    """
    dtype = device.resolve_dtype(activation_dtype(config.model))
    weight_format = weight_format or weight_format_for(config.model, prepared, device)
    logger.info("loading %s as %s", prepared.name, str(dtype).removeprefix("torch."))
    model_config = read_config(prepared)
    whole = spec_from_config(model_config)
    kv_dtype = resolve_kv_dtype(config.cache.kv_cache_dtype, dtype, whole.attention_shape.head_dim)
    if is_cuda(device):
        load_modules(
            config.device,
            whole,
            dtype,
            kv_dtype,
            lambda fraction: report(Progress("worker", group.rank, "loading kernels", fraction)),
        )
    model = load_model(
        prepared,
        whole,
        dtype,
        device.torch_device,
        lambda fraction: report(Progress("worker", group.rank, "loading weights", fraction)),
        weight_format,
        group,
    )
    memory = (WeightFormatMemory(*item) for item in weight_format.memory.items())
    logger.info("weights: %s", describe_weights(memory))
    if notice := describe_dense_weights(weight_format):
        report(Notice("worker", group.rank, notice))
    heads, layout = model.spec.attention_shape, kv_layout(model.spec.windows)
    geometry = kv_cache_geometry(layout, heads.num_kv_heads, heads.head_dim, kv_dtype)
    return LoadedModel(
        prepared, model_config, model, dtype, weight_format, device, group, layout, geometry
    )


def weight_format_for(config: ModelConfig, prepared: PreparedModel, device: Device) -> WeightFormat:
    """Return the format that a model's weights get on this device."""
    dtype = device.resolve_dtype(activation_dtype(config))
    if is_cuda(device):
        return DenseFormat(dtype)
    return choose_format(config, dtype, read_index(prepared), device.matrix_flags, load_kernels)


def is_cuda(device: Device) -> bool:
    return device.torch_device.type == "cuda"


def kv_fingerprint(
    weights_sha256: str,
    model_config: dict[str, Any],
    geometry: KVCacheGeometry,
    block_size: int,
    compute_dtype: str,
    weight_format: str,
    rank_of: tuple[int, int] = (0, 1),
) -> bytes:
    """Return 32 bytes over everything that changes the values in the KV cache.

    Equal in two processes only if their KV blocks are interchangeable. It is the root of the block
    hashes, so KV of different arithmetic never mixes, also if caches outlive a process.

    weight_format: the name of a WeightFormat; other products give other KV.
    rank_of: this worker's rank and the number of ranks; other heads give other sums.
    """
    facts = [
        LAYOUT_VERSION,
        weights_sha256,
        model_config,
        geometry.num_slots,
        geometry.num_kv_heads,
        geometry.head_dim,
        geometry.dtype,
        [group.sliding_window for group in geometry.groups],
        block_size,
        compute_dtype,
        weight_format,
        rank_of,
    ]
    canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).digest()
