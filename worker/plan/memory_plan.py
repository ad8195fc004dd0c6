"""The memory of a model before it is loaded: whether it fits, and how large the KV pool is.

    free   [ weights | work space | states | KV pool ................ | left to the machine ]
                                           <-------- Device.default_pool_bytes -------------->

States are those of recurrent layers, where a model has them. Weights, work space and KV are also
those of a draft model, weights and work space those of a part that encodes images.

Sizes come from the headers of the model's files, its configuration and the settings; no weight is
read. Start at plan_memory. worker/plan/memory_refusal.py says which flags would make a model fit.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Final, Self

import torch

from proto.errors import ConfigError
from proto.messages.lifecycle import (
    LEAST_STATE_SLOTS,
    KVCacheGeometry,
    WeightFormatMemory,
    describe_weights,
    slots_per_sequence,
)
from proto.messages.prepared_model import PreparedModel
from proto.settings.config import GIB, ServeConfig, flag_name, memory_size
from proto.settings.pooler_config import pooler_of
from proto.settings.speculative_config import DEFAULT_METHODS, HEAD_METHODS
from worker.attention.kv_cache import KVLayout, kv_cache_geometry, kv_layout, scratch_layout
from worker.attention.scratch_pages import SCRATCH_BLOCK, num_scratch_blocks
from worker.batch.input_batch import InputBatch
from worker.device import Device, ModelSetup
from worker.loader.adapters.build import is_adapted
from worker.loader.formats import WeightFormat
from worker.loader.vision import adapted_vision_weights, read_vision_spec, vision_bytes
from worker.loader.weights import create_builder
from worker.models.parts import WeightSpec
from worker.models.registry import model_spec
from worker.models.sharding import shard_model
from worker.models.spec import ModelSpec
from worker.models.transformers_model import TransformersSpec
from worker.parallel.group import RankGroup
from worker.plan.draft_settings import (
    draft_config,
    draft_kv_dtype,
    draft_token_bytes,
    naming_draft,
)
from worker.speculation.draft_model import KVContents
from worker.speculation.eagle_head import head_bytes, read_head
from worker.step.routed_experts import routing_bytes

ENCODER_STEP_TOKENS: Final = 2048
"""Tokens of a step of an encoder, unless its longest text has more."""
LEAST_TOKENS: Final = 1024
"""Tokens that a KV pool of the default size must hold, unless the longest request is shorter."""
STATE_SHARE: Final = 0.25
"""Most of the memory that is left for KV and states together that slots for states take."""
_HEAD_VECTORS: Final = 4
"""Vectors of a token in a head's step beside the residuals, recorded and joined: e, f, e ‖ f."""
_FLOAT32: Final = 4
_SHARED: Final = "weights are in memory once: this part of them counts for other engines"
_OWN_TABLES: Final = frozenset({"embed_tokens", "lm_head"})
"""Modules that adapters may have as a whole (PEFT's modules_to_save)."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes that a model takes of a device: those of all workers on a CPU, of one on a GPU.

    weights: by format; of the draft model, if there is one, draft_weights. work: by purpose.
    block_bytes: of a KV block, with the experts that are kept for it and the KV of a draft model; 0
        without a KV cache.
    num_groups: KV groups with blocks, each of which takes one for the same tokens.
    num_blocks: blocks of the KV pool, with the null block. least_blocks: fewest that it needs.
    vision_bytes: weights of the part that encodes images; 0 without one.
    num_state_slots, state_bytes: slots for the states of recurrent layers, with the null slot, and
        bytes of each; 0 without such layers. slots_per_sequence: of a sequence that runs.
    longest: tokens of the longest request by model and settings; 0 where windows need fewer blocks.
    elsewhere: bytes of the weights that count for other engines, which have them in the same
        memory: an N-th counts for each of N engines.
    free: what the model may take of the device now. total: memory of the device.
    """

    model: str
    device: str
    weights: Counter[str]
    draft_weights: Counter[str]
    work: Counter[str]
    block_size: int
    block_bytes: int
    num_groups: int
    num_blocks: int
    least_blocks: int
    longest: int
    free: int
    total: int
    vision_bytes: int = 0
    num_state_slots: int = 0
    state_bytes: int = 0
    slots_per_sequence: int = 0
    elsewhere: int = 0

    @property
    def pool_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def pool_tokens(self) -> int:
        """Tokens that the pool holds, as the daemon reports them."""
        return self._tokens_of(self.num_blocks)

    @property
    def kv_bytes_per_1k(self) -> int:
        """Bytes of 1,000 tokens in all groups; those that left a sliding window take none."""
        return 1000 * self.block_bytes * self.num_groups // self.block_size

    @property
    def states_bytes(self) -> int:
        return self.num_state_slots * self.state_bytes

    @property
    def left(self) -> int:
        """Bytes that weights, work space and states leave; may be negative."""
        weights = self.weights.total() + self.draft_weights.total() + self.vision_bytes
        return self.free + self.elsewhere - weights - self.work.total() - self.states_bytes

    @property
    def fits(self) -> bool:
        return self.least_blocks <= self.num_blocks and self.pool_bytes <= self.left

    @property
    def shortfall(self) -> int:
        """Bytes that are missing for the pool, or for the smallest useful one; negative if none."""
        return max(self.num_blocks, self.least_blocks) * self.block_bytes - self.left

    def table(self) -> list[str]:
        """Return the sum, a line for each summand."""
        num_blocks = max(self.num_blocks, self.least_blocks)
        tokens = self._tokens_of(num_blocks)
        pool = f"{tokens:,} tokens, {memory_size(self.kv_bytes_per_1k)} per 1,000"
        if tokens < self.longest:
            pool += f"; requests are limited to them, the model takes {self.longest:,}"
        work = ", ".join(
            f"{what} {memory_size(size)}"
            for what, size in self.work.most_common()
            if size * 20 > self.work.total()
        )
        needed = self.free - self.left + num_blocks * self.block_bytes
        rows = (
            ("weights", self.weights.total(), _describe(self.weights)),
            *(
                [("draft model", self.draft_weights.total(), _describe(self.draft_weights))]
                if self.draft_weights
                else []
            ),
            *([("vision part", self.vision_bytes, "")] if self.vision_bytes else []),
            *([("shared", -self.elsewhere, _SHARED)] if self.elsewhere else []),
            *([("KV cache", num_blocks * self.block_bytes, pool)] if self.block_bytes else []),
            *([("states", self.states_bytes, self._states())] if self.states_bytes else []),
            ("work space", self.work.total(), work),
            ("needed", needed, ""),
            ("free", self.free, f"now, of {memory_size(self.total)}: {self.device}"),
        )
        return [f"  {name:<11}{size / GIB:>9.2f} GiB  {note}".rstrip() for name, size, note in rows]

    def to_dict(self) -> dict[str, Any]:
        """Return all figures for JSON; those of KV only for a model that keeps some."""
        pool = {
            "kv_cache_bytes": self.pool_bytes,
            "kv_cache_tokens": self.pool_tokens,
            "kv_bytes_per_1k_tokens": self.kv_bytes_per_1k,
        }
        states = {
            "states_bytes": self.states_bytes,
            "state_slots": max(0, self.num_state_slots - 1),
        }
        return {
            "fits": self.fits,
            "weights_bytes": dict(self.weights),
            **({"draft_weights_bytes": dict(self.draft_weights)} if self.draft_weights else {}),
            **({"vision_bytes": self.vision_bytes} if self.vision_bytes else {}),
            **({"weights_of_other_engines_bytes": self.elsewhere} if self.elsewhere else {}),
            **(pool if self.block_bytes else {}),
            **(states if self.states_bytes else {}),
            "work_space_bytes": dict(self.work),
            "free_bytes": self.free,
            "total_bytes": self.total,
        }

    def _states(self) -> str:
        """Describe the slots for states."""
        usable = self.num_state_slots - 1
        return (
            f"{usable} slots of {memory_size(self.state_bytes)}, of which a sequence takes "
            f"{self.slots_per_sequence}"
        )

    def _tokens_of(self, num_blocks: int) -> int:
        return max(0, num_blocks - 1) // self.num_groups * self.block_size


