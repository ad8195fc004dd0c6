"""The model of a worker, which stays loaded while engines come and go.

Start at load, which chooses dtype and weight format and makes a LoadedModel of a prepared model.
kv_fingerprint says whose KV blocks are interchangeable.
"""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch

from proto.codec import changed
from proto.errors import ModelError
from proto.messages.lifecycle import (
    KVCacheGeometry,
    Notice,
    Progress,
    WeightFormatMemory,
    describe_weights,
)
from proto.messages.prepared_model import PreparedModel, file_stamp
from proto.settings.config import LoRAConfig, ServeConfig, memory_size
from proto.settings.kv_media_checks import kv_outlives_process
from proto.settings.pooler_config import pooler_of
from proto.settings.speculative_config import HEAD_METHODS
from proto.settings.turn_ends import with_end_tokens
from worker.attention.kv_cache import KVLayout, resolve_kv_dtype
from worker.attention.state_cache import STATE_DTYPE
from worker.device import Device
from worker.layers.adapters import AdapterTargets
from worker.loader.adapters.build import AdapterLimits, AdapterLoader, adapted_weights
from worker.loader.digest import hashing
from worker.loader.files import read_index
from worker.loader.formats import (
    DenseFormat,
    WeightFormat,
    activation_dtype,
    describe_dense_weights,
)
from worker.loader.source import block_columns
from worker.loader.transformers_weights import load_transformers
from worker.loader.vision import adapted_vision_weights, load_vision
from worker.loader.weights import load_model
from worker.models.decoder import Decoder
from worker.models.registry import model_spec, read_config
from worker.models.sharding import shard_model
from worker.models.spec import ModelSpec
from worker.models.transformers_model import TransformersSpec
from worker.models.vision.encoder import VisionEncoder
from worker.models.vision.spec import VisionSpec
from worker.parallel.group import RankGroup
from worker.plan.draft_settings import (
    draft_cache,
    draft_config,
    draft_kv_dtype,
    naming_draft,
    require_draft_model,
)
from worker.plan.memory_plan import (
    MemoryPlan,
    can_share_weights,
    layer_cache,
    max_logged_tokens,
    plan_memory,
)
from worker.plan.memory_refusal import refusal
from worker.speculation.eagle_head import EagleHead, load_head, read_head
from worker.step.adapter_store import AdapterStore
from worker.step.pooling import PoolingHead

