"""The model as a worker holds it, which outlives every engine; makes it from what was prepared.

Owns the choice of its arithmetic (dtype, form of the weights) and what follows from it: the
layout of its KV and the fingerprint. Knows nothing of links, pools and steps.
"""

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from proto.config import ModelConfig, ServeConfig
from proto.errors import ModelError
from proto.lifecycle import KVCacheGeometry, WeightMemory
from proto.prepared_model import PreparedModel
from worker.device.base import Device
from worker.fingerprint import kv_fingerprint
from worker.flashinfer_modules import load_modules
from worker.kernels import load_kernels
from worker.kv_cache import kv_cache_geometry, resolve_kv_dtype
from worker.kv_layout import KVLayout, kv_layout
from worker.loader.files import read_index
from worker.loader.format_choice import (
    activation_dtype,
    choose_format,
    describe_dense_weights,
    describe_memory,
)
from worker.loader.formats import DenseFormat, WeightFormat
from worker.loader.weights import load_model
from worker.models.decoder import Decoder
from worker.models.registry import spec_from_config
from worker.parallel.group import RankGroup
from worker.parallel.sharding import shard_model
from worker.reports import Reports

logger = logging.getLogger("tokend.worker")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on its device, for good.

    dtype: of the activations. form: of the weights. config: the model's own config.json.
    group: those who compute it together with this worker.
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
        """Whether it is on a GPU."""
        return is_cuda(self.device)

    @property
    def part_of_kv(self) -> Fraction:
        """Of the KV heads that all workers hold together, those of this one."""
        if self.group.size == 1:
            return Fraction(1)
        spec = spec_from_config(self.config)
        shards = shard_model(spec, self.group.size)
        held = [shard.spec.attention_shape.num_kv_heads for shard in shards]
        return Fraction(held[self.group.rank], sum(held))

    @property
    def weights(self) -> tuple[WeightMemory, ...]:
        """Bytes that the weights take, by weight_format."""
        return tuple(WeightMemory(*each) for each in self.weight_format.memory.items())

    def fingerprint(self, block_size: int) -> bytes:
        """32 bytes over everything that changes what is in its KV blocks."""
        return kv_fingerprint(
            self.prepared.weights_sha256,
            self.config,
            self.geometry,
            block_size,
            str(self.dtype),
            # Another device sums in another order.
            f"cuda {self.weight_format.name}" if self.on_cuda else self.weight_format.name,
            (self.group.rank, self.group.size),
        )


def unchanged(weight_format: WeightFormat) -> WeightFormat:
    return form


def load(
    config: ServeConfig,
    prepared: PreparedModel,
    device: Device,
    group: RankGroup,
    reports: Reports,
    around: Callable[[WeightFormat], WeightFormat] = unchanged,
) -> LoadedModel:
    """This worker's part of a model, in the form that the settings and the device choose.

    around: makes of that form the one that the model is read in, for whoever wants to watch.
    """
    dtype = device.resolve_dtype(activation_dtype(config.model))
    weight_format = around(_choose_format(config.model, prepared, device, dtype))
    logger.info(
        "loading %s as %s, weights %s",
        prepared.name,
        str(dtype).removeprefix("torch."),
        weight_format.name,
    )
    model_config = read_config(prepared)
    whole = spec_from_config(model_config)
    kv_dtype = resolve_kv_dtype(config.cache.kv_cache_dtype, dtype, whole.attention_shape.head_dim)
    if is_cuda(device):
        load_modules(
            config.device,
            whole,
            dtype,
            kv_dtype,
            lambda fraction: reports.progress("loading kernels", fraction),
        )
    model = load_model(
        prepared,
        whole,
        dtype,
        device.torch_device,
        lambda fraction: reports.progress("loading weights", fraction),
        weight_format,
        group,
    )
    logger.info("weights: %s", describe_memory(weight_format))
    if notice := describe_dense_weights(weight_format):
        reports.notice(notice)
    heads, layout = model.spec.attention_shape, kv_layout(model.spec.windows)
    geometry = kv_cache_geometry(layout, heads.num_kv_heads, heads.head_dim, kv_dtype)
    return LoadedModel(prepared, model_config, model, dtype, weight_format, device, group, layout, geometry)


def _choose_format(
    config: ModelConfig, prepared: PreparedModel, device: Device, dtype: torch.dtype
) -> WeightFormat:
    if is_cuda(device):
        return DenseFormat(dtype)
    return choose_format(config, dtype, read_index(prepared), device.matrix_flags, load_kernels)


def is_cuda(device: Device) -> bool:
    """Whether a device is a GPU."""
    return device.torch_device.type == "cuda"


def read_config(prepared: PreparedModel) -> dict[str, Any]:
    """The model's config.json; raises ModelError naming the file."""
    path = Path(prepared.folder) / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: {error}") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path}: not a JSON object")
    return config
