"""The model of a worker, which stays loaded while engines come and go.

Start at load, which chooses dtype and weight format and makes a LoadedModel of a prepared model.
kv_fingerprint says whose KV blocks are interchangeable.
"""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from proto.codec import changed
from proto.config import ServeConfig
from proto.kv_media_checks import kv_outlives_process
from proto.lifecycle import (
    KVCacheGeometry,
    Notice,
    Progress,
    WeightFormatMemory,
    describe_weights,
)
from proto.pooling import pooler_of
from proto.prepared_model import PreparedModel
from proto.speculative_config import HEAD_METHODS
from proto.turn_ends import with_end_tokens
from worker.device.devices import Device
from worker.flashinfer_modules import load_modules
from worker.kernel_choice import choose_attention
from worker.kernels import Kernels, candidate_kernels, row_kernels
from worker.kv_cache import KVLayout, resolve_kv_dtype
from worker.loader.digest import hashing
from worker.loader.files import read_index
from worker.loader.format_choice import (
    activation_dtype,
    describe_dense_weights,
    is_batch_invariant,
    weight_format_for,
)
from worker.loader.formats import (
    DenseFormat,
    WeightFormat,
)
from worker.loader.gpu_format import multiplies_blocks
from worker.loader.transformers_weights import load_transformers
from worker.loader.weights import load_model
from worker.memory_nodes import memory_placement
from worker.memory_plan import MemoryPlan, layer_cache, plan_memory
from worker.memory_refusal import refusal
from worker.models.decoder import Decoder
from worker.models.registry import model_spec, read_config
from worker.models.spec import ModelSpec
from worker.models.transformers_model import TransformersSpec
from worker.parallel.group import RankGroup
from worker.pooling import PoolingHead
from worker.speculation.draft_settings import (
    draft_cache,
    draft_config,
    draft_kv_dtype,
    naming_draft,
    require_draft_model,
)
from worker.speculation.eagle_head import EagleHead, load_head, read_head