logger = logging.getLogger("tokend.worker")
LAYOUT_VERSION: Final = 5
"""Counts changes of the cache layout or of the arithmetic of a layer."""


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A model that proposes drafts for another, on the same device and the same ranks.

    method: of proto.settings.speculative_config.MODEL_METHODS. model: for methods with a head this
    head, whole on each rank. max_model_len: tokens that a sequence may have with its draft.
    weights_sample: that of its manifest. The other fields as in LoadedModel.
    """

    method: str
    model: Decoder | EagleHead
    weight_format: WeightFormat
    layout: KVLayout
    geometry: KVCacheGeometry
    max_model_len: int
    weights_sample: str
    attention_kernels: str = ""

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
    pooling_head: None for a model that generates. attention_kernels: "" for the default ones.
    weights_hash: all weights, or the manifest's sample of them if no KV outlives the process.
    draft: the model that proposes drafts; None without one. adapters: those that requests may use;
    None without --enable-lora. vision: what encodes images, whole on each rank; None for a model
    that reads none. shares_weights: whether packed weights are in memory that other workers read.
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
    attention_kernels: str = ""
    draft: LoadedDraft | None = None
    adapters: AdapterStore | None = None
    vision: VisionEncoder | None = None
    shares_weights: bool = False

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a token has the same bits in a step of any number of rows."""
        own = not isinstance(self.model.spec, TransformersSpec)
        return own and self.weight_format.is_batch_invariant(self.dtype)

    @property
    def weights(self) -> tuple[WeightFormatMemory, ...]:
        """Memory by format, that of a draft model included."""
        formats = [self.weight_format]
        if self.draft is not None:
            formats.append(self.draft.weight_format)
        memory = sum((each.memory for each in formats), Counter[str]())
        shared = frozenset[str]()
        if self.shares_weights:
            shared = shared.union(*(each.shared_forms for each in formats))
        return tuple(
            WeightFormatMemory(form, num_bytes, form in shared)
            for form, num_bytes in memory.items()
        )

    def planned_again(
        self, config: ServeConfig, draft: PreparedModel | None, weights_fd: int | None
    ) -> "LoadedModel":
        """Return the model with a plan of the memory that is free now; arguments as in `load`."""
        loaded_bytes = 0 if weights_fd is None else self.device.shared_bytes(weights_fd)
        plan = plan_memory(
            config,
            self.prepared,
            self.device,
            self.group.rank,
            self.weight_format,
            draft,
            loaded_bytes,
        )
        return replace(self, plan=plan)

    def fingerprint(self, block_size: int) -> bytes:
        """Return the fingerprint of the model's KV blocks, 32 bytes; see kv_fingerprint."""
        products = sorted(self.weight_format.arithmetic)
        states = self.layout.states
        layout: list[int | str] = []
        if states is not None:
            layout = [*states.layer_sizes, states.max_logged, str(STATE_DTYPE)]
        return self._fingerprint(block_size, self.geometry, self.group.rank, products, layout)

    def model_fingerprint(self, block_size: int) -> bytes:
        """Return the fingerprint without what tells the ranks of one model apart."""
        geometry = changed(self.geometry, num_kv_heads=0)
        return self._fingerprint(block_size, geometry, rank=0, products=(), state_layout=())

    def _fingerprint(
        self,
        block_size: int,
        geometry: KVCacheGeometry,
        rank: int,
        products: Sequence[str],
        state_layout: Sequence[int | str],
    ) -> bytes:
        return kv_fingerprint(
            weights_hash=self.weights_hash,
            model_config=self.config,
            geometry=geometry,
            state_layout=state_layout,
            block_size=block_size,
            compute_dtype=str(self.dtype),
            # Another device sums in another order, and so do the kernels of each format.
            weight_format=self.device.weights_tag(self.weight_format),
            rank_of=(rank, self.group.size, self.model.spec.is_expert_parallel),
            kernels=(*self.device.kernel_variants(self.attention_kernels), *products),
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
    weights_fd: int | None = None,
) -> LoadedModel:
    """Load this rank's part of a model, and of the one that drafts for it.

    report: sends progress and notices to the supervisor.
    weight_format: None for the one that settings and device choose.
    must_fit: raise ConfigError, before a weight is read, if the model does not fit into memory.
    draft: the model of --speculative-config. Raises ConfigError, before a weight is read, if it
        cannot draft for `prepared`.
    weights_fd: file for the packed weights of all workers that have the same, of which the first
        fills it; None: they are in memory of this worker.
    """
    if draft is not None:
        require_draft_model(config, prepared, draft, device)
    pooler = pooler_of(config.model, prepared)
    dtype = device.resolve_dtype(activation_dtype(config.model))
    weight_format = weight_format or device.weight_format(config, prepared)
    loaded_bytes = 0 if weights_fd is None else device.shared_bytes(weights_fd)
    plan = plan_memory(config, prepared, device, group.rank, weight_format, draft, loaded_bytes)
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
    if device.division and group.rank == 0:
        logger.info("%s", device.division)
    if device.placement:
        logger.info("%s", device.placement)
    whole = model_spec(prepared, config, device.head_dims)
    heads = whole.attention_shape
    kv_dtype = resolve_kv_dtype(
        config.cache.kv_cache_dtype, dtype, heads.head_dim, heads.latent_dim
    )

    def show_growth(num_bytes: int) -> None:
        report(Progress("loading weights", min(1.0, num_bytes / max(1, plan.weights.total()))))

    def show_kernels(fraction: float) -> None:
        report(Progress("loading kernels", fraction))

    device.load_kernels(config.device, prepared, whole, dtype, kv_dtype, show_kernels)
    if draft is not None:
        with naming_draft(draft):
            spec, dtype_of_kv = _spec_and_kv_dtype(config, draft, whole, dtype, device)
            device.load_kernels(config.device, draft, spec, dtype, dtype_of_kv, show_kernels)

    targets = AdapterTargets(device.step_adapters()) if config.lora.enable_lora else None
    load_weights = partial(
        _load_weights,
        prepared,
        whole,
        dtype,
        device,
        lambda fraction: report(Progress("loading weights", fraction)),
        weight_format,
        group,
        targets,
    )
    sharing: AbstractContextManager[bool] = nullcontext(False)
    if weights_fd is not None and can_share_weights(whole, weight_format):
        facts = _weight_facts(config, prepared, draft, dtype, weight_format, group)
        sharing = device.sharing_weights(weights_fd, facts, show_growth)
    loaded_draft = None
    with sharing as shares_weights:
        if kv_outlives_process(config):
            with hashing(prepared) as digest:
                model = load_weights()
            weights_hash = digest.result()
        else:
            model, weights_hash = load_weights(), prepared.weights_sample
        if draft is not None:
            with naming_draft(draft):
                loaded_draft = _load_draft(config, draft, model, dtype, device, group, report)
    memory = (WeightFormatMemory(*item) for item in weight_format.memory.items())
    logger.info("weights: %s", describe_weights(memory))
    if notice := describe_dense_weights(weight_format):
        report(Notice(notice))
    vision = None
    if pooler is None and prepared.vision is not None:
        vision = load_vision(prepared, dtype, device, targets)
        if group.rank == 0:
            logger.info("vision part: %s", memory_size(plan.vision_bytes))
    layout, geometry = layer_cache(model.spec, kv_dtype, max_logged_tokens(config))
    attention_kernels = device.choose_attention(
        model.spec.attention_shape, dtype, kv_dtype, prepared.folder
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
        vision=vision,
        shares_weights=shares_weights,
        adapters=None
        if targets is None
        else adapter_store(
            config.lora,
            prepared,
            whole,
            targets,
            dtype,
            device,
            group,
            None if vision is None else vision.spec,
        ),
    )


