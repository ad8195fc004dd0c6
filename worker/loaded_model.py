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
from proto.lifecycle import KVCacheGeometry, Notice, Progress, WeightFormatMemory
from proto.prepared_model import PreparedModel
from worker.device.devices import Device
from worker.fingerprint import kv_fingerprint
from worker.flashinfer_modules import load_modules
from worker.kernels import load_kernels
from worker.kv_cache import kv_cache_geometry, resolve_kv_dtype
from worker.kv_layout import KVLayout, kv_layout
from worker.loader.choice import activation_dtype, choose_form
from worker.loader.form_report import dense_notice, memory_line
from worker.loader.forms import DenseForm, WeightForm
from worker.loader.index import read_index
from worker.loader.pieces import shares_of
from worker.loader.weights import load_model
from worker.models.decoder import Decoder
from worker.models.registry import spec_from_config
from worker.parallel.group import RankGroup

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
    form: WeightForm
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
        spec, index = spec_from_config(self.config), read_index(self.prepared)
        held = [len(share.kv_heads) for share in shares_of(spec, index, self.group.size)]
        return Fraction(held[self.group.rank], sum(held))

    @property
    def weights(self) -> tuple[WeightFormatMemory, ...]:
        """Bytes that the weights take, by form."""
        return tuple(WeightFormatMemory(*each) for each in self.form.memory.items())

    def fingerprint(self, block_size: int) -> bytes:
        """32 bytes over everything that changes what is in its KV blocks."""
        return kv_fingerprint(
            self.prepared.weights_sha256,
            self.config,
            self.geometry,
            block_size,
            str(self.dtype),
            # Another device sums in another order.
            f"cuda {self.form.name}" if self.on_cuda else self.form.name,
            (self.group.rank, self.group.size),
        )


def unchanged(form: WeightForm) -> WeightForm:
    return form


def load(
    config: ServeConfig,
    prepared: PreparedModel,
    device: Device,
    group: RankGroup,
    report: Callable[[Progress | Notice], None],
    around: Callable[[WeightForm], WeightForm] = unchanged,
) -> LoadedModel:
    """This worker's part of a model, in the form that the settings and the device choose.

    report: sends progress and notices to the supervisor.
    around: makes of that form the one that the model is read in, for whoever wants to watch.
    """
    dtype = device.resolve_dtype(activation_dtype(config.model))
    form = around(_choose_form(config.model, prepared, device, dtype))
    logger.info(
        "loading %s as %s, weights %s",
        prepared.name,
        str(dtype).removeprefix("torch."),
        form.name,
    )
    model_config = read_config(prepared)
    whole = spec_from_config(model_config)
    kv_dtype = resolve_kv_dtype(config.cache.kv_cache_dtype, dtype, whole.head_dim)
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
        form,
        group,
    )
    logger.info("weights: %s", memory_line(form))
    if notice := dense_notice(form):
        report(Notice("worker", group.rank, notice))
    spec, layout = model.spec, kv_layout(model.spec.windows)
    geometry = kv_cache_geometry(layout, spec.num_kv_heads, spec.head_dim, kv_dtype)
    return LoadedModel(prepared, model_config, model, dtype, form, device, group, layout, geometry)


def _choose_form(
    config: ModelConfig, prepared: PreparedModel, device: Device, dtype: torch.dtype
) -> WeightForm:
    if is_cuda(device):
        return DenseForm(dtype)
    return choose_form(config, dtype, read_index(prepared), device.matrix_flags, load_kernels)


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