logger = logging.getLogger("tokend.worker")
LAYOUT_VERSION: Final = 4
"""Counts changes of the cache layout or of the arithmetic of a layer."""


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A model that proposes drafts for another, on the same device and the same ranks.

    method: of proto.speculative_config.MODEL_METHODS. model: for methods with a head this head,
    whole on each rank. max_model_len: tokens that a sequence may have with its draft.
    weights_sample: that of its manifest. The other fields as in LoadedModel.
    """

    method: str
    model: Decoder | EagleHead
    weight_format: WeightFormat
    layout: KVLayout
    geometry: KVCacheGeometry
    max_model_len: int
    weights_sample: str
    attention_kernels: Kernels | None = None

    @property
    def fingerprint(self) -> bytes:
        """Hash of what its drafts depend on, 32 bytes; the same on all ranks."""
        facts = [
            self.method,
            self.weights_sample,
            self.weight_format.name,
            self.geometry.dtype,
            self.geometry.head_dim,
            self.max_model_len,
        ]
        return hashlib.sha256(json.dumps(facts).encode()).digest()


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on its device.

    dtype: of the activations. config: the model's own config.json. group: the ranks that compute
    the model together with this worker. plan: the memory, before the weights were read.
    pooling_head: None for a model that generates. attention_kernels: None for the default ones.
    weights_hash: all weights, or the manifest's sample of them if no KV outlives the process.
    draft: the model that proposes drafts; None without one.
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
    plan: MemoryPlan
    weights_hash: str
    pooling_head: PoolingHead | None = None
    attention_kernels: Kernels | None = None
    draft: LoadedDraft | None = None

    @property
    def on_cuda(self) -> bool:
        return is_cuda(self.device)

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a token has the same bits in a step of any number of rows."""
        return is_batch_invariant(self.weight_format, self.dtype, self.model.spec)

    @property
    def kernels(self) -> str:
        """The instruction sets of the kernels on a CPU, for the operator; "" on a GPU."""
        if self.on_cuda:
            return ""
        names = [kernels.variant for kernels in candidate_kernels()]
        if not names:
            return "none are compiled for this CPU: plain torch, many times slower"
        return ", ".join(names) + ("; the fastest for each product" if names[1:] else "")

    @property
    def weights(self) -> tuple[WeightFormatMemory, ...]:
        """Memory by format, that of a draft model included."""
        memory = Counter(self.weight_format.memory)
        if self.draft is not None:
            memory += self.draft.weight_format.memory
        return tuple(WeightFormatMemory(*item) for item in memory.items())

    def fingerprint(self, block_size: int) -> bytes:
        """Return the fingerprint of the model's KV blocks, 32 bytes; see kv_fingerprint."""
        products = {weight.arithmetic for weight in self.weight_format.kernel_weights}
        return self._fingerprint(block_size, self.geometry, self.group.rank, sorted(products))

    def model_fingerprint(self, block_size: int) -> bytes:
        """Return the fingerprint without what tells the ranks of one model apart."""
        geometry = changed(self.geometry, num_kv_heads=0)
        return self._fingerprint(block_size, geometry, rank=0, products=())

    def _fingerprint(
        self, block_size: int, geometry: KVCacheGeometry, rank: int, products: Sequence[str]
    ) -> bytes:
        rows = None if self.on_cuda else row_kernels()
        attention = self.attention_kernels or rows
        variants = dict.fromkeys(each.variant for each in (rows, attention) if each)
        return kv_fingerprint(
            weights_hash=self.weights_hash,
            model_config=self.config,
            geometry=geometry,
            block_size=block_size,
            compute_dtype=str(self.dtype),
            # Another device sums in another order, and so do the kernels of each format.
            weight_format=f"cuda {'+'.join(sorted(self.weight_format.memory))}"
            if self.on_cuda
            else self.weight_format.name,
            rank_of=(rank, self.group.size, self.model.spec.is_expert_parallel),
            kernels=(*variants, *products),
            implementation=self.model.implementation,
            ropes=sorted({repr(rope) for rope in self.model.spec.ropes}),
        )