def _weight_facts(
    config: ServeConfig,
    prepared: PreparedModel,
    draft: PreparedModel | None,
    dtype: torch.dtype,
    weight_format: WeightFormat,
    group: RankGroup,
) -> list[object]:
    """Return what the packed weights of a worker depend on beside its device, for JSON.

    Raises ModelError for a file that is gone.
    """
    models = [each for each in (prepared, draft) if each is not None]
    files = [path for each in models for path in read_index(each).files]
    try:
        stamps = [file_stamp(path) for path in files]
    except OSError as error:
        raise ModelError(f"{error.filename}: {error.strerror}") from None
    return [
        LAYOUT_VERSION,
        str(dtype),
        weight_format.name,
        config.model.cpu_weights,
        (group.rank, group.size, config.parallel.enable_expert_parallel),
        files,
        stamps,
    ]


def adapter_store(
    config: LoRAConfig,
    prepared: PreparedModel,
    spec: ModelSpec,
    targets: AdapterTargets,
    dtype: torch.dtype,
    device: Device,
    group: RankGroup,
    vision: VisionSpec | None = None,
) -> AdapterStore:
    """Return an empty store of adapters.

    spec: of the whole model. targets: a rank's products. vision: of the part that encodes images.
    """
    weights = spec.weights() | ({} if vision is None else adapted_vision_weights(vision))
    shards = shard_model(spec, group.size, block_columns(spec, read_index(prepared)))
    own = shards[group.rank].weights
    products = adapted_weights(targets, weights, own, config.lora_target_modules)
    targets.step.reserve(products, config.max_loras, config.max_lora_rank, dtype)
    limits = AdapterLimits(max_rank=config.max_lora_rank, modules=config.lora_target_modules)
    loader = AdapterLoader(prepared, spec, targets, own, group.rank, device, dtype, limits, vision)
    return AdapterStore(loader, targets.step, group.rank)