def _describe(weights: Counter[str]) -> str:
    return describe_weights(WeightFormatMemory(*item) for item in weights.items())


def plan_memory(
    config: ServeConfig,
    prepared: PreparedModel,
    device: Device,
    rank: int = 0,
    weight_format: WeightFormat | None = None,
    draft: PreparedModel | None = None,
    loaded_bytes: int = 0,
) -> MemoryPlan:
    """Return what a model takes of this device's memory, and the size of its KV pool.

    rank: of the worker; on a CPU the plan is that of all workers, which share its memory.
    weight_format: None for the one that settings and device choose.
    draft: a model that `require_draft_model` accepts.
    loaded_bytes: of weights that are in memory already, for all engines that have them.
    Raises ConfigError for a setting that is impossible for this model.
    """
    cache = config.cache
    setup = ModelSetup.choose(config, prepared, device, rank, weight_format)
    setup.require_possible()
    shares_weights = can_share_weights(setup.spec, setup.weight_format)
    if config.reliability.standby_workers and not shares_weights:
        raise ConfigError(
            "--standby-workers needs weights that workers share in memory, and those of "
            f"{prepared.architecture} are not shared here: {setup.weight_format.name}"
        )
    layout, _ = layer_cache(setup.spec, setup.kv_dtype(), max_logged_tokens(config))

    model = _served_memory(setup)
    drafter = _ModelMemory.none(setup.num_ranks) if draft is None else _drafter_memory(setup, draft)
    vision_weights, encoding = _vision_memory(setup)
    work = model.work + drafter.work + encoding
    token_bytes = [sum(both) for both in zip(model.token_bytes, drafter.token_bytes, strict=True)]
    block_bytes = cache.block_size * sum(token_bytes[rank] for rank in setup.ranks)
    free = device.free_bytes(cache, loaded_bytes)

    row_bytes = _row_bytes(setup, layout, free, block_bytes, drafter.keeps_contents)
    work += device.row_memory(config, row_bytes)
    weights_bytes = model.weights.total() + drafter.weights.total() + vision_weights
    own_bytes = weights_bytes - model.shared - drafter.shared
    if standby := device.standby_bytes(config, own_bytes):
        work["standby processes"] = standby

    least_blocks = _least_blocks(setup, layout)
    # Steps and KV take no memory yet while weights are converted, and then it is free for them.
    free_at_conversion = least_blocks * block_bytes + work.total() - work["processes"]
    conversion = max(model.conversion, drafter.conversion) - free_at_conversion
    if device.converts_here and conversion > 0:
        work["conversion of weights"] = conversion

    elsewhere = 0
    if shares_weights:
        elsewhere = model.elsewhere + drafter.elsewhere
    left = max(0, free + elsewhere - weights_bytes - work.total())
    state_bytes = _state_bytes(setup)
    num_state_slots = _num_state_slots(config, left, state_bytes) if state_bytes else 0
    left = max(0, left - num_state_slots * state_bytes)
    num_blocks = (
        _num_blocks(setup, left, block_bytes, sum(token_bytes), least_blocks)
        if block_bytes
        else least_blocks
    )
    return MemoryPlan(
        model=prepared.name,
        device=device.memory_name,
        weights=model.weights,
        draft_weights=drafter.weights,
        work=work,
        block_size=cache.block_size,
        block_bytes=block_bytes,
        num_groups=layout.num_block_groups,
        num_blocks=num_blocks,
        least_blocks=least_blocks,
        longest=0 if any(layout.windows) else _longest(setup),
        free=free,
        total=device.total_bytes(),
        vision_bytes=vision_weights,
        num_state_slots=num_state_slots,
        state_bytes=state_bytes,
        slots_per_sequence=slots_per_sequence(cache.enable_prefix_caching),
        elsewhere=elsewhere,
    )


