"""Adapters of tiny models, made by PEFT, and models that have them merged: the oracle."""

import copy
import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from proto.messages.lora import LoadAdapter
from proto.messages.prepared_model import PreparedModel
from proto.settings.config import ServeConfig
from tests.fakes.devices import CPU
from tests.fakes.prepared_models import spec_of
from worker.batch.step_inputs import TokenAdapters
from worker.device import Device
from worker.layers.adapters import Adapter, AdapterTargets, StepAdapters
from worker.loader.adapters.build import AdapterLimits, AdapterLoader, adapted_weights
from worker.loader.files import read_index
from worker.loader.formats import DenseFormat, WeightFormat
from worker.loader.source import block_columns
from worker.loader.transformers_weights import load_transformers
from worker.loader.vision import adapted_vision_weights, load_vision
from worker.loader.weights import load_model
from worker.models.decoder import Decoder
from worker.models.registry import model_spec
from worker.models.sharding import shard_model
from worker.models.transformers_model import TransformersSpec
from worker.models.vision.encoder import VisionEncoder
from worker.parallel.group import RankGroup
from worker.step.adapter_store import AdapterStore

SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ALONE = RankGroup()


def make_adapter(
    model: Any, folder: Path, seed: int = 1, size: float = 1.0, **settings: Any
) -> Path:
    """Save an adapter of random numbers, which change the logits a lot, to a folder."""
    settings = {"target_modules": SEVEN, "r": 4, "lora_alpha": 8} | settings
    warnings.filterwarnings("ignore", module=r"peft\..*")
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(**settings))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_magnitude" in name:
                weight.mul_(1 + 0.3 * torch.randn(weight.shape, generator=generator))
            elif "lora_" in name or "trainable_tokens" in name or "modules_to_save" in name:
                noise = torch.randn(weight.shape, generator=generator)
                weight.copy_(size * 0.5 * noise / weight.shape[-1] ** 0.5)
    adapted.save_pretrained(folder)
    return folder


def merged(model: Any, folder: Path) -> Any:
    """Return the model with an adapter in its weights, beside them where PEFT cannot merge it."""
    adapted = PeftModel.from_pretrained(copy.deepcopy(model), str(folder)).eval()
    config = adapted.peft_config["default"]
    # Merging into a tied embedding would change the head, which the adapter itself does not.
    if config.lora_bias or "embed_tokens" in (config.target_modules or ()):
        return adapted
    return adapted.merge_and_unload().eval()


def edit_config(folder: Path, **changes: Any) -> None:
    """Change keys of adapter_config.json."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


class Served:
    """A model of one rank that is served with adapters.

    vision: what encodes images; None for a model that reads none.
    """

    def __init__(
        self,
        prepared: PreparedModel,
        dtype: torch.dtype = torch.float32,
        weight_format: WeightFormat | None = None,
        group: RankGroup = ALONE,
        device: Device = CPU,
        config: ServeConfig | None = None,
        step: StepAdapters | None = None,
        max_loras: int = 8,
        **limits: Any,
    ) -> None:
        """step: None for that of the device. max_loras: adapters of a step."""
        spec = spec_of(prepared) if config is None else model_spec(prepared, config)
        self.targets = AdapterTargets(step or device.step_adapters())
        self.decoder: Decoder
        if isinstance(spec, TransformersSpec):
            dense = weight_format or DenseFormat(dtype)
            assert isinstance(dense, DenseFormat)
            self.decoder = load_transformers(
                prepared, spec, dtype, device, _show, dense, self.targets
            )
        else:
            self.decoder = load_model(
                prepared, spec, dtype, device, _show, weight_format, group, self.targets
            )
        self.vision: VisionEncoder | None = None
        weights, vision = spec.weights(), None
        if prepared.vision is not None:
            self.vision = load_vision(prepared, dtype, device, self.targets)
            vision = self.vision.spec
            weights |= adapted_vision_weights(vision)
        shards = shard_model(spec, group.size, block_columns(spec, read_index(prepared)))
        allowed = AdapterLimits(**{"max_rank": 64} | limits)
        own = shards[group.rank].weights
        products = adapted_weights(self.targets, weights, own, allowed.modules)
        self.targets.step.reserve(products, max_loras, allowed.max_rank, dtype)
        self.loader = AdapterLoader(
            prepared, spec, self.targets, own, group.rank, device, dtype, allowed, vision
        )
        self.store = AdapterStore(self.loader, self.targets.step, group.rank)

    def load(self, path: Path, number: int | None = None) -> Adapter:
        """Load an adapter, as the steps' adapter of this number if one is given."""
        work = self.loader.load(str(path))
        while True:
            try:
                next(work)
            except StopIteration as finished:
                adapter: Adapter = finished.value
                break
        if number is not None:
            self.store._adapters[number] = adapter
        return adapter

    def running(self, ids: Sequence[int], scales: Sequence[float] = ()) -> Any:
        """Let the rows of a forward pass have these adapters."""
        found = np.array(ids, dtype=np.int64)
        factors = np.array(scales or np.ones(len(ids)), dtype=np.float32)
        return self.store.running(TokenAdapters(found, factors))


def load_in_thread(store: AdapterStore, path: Path, number: int) -> Any:
    """Load an adapter by the store's thread; return its answer."""
    import select

    store.begin_load(LoadAdapter(1, number, str(path)))
    while True:
        assert select.select([store.descriptor], [], [], 30.0)[0], "no answer"
        if answers := store.take_finished():
            return answers[0]


def _show(fraction: float) -> None:
    """Show nothing."""


Make = Callable[[Any, Path], Path]