def load(
    config: ServeConfig,
    prepared: PreparedModel,
    device: Device,
    group: RankGroup,
    report: Callable[[Progress | Notice], None],
    weight_format: WeightFormat | None = None,
    *,
    must_fit: bool = True,
    draft: PreparedModel | None = None,
) -> LoadedModel:
    """Load this rank's part of a model, and of the one that drafts for it.

    report: sends progress and notices to the supervisor.
    weight_format: None for the one that settings and device choose.
    must_fit: raise ConfigError, before a weight is read, if the model does not fit into memory.
    draft: the model of --speculative-config. Raises ConfigError, before a weight is read, if it
        cannot draft for `prepared`.
    """
    if draft is not None:
        require_draft_model(config, prepared, draft, device)
    pooler = pooler_of(config.model, prepared)
    dtype = device.resolve_dtype(activation_dtype(config.model))
    weight_format = weight_format or weight_format_for(config, prepared, device)
    plan = plan_memory(config, prepared, device, group.rank, weight_format, draft)
    if not plan.fits:
        error = refusal(plan, config, prepared, device, group.rank, draft)
        if must_fit:
            raise error
        logger.warning("%s", error)
    logger.info("loading %s as %s", prepared.name, str(dtype).removeprefix("torch."))
    if prepared.unloaded_parts and group.rank == 0:
        logger.info("%s: %s", prepared.name, prepared.text_only_notice)
    if pooler is None and group.rank == 0:
        ends = with_end_tokens(prepared, config.model).ends_notice
        logger.info("end tokens of %s: %s", prepared.name, ends)
    if not is_cuda(device) and (placement := memory_placement()) is not None:
        logger.info("%s", placement)
    whole = model_spec(prepared, config)
    heads = whole.attention_shape
    kv_dtype = resolve_kv_dtype(
        config.cache.kv_cache_dtype, dtype, heads.head_dim, heads.latent_dim
    )
    if is_cuda(device):
        load_kernels = partial(_load_modules, config, dtype, device, group, report)
        load_kernels(prepared, whole, kv_dtype)
        if draft is not None:
            with naming_draft(draft):
                load_kernels(draft, *_spec_and_kv_dtype(config, draft, whole, dtype))

    load_weights = partial(
        _load_weights,
        prepared,
        whole,
        dtype,
        device.torch_device,
        lambda fraction: report(Progress("worker", group.rank, "loading weights", fraction)),
        weight_format,
        group,
    )
    if kv_outlives_process(config):
        with hashing(prepared) as digest:
            model = load_weights()
        weights_hash = digest.result()
    else:
        model, weights_hash = load_weights(), prepared.weights_sample
    memory = (WeightFormatMemory(*item) for item in weight_format.memory.items())
    logger.info("weights: %s", describe_weights(memory))
    if notice := describe_dense_weights(weight_format):
        report(Notice("worker", group.rank, notice))
    layout, geometry = layer_cache(model.spec, kv_dtype)
    attention_kernels = _attention_kernels(config, prepared, model.spec, device, dtype, kv_dtype)
    loaded_draft = None
    if draft is not None:
        with naming_draft(draft):
            loaded_draft = (
                _load_head(config, draft, model, dtype, device)
                if config.speculation.parsed().model_method in HEAD_METHODS
                else _load_draft(config, draft, dtype, device, group, report)
            )
    return LoadedModel(
        prepared=prepared,
        config=read_config(prepared),
        model=model,
        dtype=dtype,
        weight_format=weight_format,
        device=device,
        group=group,
        layout=layout,
        geometry=geometry,
        plan=plan,
        weights_hash=weights_hash,
        pooling_head=None if pooler is None else PoolingHead.load(pooler, prepared),
        attention_kernels=attention_kernels,
        draft=loaded_draft,
    )


def _load_modules(
    config: ServeConfig,
    dtype: torch.dtype,
    device: Device,
    group: RankGroup,
    report: Callable[[Progress | Notice], None],
    prepared: PreparedModel,
    spec: ModelSpec,
    kv_dtype: torch.dtype,
) -> None:
    """Load the kernels of a library that a model runs on a GPU."""
    load_modules(
        config.device,
        spec,
        dtype,
        kv_dtype,
        lambda fraction: report(Progress("worker", group.rank, "loading kernels", fraction)),
        fp8_blocks=multiplies_blocks(read_index(prepared), device.torch_device, dtype),
    )


def _spec_and_kv_dtype(
    config: ServeConfig, draft: PreparedModel, target: ModelSpec, dtype: torch.dtype
) -> tuple[ModelSpec, torch.dtype]:
    """Return the spec of a model that drafts for `target`, and the dtype of its KV."""
    method = config.speculation.parsed().model_method
    if method in HEAD_METHODS:
        return read_head(method, draft, target), dtype
    config = draft_config(config, draft)
    spec = model_spec(draft, config)
    return spec, draft_kv_dtype(spec, config, dtype)


def _load_weights(
    prepared: PreparedModel,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    show_progress: Callable[[float], None],
    weight_format: WeightFormat,
    group: RankGroup,
) -> Decoder:
    """Return this rank's part of the decoder, with a family's or transformers' code."""
    if not isinstance(spec, TransformersSpec):
        return load_model(prepared, spec, dtype, device, show_progress, weight_format, group)
    assert isinstance(weight_format, DenseFormat)
    logger.warning(
        "%s runs on transformers' code, which is slower than a family of tokend's own",
        spec.architecture,
    )
    return load_transformers(prepared, spec, dtype, device, show_progress, weight_format)