def can_share_weights(spec: ModelSpec, weight_format: WeightFormat) -> bool:
    """Return whether workers can have weights of this model in the same memory."""
    return bool(weight_format.shared_forms) and not isinstance(spec, TransformersSpec)


# ---- Weights and steps, of the served model and of what drafts for it ----


@dataclass(frozen=True, kw_only=True)
class _ModelMemory:
    """Bytes that one model takes on the ranks of a setup.

    weights: by format. work: of its steps, by purpose.
    token_bytes: KV of a token on each rank of the model, those outside the setup included.
    conversion: what converting the weights takes beside them.
    keeps_contents: whether rows record what its KV holds (KVContents).
    shared: bytes of the weights that workers can have in the same memory. elsewhere: as in
        MemoryPlan.
    """

    weights: Counter[str]
    work: Counter[str]
    token_bytes: list[int]
    conversion: int = 0
    keeps_contents: bool = False
    shared: int = 0
    elsewhere: int = 0

    @classmethod
    def none(cls, num_ranks: int) -> Self:
        """Return the memory of no model."""
        return cls(weights=Counter(), work=Counter(), token_bytes=[0] * num_ranks)


def _served_memory(setup: ModelSetup) -> _ModelMemory:
    """Return the memory of the served model, with the experts that are kept for its tokens."""
    kv_dtype = setup.kv_dtype()
    token_bytes = [
        layer_cache(shard.spec, kv_dtype)[1].bytes_per_token
        for shard in shard_model(setup.spec, setup.num_ranks)
    ]
    if setup.config.model.enable_return_routed_experts:
        token_bytes[0] += routing_bytes(setup.spec)
    return _sharded_memory(setup, token_bytes, has_adapters=setup.config.lora.enable_lora)