def _spec_and_kv_dtype(
    config: ServeConfig,
    draft: PreparedModel,
    target: ModelSpec,
    dtype: torch.dtype,
    device: Device,
) -> tuple[ModelSpec, torch.dtype]:
    """Return the spec of a model that drafts for `target`, and the dtype of its KV."""
    method = config.speculation.parsed().model_method
    if method in HEAD_METHODS:
        return read_head(method, draft, target, device), dtype
    config = draft_config(config, draft)
    spec = model_spec(draft, config, device.head_dims)
    return spec, draft_kv_dtype(spec, config, dtype)


def _load_weights(
    prepared: PreparedModel,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: Device,
    show_progress: Callable[[float], None],
    weight_format: WeightFormat,
    group: RankGroup,
    adapters: AdapterTargets | None = None,
) -> Decoder:
    """Return this rank's part of the decoder, with a family's or transformers' code."""
    if not isinstance(spec, TransformersSpec):
        return load_model(
            prepared, spec, dtype, device, show_progress, weight_format, group, adapters
        )
    assert isinstance(weight_format, DenseFormat)
    logger.warning(
        "%s runs on transformers' code, which is slower than a family of tokend's own",
        spec.architecture,
    )
    return load_transformers(prepared, spec, dtype, device, show_progress, weight_format, adapters)


def _load_draft(
    config: ServeConfig,
    draft: PreparedModel,
    target: Decoder,
    dtype: torch.dtype,
    device: Device,
    group: RankGroup,
    report: Callable[[Progress | Notice], None],
) -> LoadedDraft:
    """Load a rank's part of a draft model, or a whole head. config, target: of the served model."""
    settings = config.speculation.parsed()
    model: Decoder | EagleHead
    if settings.model_method in HEAD_METHODS:
        spec = read_head(settings.model_method, draft, target.spec, device)
        weight_format = device.weight_format(config, draft)
        logger.info("loading %s, a head that drafts", draft.name)
        model = load_head(draft, spec, target, dtype, device, weight_format)
        kv_dtype, (layout, geometry) = dtype, spec.cache(dtype)
        max_model_len = settings.max_model_len or spec.longest
    else:
        config = draft_config(config, draft)
        weight_format = device.weight_format(config, draft)
        logger.info("loading %s, which drafts", draft.name)
        model = _load_weights(
            draft,
            model_spec(draft, config, device.head_dims),
            dtype,
            device,
            lambda done: report(Progress("loading draft model", done)),
            weight_format,
            group,
        )
        if notice := describe_dense_weights(weight_format):
            report(Notice(f"{draft.name}: {notice}"))
        kv_dtype = draft_kv_dtype(model.spec, config, dtype)
        layout, geometry = draft_cache(model.spec, kv_dtype)
        max_model_len = config.model.max_model_len or draft.max_position
    return LoadedDraft(
        method=settings.model_method,
        model=model,
        weight_format=weight_format,
        layout=layout,
        geometry=geometry,
        max_model_len=max_model_len,
        weights_sample=draft.weights_sample,
        attention_kernels=device.choose_attention(
            model.spec.attention_shape, dtype, kv_dtype, draft.folder
        ),
    )


def kv_fingerprint(
    *,
    weights_hash: str,
    model_config: dict[str, Any],
    geometry: KVCacheGeometry,
    state_layout: Sequence[int | str],
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
    state_layout: numbers of the states of each recurrent layer, tokens of their log, and their
        dtype; empty without.
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
        state_layout,
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