def _load_draft(
    config: ServeConfig,
    draft: PreparedModel,
    dtype: torch.dtype,
    device: Device,
    group: RankGroup,
    report: Callable[[Progress | Notice], None],
) -> LoadedDraft:
    """Load this rank's part of a draft model; config: of the served one."""
    config = draft_config(config, draft)
    weight_format = weight_format_for(config, draft, device)
    logger.info("loading %s, which drafts", draft.name)
    model = _load_weights(
        draft,
        model_spec(draft, config),
        dtype,
        device.torch_device,
        lambda fraction: report(Progress("worker", group.rank, "loading draft model", fraction)),
        weight_format,
        group,
    )
    if notice := describe_dense_weights(weight_format):
        report(Notice("worker", group.rank, f"{draft.name}: {notice}"))
    kv_dtype = draft_kv_dtype(model.spec, config, dtype)
    layout, geometry = draft_cache(model.spec, kv_dtype)
    return LoadedDraft(
        method=config.speculation.parsed().model_method,
        model=model,
        weight_format=weight_format,
        layout=layout,
        geometry=geometry,
        max_model_len=config.model.max_model_len or draft.max_position,
        weights_sample=draft.weights_sample,
        attention_kernels=_attention_kernels(config, draft, model.spec, device, dtype, kv_dtype),
    )


def _load_head(
    config: ServeConfig,
    draft: PreparedModel,
    target: Decoder,
    dtype: torch.dtype,
    device: Device,
) -> LoadedDraft:
    """Load a head for a target that is loaded; config: of the target."""
    settings = config.speculation.parsed()
    spec = read_head(settings.model_method, draft, target.spec)
    weight_format = weight_format_for(config, draft, device)
    logger.info("loading %s, a head that drafts", draft.name)
    head = load_head(draft, spec, target, dtype, device.torch_device, weight_format)
    layout, geometry = spec.cache(dtype)
    return LoadedDraft(
        method=settings.model_method,
        model=head,
        weight_format=weight_format,
        layout=layout,
        geometry=geometry,
        max_model_len=settings.max_model_len or spec.longest,
        weights_sample=draft.weights_sample,
        attention_kernels=_attention_kernels(config, draft, spec, device, dtype, dtype),
    )


def _attention_kernels(
    config: ServeConfig,
    prepared: PreparedModel,
    spec: ModelSpec,
    device: Device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
) -> Kernels | None:
    """Return the fastest kernels for a model's attention on this CPU; None for the default ones."""
    if is_cuda(device) or config.device.attention_backend == "reference":
        return None
    return choose_attention(spec.attention_shape, dtype, kv_dtype, prepared.folder)[0]


def is_cuda(device: Device) -> bool:
    return device.torch_device.type == "cuda"


def kv_fingerprint(
    *,
    weights_hash: str,
    model_config: dict[str, Any],
    geometry: KVCacheGeometry,
    block_size: int,
    compute_dtype: str,
    weight_format: str,
    rank_of: tuple[int, int, bool],
    kernels: Sequence[str],
    implementation: str,
    ropes: Sequence[str],
) -> bytes:
    """Return 32 bytes over everything that changes the values in the KV cache.

    Equal in two processes only if their KV blocks are interchangeable. It is the root of the block
    hashes, so KV of different arithmetic never mixes, also if caches outlive a process. No
    fact has a default: a forgotten one would make different caches equal.

    weights_hash: of all weights where KV outlives the process, else of a sample of them.
    weight_format: the name of a WeightFormat; other products give other KV.
    rank_of: this worker's rank, the number of ranks, and whether they have whole experts; other
        heads and experts give other sums.
    kernels: variants of the kernels on a CPU, as far as bits depend on them.
    implementation: whose code computes the model, with its version; "" for tokend's own.
    ropes: the rotary embeddings; that of LongRoPE depends on the longest request.
    """
    facts = [
        LAYOUT_VERSION,
        weights_hash,
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
        kernels,
        implementation,
        ropes,
    ]
    canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).digest()