def _drafter_memory(setup: ModelSetup, draft: PreparedModel) -> _ModelMemory:
    """Return the memory of a draft model or a head; setup: of the served model."""
    with naming_draft(draft):
        if setup.config.speculation.parsed().model_method in HEAD_METHODS:
            return _head_memory(setup, draft)
        return _draft_model_memory(setup, draft)


def _draft_model_memory(served: ModelSetup, draft: PreparedModel) -> _ModelMemory:
    """Return the memory of a draft model, which is divided among the ranks like the served one."""
    config = draft_config(served.config, draft)
    setup = replace(
        served,
        config=config,
        prepared=draft,
        spec=model_spec(draft, config, served.device.head_dims),
        weight_format=served.device.weight_format(config, draft),
    )
    setup.device.refuse_draft(setup, draft_kv_dtype(setup.spec, config, setup.dtype))
    token_bytes = [
        draft_token_bytes(shard.spec, config, setup.dtype)
        for shard in shard_model(setup.spec, setup.num_ranks)
    ]
    return _sharded_memory(setup, token_bytes, keeps_contents=True)


def _head_memory(served: ModelSetup, draft: PreparedModel) -> _ModelMemory:
    """Return the memory of a head of EAGLE, which is whole on each rank.

    In each step it reads all tokens, whose inputs are joined: e and f, or the residuals for f.
    """
    config, device, dtype = served.config, served.device, served.dtype
    head = read_head(config.speculation.parsed().model_method, draft, served.spec, device)
    setup = replace(
        served,
        prepared=draft,
        spec=head,
        weight_format=device.weight_format(config, draft),
    )
    device.refuse_draft(setup, dtype)
    weights: Counter[str] = Counter()
    work: Counter[str] = Counter()
    all_shared = elsewhere = 0
    for rank in setup.ranks:
        sizes = head_bytes(draft, head, dtype, device, setup.weight_format)
        weights += sizes
        shared = sum(sizes[form] for form in setup.weight_format.shared_forms)
        all_shared += shared
        elsewhere += _elsewhere(setup, rank, shared)
        work += _step_memory(setup, head)
        # What is read of each step in flight is kept.
        vectors = 2 * len(head.residuals) + _HEAD_VECTORS + device.steps_in_flight
        num_floats = device.step_tokens(config.scheduler) * vectors * head.hidden_size
        work["hidden states of a draft head"] += num_floats * dtype.itemsize
    token_bytes = head.cache(dtype)[1].bytes_per_token
    return _ModelMemory(
        weights=weights,
        work=work,
        token_bytes=[token_bytes] * setup.num_ranks,
        shared=all_shared,
        elsewhere=elsewhere,
    )


def _elsewhere(setup: ModelSetup, rank: int, shared: int) -> int:
    """Return the bytes that other engines count of weights that a worker of a rank can share."""
    return int(shared * (1 - setup.device.weight_share(rank)))


def _sharded_memory(
    setup: ModelSetup,
    token_bytes: list[int],
    *,
    keeps_contents: bool = False,
    has_adapters: bool = False,
) -> _ModelMemory:
    """Return the memory of a model that is divided among the ranks, with this KV of a token.

    has_adapters: whether requests may use adapters on it.
    """
    weights: Counter[str] = Counter()
    work: Counter[str] = Counter()
    conversion = shared = elsewhere = 0
    for rank in setup.ranks:
        if isinstance(setup.spec, TransformersSpec):
            weights[setup.weight_format.name] += setup.spec.num_weights * setup.dtype.itemsize
            work += _step_memory(setup, setup.spec)
            if has_adapters:
                work += _adapters_memory(
                    setup, ([(weight, weight.shape)] for weight in setup.spec.weights().values())
                )
            continue
        builder = create_builder(
            setup.prepared,
            setup.spec,
            setup.dtype,
            setup.device,
            setup.weight_format,
            RankGroup(rank, setup.num_ranks),
        )
        sizes = builder.weight_sizes()
        weights += sizes.by_format
        conversion += sizes.conversion
        shared += sizes.shared
        elsewhere += _elsewhere(setup, rank, sizes.shared)
        work += _step_memory(setup, builder.spec)
        if has_adapters:
            named = setup.spec.weights()
            layers_only = setup.device.step_adapters().changes_layers_only
            work += _adapters_memory(
                setup,
                (
                    [(named[name], builder.source.joined_shape(name)) for name in product.weights]
                    for layer in range(builder.spec.num_layers)
                    for product in builder.products(layer)
                    if not (product.is_expert or (layers_only and product.is_in_part))
                ),
            )
    return _ModelMemory(
        weights=weights,
        work=work,
        token_bytes=token_bytes,
        conversion=conversion,
        keeps_contents=keeps_contents,
        shared=shared,
        elsewhere=elsewhere,
    )


def _adapters_memory(
    setup: ModelSetup, products: Iterable[Sequence[tuple[WeightSpec, tuple[int, ...]]]]
) -> Counter[str]:
    """Return the memory of a worker's adapters, all with the largest rank.

    They have an embedding and a head of their own if --lora-target-modules names these.

    products: without a mixture's experts, the weights of each with the [out, in] that the worker
    has. Those of the part that encodes images are added.
    """
    lora, step, size = setup.config.lora, setup.device.step_adapters(), 0
    modules = lora.lora_target_modules
    images: Iterable[WeightSpec] = ()
    if _encodes_images(setup) and not step.changes_layers_only:
        images = adapted_vision_weights(read_vision_spec(setup.prepared)).values()
    for product in chain(products, ([(each, each.shape)] for each in images)):
        changed = [(shape[0], shape[1]) for weight, shape in product if is_adapted(weight, modules)]
        if changed:
            num_outputs = sum(shape[0] for _, shape in product)
            size += step.update_bytes(lora.max_lora_rank, changed, num_outputs, setup.dtype)
    num_tables = len(_OWN_TABLES.intersection(modules))
    size += num_tables * setup.spec.vocab_size * setup.spec.hidden_size * setup.dtype.itemsize
    return setup.device.adapter_memory(lora, size)


def _step_memory(setup: ModelSetup, shard: ModelSpec) -> Counter[str]:
    """Return the memory of a worker's steps, at most on a CPU, at least on a GPU.

    shard: the part of the model that the worker computes.
    """
    config, dtype, shape = setup.config, setup.dtype, shard.attention_shape
    num_tokens = step_tokens(config, setup.prepared, setup.device, shard)
    # Results of all products of one layer, and as much again while they are rounded.
    num_outputs = shard.outputs_per_layer + 3 * shard.hidden_size
    layer_results = num_tokens * dtype.itemsize * 2 * num_outputs
    num_sampled = config.scheduler.max_num_seqs + setup.device.drafted_positions
    num_sampled = min(num_tokens, num_sampled)
    logits = num_sampled * shard.vocab_size * 2 * _FLOAT32 if shard.has_head else 0
    tables = len(set(shard.ropes)) * shard.max_position * shape.rotary_dim * _FLOAT32
    if shape.bidirectional:
        num_blocks = num_scratch_blocks(num_tokens, config.scheduler.max_num_seqs)
        heads = shape.num_kv_heads * 2 * shape.head_dim
        layer_results += num_blocks * SCRATCH_BLOCK * heads * dtype.itemsize
    return Counter(
        {f"steps of {num_tokens:,} tokens": layer_results + logits, "rotary tables": tables}
    )


def step_tokens(
    config: ServeConfig, prepared: PreparedModel, device: Device, spec: ModelSpec
) -> int:
    """Return the token budget of a step: the setting, or what suits the device and the model.

    Bidirectional attention needs all tokens of a text in one step: raises ConfigError for a smaller
    setting. Where it is that of an image only, a step has room for one beside other requests.
    """
    if not spec.is_bidirectional:
        vision, budget = prepared.vision, device.step_tokens(config.scheduler)
        if vision is None or not vision.is_bidirectional or config.scheduler.max_num_batched_tokens:
            return budget
        return max(budget, 2 * vision.max_embeds)
    longest = min(config.model.max_model_len or prepared.max_position, prepared.max_position)
    for field in ("max_num_batched_tokens", "max_num_scheduled_tokens"):
        budget = getattr(config.scheduler, field)
        if budget is not None and budget < longest:
            raise ConfigError(
                f"{flag_name(field)} {budget}: {prepared.architecture} computes a text in one "
                f"step, so at least {longest} are needed, or a lower --max-model-len"
            )
    return config.scheduler.max_num_batched_tokens or max(ENCODER_STEP_TOKENS, longest)


def _encodes_images(setup: ModelSetup) -> bool:
    config, prepared = setup.config, setup.prepared
    return prepared.vision is not None and pooler_of(config.model, prepared) is None


def _vision_memory(setup: ModelSetup) -> tuple[int, Counter[str]]:
    """Return the bytes of the weights that encode images, and of that work, on a setup's ranks.

    Every rank encodes all images, with all weights.
    """
    vision, num_ranks = setup.prepared.vision, len(setup.ranks)
    if vision is None or not _encodes_images(setup):
        return 0, Counter()
    of_image = vision_bytes(setup.prepared, setup.dtype, setup.device)
    cached = setup.config.scheduler.encoder_cache_rows(vision.max_embeds)
    work = {
        "encoding an image": of_image.pixels + of_image.activations + of_image.output,
        "encoder outputs": cached * of_image.row_numbers * _FLOAT32,
    }
    return (
        num_ranks * of_image.weights,
        Counter({what: num_ranks * size for what, size in work.items()}),
    )


# ---- Rows and processes ----


def _row_bytes(
    setup: ModelSetup, layout: KVLayout, free: int, block_bytes: int, keeps_contents: bool
) -> int:
    """Return the bytes of the rows of a worker's batch on the host.

    keeps_contents: whether they record what the KV of a draft model holds.
    """
    config, block_size = setup.config, setup.config.cache.block_size
    num_rows, row_tokens = config.scheduler.max_num_seqs, _longest(setup)
    if block_bytes:
        # A row cannot become longer than what a pool in this memory holds.
        row_tokens = min(row_tokens, (free // block_bytes + 1) * block_size)
    num_bytes = InputBatch.bytes_needed(num_rows, row_tokens, block_size, layout.num_groups)
    if keeps_contents:
        num_bytes += KVContents.bytes_needed(num_rows, row_tokens, block_size)
    return num_bytes


# ---- States and blocks ----


def layer_cache(
    spec: ModelSpec, kv_dtype: torch.dtype, max_logged: int = 0
) -> tuple[KVLayout, KVCacheGeometry]:
    """Return how the layers of a worker share its KV cache, and the shape of that.

    max_logged: from `max_logged_tokens`.
    """
    heads = spec.attention_shape
    layout = scratch_layout(spec.windows) if heads.bidirectional else kv_layout(spec.windows)
    layout = replace(layout, states=spec.state_shape(max_logged))
    num_parts = 1 if heads.latent_dim else 2
    return layout, kv_cache_geometry(
        layout, heads.num_kv_heads, heads.head_dim, kv_dtype, num_parts
    )


def max_logged_tokens(config: ServeConfig) -> int:
    """Return the tokens of which recurrent states have a log: the longest draft; 0 without any."""
    settings = config.speculation.parsed(DEFAULT_METHODS)
    return settings.max_tokens if settings.methods else 0


def _state_bytes(setup: ModelSetup) -> int:
    """Return the bytes of a slot for the states of a sequence, on the ranks of a setup."""
    max_logged = max_logged_tokens(setup.config)
    shards = shard_model(setup.spec, setup.num_ranks)
    shapes = [shard.spec.state_shape(max_logged) for shard in shards]
    return sum(shape.slot_bytes for rank in setup.ranks if (shape := shapes[rank]) is not None)


def _num_state_slots(config: ServeConfig, left: int, state_bytes: int) -> int:
    """Return the slots for states, with the null slot.

    By default twice as many as sequences need that run, so that the others hold states of prompts
    that may come again; but at most STATE_SHARE of the bytes that are left.
    """
    if config.cache.num_state_slots is not None:
        return 1 + config.cache.num_state_slots
    per_sequence = slots_per_sequence(config.cache.enable_prefix_caching)
    wanted = 2 * per_sequence * config.scheduler.max_num_seqs
    return 1 + max(LEAST_STATE_SLOTS, min(wanted, int(STATE_SHARE * left) // state_bytes))


def _num_blocks(
    setup: ModelSetup, left: int, block_bytes: int, token_bytes: int, least_blocks: int
) -> int:
    """Return the blocks of the KV pool: those set, or the device's share of the bytes left.

    block_bytes: on this device. token_bytes: on all ranks, whose pools share --kv-cache-memory.
    """
    cache = setup.config.cache
    if cache.num_gpu_blocks_override is not None:
        return cache.num_gpu_blocks_override
    if cache.kv_cache_memory is not None:
        return cache.kv_cache_memory // (cache.block_size * token_bytes)
    share = setup.device.default_pool_bytes(left)
    return max(share, min(left, least_blocks * block_bytes)) // block_bytes


def _longest(setup: ModelSetup) -> int:
    """Return the tokens of the longest request."""
    return setup.config.model.max_model_len or setup.spec.max_position


def _least_blocks(setup: ModelSetup, layout: KVLayout) -> int:
    """Return the fewest blocks of a useful pool, with the null block.

    A lower bound for windows: the engine knows what a request holds of them at once.
    """
    if layout.is_scratch:
        return 2
    cache, tokens = setup.config.cache, _longest(setup)
    if setup.config.model.max_model_len is None:
        tokens = min(tokens, LEAST_TOKENS) if cache.pool_setting is None else 1
    held = (min(tokens, window or tokens) for window in layout.windows)
    return 1 + sum(-(-count // cache.block_size) for count in held)
