"""The memory of a model before it is loaded: whether it fits, and how large the KV pool is.

    free   [ weights | work space | states | KV pool ................ | left to the machine ]
                                           <-------- Device.default_pool_bytes -------------->

States are those of recurrent layers, where a model has them. Weights, work space and KV are also
those of a draft model.

Sizes come from the headers of the model's files, its configuration and the settings; no weight is
read. Start at plan_memory. `refusal` says what does not fit, and which flags would make it fit.
"""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from proto.codec import changed
from proto.config import GIB, ServeConfig, flag_name, memory_size
from proto.config_checks import validate
from proto.errors import ConfigError, TokendError
from proto.host_resources import available_memory
from proto.lifecycle import (
    LEAST_STATE_SLOTS,
    KVCacheGeometry,
    WeightFormatMemory,
    describe_weights,
    slots_per_sequence,
)
from proto.prepared_model import PreparedModel
from proto.speculative_config import DRAFT_POSITIONS, HEAD_METHODS
from worker.attention.flashinfer import refuse_unsupported
from worker.attention.flashinfer_latent import require_latent_kernels
from worker.attention.scratch_pages import SCRATCH_BLOCK, num_scratch_blocks
from worker.device.devices import Device
from worker.input_batch import InputBatch
from worker.kv_cache import (
    KVLayout,
    kv_cache_geometry,
    kv_layout,
    resolve_kv_dtype,
    scratch_layout,
)
from worker.loader.format_choice import activation_dtype, is_batch_invariant, weight_format_for
from worker.loader.formats import WeightFormat
from worker.loader.weights import create_builder
from worker.models.registry import model_spec
from worker.models.spec import ModelSpec
from worker.models.transformers_model import TransformersSpec
from worker.parallel.group import RankGroup
from worker.parallel.sharding import shard_model
from worker.routed_experts import require_routed_experts, routing_bytes
from worker.speculation.draft_model import KVContents
from worker.speculation.draft_settings import (
    draft_config,
    draft_kv_dtype,
    draft_token_bytes,
    naming_draft,
)
from worker.speculation.eagle_head import head_bytes, read_head

ENCODER_STEP_TOKENS: Final = 2048
"""Tokens of a step of an encoder, unless its longest text has more."""
LEAST_TOKENS: Final = 1024
"""Tokens that a KV pool of the default size must hold, unless the longest request is shorter."""
PROCESS_BYTES: Final = 300 << 20
"""Memory of supervisor, engine and the first front end, and of a worker beyond its imports."""
API_SERVER_BYTES: Final = 130 << 20
"""Memory of every further front end."""
STATE_SHARE: Final = 0.25
"""Most of the memory that is left for KV and states together that slots for states take."""
_MIB: Final = 1 << 20
_FLOAT32: Final = 4


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes that a model takes of a device: those of all workers on a CPU, of one on a GPU.

    weights: by format; of the draft model, if there is one, draft_weights. work: by purpose.
    block_bytes: of a KV block, with the experts that are kept for it and the KV of a draft model; 0
        without a KV cache.
    num_groups: KV groups with blocks, each of which takes one for the same tokens.
    num_blocks: blocks of the KV pool, with the null block. least_blocks: fewest that it needs.
    num_state_slots, state_bytes: slots for the states of recurrent layers, with the null slot, and
        bytes of each; 0 without such layers. slots_per_sequence: of a sequence that runs.
    free: what the model may take of the device now.
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
    free: int
    num_state_slots: int = 0
    state_bytes: int = 0
    slots_per_sequence: int = 0

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
        weights = self.weights.total() + self.draft_weights.total()
        return self.free - weights - self.work.total() - self.states_bytes

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
        pool = (
            f"{self._tokens_of(num_blocks):,} tokens, {memory_size(self.kv_bytes_per_1k)} per 1,000"
        )
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
            *([("KV cache", num_blocks * self.block_bytes, pool)] if self.block_bytes else []),
            *([("states", self.states_bytes, self._states())] if self.states_bytes else []),
            ("work space", self.work.total(), work),
            ("needed", needed, ""),
            ("free", self.free, self.device),
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
            **(pool if self.block_bytes else {}),
            **(states if self.states_bytes else {}),
            "work_space_bytes": dict(self.work),
            "free_bytes": self.free,
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
) -> MemoryPlan:
    """Return what a model takes of this device's memory, and the size of its KV pool.

    rank: of the worker; on a CPU the plan is that of all workers, which share its memory.
    weight_format: None for the one that settings and device choose.
    draft: a model that `require_draft_model` accepts.
    Raises ConfigError for a setting that is impossible for this model.
    """
    cache, size = config.cache, config.parallel.tensor_parallel_size
    dtype = device.resolve_dtype(activation_dtype(config.model))
    spec = model_spec(prepared, config)
    weight_format = weight_format or weight_format_for(config, prepared, device)
    heads = spec.attention_shape
    if config.device.batch_invariant:
        _require_batch_invariance(config, spec, device, weight_format, dtype)
    if spec.is_bidirectional:
        _refuse_kv_settings(config, prepared)
    if spec.state_layers:
        _refuse_with_states(config, prepared, device)
    elif cache.num_state_slots is not None:
        raise ConfigError(
            f"--num-state-slots: {prepared.architecture} has no layers with a recurrent state",
            "num_state_slots",
        )
    kv_dtype = resolve_kv_dtype(cache.kv_cache_dtype, dtype, heads.head_dim, heads.latent_dim)
    if heads.latent_dim and device.torch_device.type == "cuda":
        own = shard_model(spec, size)[rank].spec.attention_shape
        num_tokens = device.step_tokens(config.scheduler)
        require_latent_kernels(config, prepared.architecture, own, dtype, kv_dtype, num_tokens)
    ranks = range(size) if device.shares_memory else range(rank, rank + 1)
    weights, work, conversion = _weights_and_steps(
        config, prepared, device, spec, dtype, weight_format, ranks
    )
    token_bytes = [
        layer_cache(shard.spec, kv_dtype)[1].bytes_per_token for shard in shard_model(spec, size)
    ]
    if config.model.enable_return_routed_experts:
        require_routed_experts(spec)
        token_bytes[0] += routing_bytes(spec)
    draft_weights: Counter[str] = Counter()
    if draft is not None:
        with naming_draft(draft):
            of_draft = _head_memory if _is_head(config) else _draft_memory
            draft_weights, draft_work, draft_conversion, draft_bytes = of_draft(
                config, draft, device, spec, dtype, ranks
            )
        work += draft_work
        conversion = max(conversion, draft_conversion)
        token_bytes = [sum(both) for both in zip(token_bytes, draft_bytes, strict=True)]
    block_bytes = cache.block_size * sum(token_bytes[number] for number in ranks)
    layout, _ = layer_cache(spec, kv_dtype)
    state_bytes_of_ranks = [_state_bytes(shard.spec) for shard in shard_model(spec, size)]
    state_bytes = sum(state_bytes_of_ranks[number] for number in ranks)
    free = device.free_bytes(cache)
    longest = config.model.max_model_len or spec.max_position
    # A row cannot become longer than what a pool in this memory holds.
    most_tokens = (free // block_bytes + 1) * cache.block_size if block_bytes else longest
    num_rows = config.scheduler.max_num_seqs
    row_tokens = min(longest, most_tokens)
    rows = InputBatch.bytes_needed(num_rows, row_tokens, cache.block_size, layout.num_groups)
    if draft is not None and not _is_head(config):
        rows += KVContents.bytes_needed(num_rows, row_tokens, cache.block_size)
    if device.shares_memory:
        work[f"{num_rows:,} sequences"] = rows * size
        others = config.frontend.api_server_count - 1
        work["processes"] = PROCESS_BYTES + others * API_SERVER_BYTES
    else:
        _check_host_memory(num_rows, rows)
    least_blocks = _least_blocks(config, layout, longest)
    # Steps and KV take no memory yet while weights are converted, and then it is free for them.
    more = conversion - least_blocks * block_bytes - (work.total() - work["processes"])
    if device.shares_memory and more > 0:
        work["conversion of weights"] = more
    left = max(0, free - weights.total() - draft_weights.total() - work.total())
    num_state_slots = _num_state_slots(config, left, state_bytes) if state_bytes else 0
    if not block_bytes:
        num_blocks = least_blocks
    elif cache.num_gpu_blocks_override is not None:
        num_blocks = cache.num_gpu_blocks_override
    elif cache.kv_cache_memory is not None:
        num_blocks = cache.kv_cache_memory // (cache.block_size * sum(token_bytes))
    else:
        left = max(0, left - num_state_slots * state_bytes)
        pool = max(device.default_pool_bytes(left), min(left, least_blocks * block_bytes))
        num_blocks = pool // block_bytes
    return MemoryPlan(
        model=prepared.name,
        device=device.memory_name,
        weights=weights,
        draft_weights=draft_weights,
        work=work,
        block_size=cache.block_size,
        block_bytes=block_bytes,
        num_groups=layout.num_block_groups,
        num_blocks=num_blocks,
        least_blocks=least_blocks,
        free=free,
        num_state_slots=num_state_slots,
        state_bytes=state_bytes,
        slots_per_sequence=slots_per_sequence(cache.enable_prefix_caching),
    )


def _weights_and_steps(
    config: ServeConfig,
    prepared: PreparedModel,
    device: Device,
    spec: ModelSpec,
    dtype: torch.dtype,
    weight_format: WeightFormat,
    ranks: range,
) -> tuple[Counter[str], Counter[str], int]:
    """Return the memory of a model's weights by format, of its steps by purpose, on these ranks.

    The third is what converting the weights takes beside them.
    """
    size = config.parallel.tensor_parallel_size
    weights: Counter[str] = Counter()
    work: Counter[str] = Counter()
    conversion = 0
    for number in ranks:
        if isinstance(spec, TransformersSpec):
            weights[weight_format.name] += spec.num_weights * dtype.itemsize
            work += _step_memory(config, prepared, device, spec, dtype)
            continue
        builder = create_builder(
            prepared, spec, dtype, device.torch_device, weight_format, RankGroup(number, size)
        )
        sizes = builder.weight_sizes()
        weights += sizes.by_format
        conversion += sizes.conversion
        work += _step_memory(config, prepared, device, builder.spec, dtype)
    return weights, work, conversion


def _is_head(config: ServeConfig) -> bool:
    return config.speculation.parsed().model_method in HEAD_METHODS


def _draft_memory(
    config: ServeConfig,
    draft: PreparedModel,
    device: Device,
    spec: ModelSpec,
    dtype: torch.dtype,
    ranks: range,
) -> tuple[Counter[str], Counter[str], int, list[int]]:
    """Return what `_weights_and_steps` does, of a draft model, and its bytes of a token by rank.

    spec: of the served model.
    """
    settings = draft_config(config, draft)
    draft_spec = model_spec(draft, settings)
    weight_format = weight_format_for(settings, draft, device)
    if device.torch_device.type == "cuda":
        kv_dtype = draft_kv_dtype(draft_spec, settings, dtype)
        _require_gpu_kernels(settings, draft, device, draft_spec, dtype, kv_dtype, weight_format)
    token_bytes = [
        draft_token_bytes(shard.spec, settings, dtype)
        for shard in shard_model(draft_spec, config.parallel.tensor_parallel_size)
    ]
    memory = _weights_and_steps(settings, draft, device, draft_spec, dtype, weight_format, ranks)
    return *memory, token_bytes


_HEAD_VECTORS: Final = 4
"""Vectors of a token in a head's step beside the residuals, recorded and joined: e, f, e ‖ f."""


def _head_memory(
    config: ServeConfig,
    draft: PreparedModel,
    device: Device,
    spec: ModelSpec,
    dtype: torch.dtype,
    ranks: range,
) -> tuple[Counter[str], Counter[str], int, list[int]]:
    """Return the same of a head of EAGLE, which is whole on each rank.

    In each step it reads all tokens, whose inputs are joined: e and f, or the residuals for f.
    """
    head = read_head(config.speculation.parsed().model_method, draft, spec)
    weights: Counter[str] = Counter()
    work: Counter[str] = Counter()
    if device.torch_device.type == "cuda":
        weight_format = weight_format_for(config, draft, device)
        _require_gpu_kernels(config, draft, device, head, dtype, dtype, weight_format)
    for _ in ranks:
        weight_format = weight_format_for(config, draft, device)
        weights += head_bytes(draft, head, dtype, device.torch_device, weight_format)
        work += _step_memory(config, draft, device, head, dtype)
        # What is read of each step in flight is kept.
        num_kept = 1 if device.shares_memory else 2
        vectors = 2 * len(head.residuals) + _HEAD_VECTORS + num_kept
        num_floats = device.step_tokens(config.scheduler) * vectors * head.hidden_size
        work["hidden states of a draft head"] += num_floats * dtype.itemsize
    token_bytes = head.cache(dtype)[1].bytes_per_token
    return weights, work, 0, [token_bytes] * config.parallel.tensor_parallel_size


def _require_gpu_kernels(
    config: ServeConfig,
    draft: PreparedModel,
    device: Device,
    spec: ModelSpec,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    weight_format: WeightFormat,
) -> None:
    """Raise ConfigError for a model that drafts whose attention a GPU does not compute as set."""
    if config.device.batch_invariant:
        _require_batch_invariance(config, spec, device, weight_format, dtype)
    if config.device.attention_backend == "flashinfer" or config.device.batch_invariant:
        refuse_unsupported(spec.attention_shape, dtype, kv_dtype)
    if spec.attention_shape.latent_dim:
        num_tokens = device.step_tokens(config.scheduler)
        shape = spec.attention_shape
        require_latent_kernels(config, draft.architecture, shape, dtype, kv_dtype, num_tokens)


def layer_cache(spec: ModelSpec, kv_dtype: torch.dtype) -> tuple[KVLayout, KVCacheGeometry]:
    """Return how the layers of a worker share its KV cache, and the shape of that."""
    heads = spec.attention_shape
    layout = scratch_layout(spec.windows) if heads.bidirectional else kv_layout(spec.windows)
    layout = replace(layout, states=spec.state_shape)
    num_parts = 1 if heads.latent_dim else 2
    return layout, kv_cache_geometry(
        layout, heads.num_kv_heads, heads.head_dim, kv_dtype, num_parts
    )


def step_tokens(
    config: ServeConfig, prepared: PreparedModel, device: Device, spec: ModelSpec
) -> int:
    """Return the token budget of a step: the setting, or what suits the device and the model.

    Bidirectional attention needs all tokens of a text in one step: raises ConfigError for a smaller
    setting.
    """
    if not spec.is_bidirectional:
        return device.step_tokens(config.scheduler)
    budget = config.scheduler.max_num_batched_tokens
    longest = min(config.model.max_model_len or prepared.max_position, prepared.max_position)
    if budget is None:
        return max(ENCODER_STEP_TOKENS, longest)
    if budget < longest:
        raise ConfigError(
            f"--max-num-batched-tokens {budget}: {prepared.architecture} computes a text in one "
            f"step, so at least {longest} are needed, or a lower --max-model-len",
            "max_num_batched_tokens",
        )
    return budget


def _refuse_kv_settings(config: ServeConfig, prepared: PreparedModel) -> None:
    """Raise ConfigError for a setting of the KV cache of a model that has none."""
    cache = config.cache
    for field, is_set in (
        (cache.pool_setting or "", cache.pool_setting is not None),
        ("kv_cache_dtype", cache.kv_cache_dtype != "auto"),
        ("kv_transfer_config", cache.kv_transfer_config is not None),
        ("kv_events_endpoint", cache.kv_events_endpoint is not None),
        ("long_prefill_token_threshold", config.scheduler.long_prefill_token_threshold > 0),
    ):
        if is_set:
            raise ConfigError(
                f"{flag_name(field)}: {prepared.architecture} attends in both directions: it keeps "
                "no KV cache, and computes each text in one step",
                field,
            )


def _require_batch_invariance(
    config: ServeConfig,
    spec: ModelSpec,
    device: Device,
    weight_format: WeightFormat,
    dtype: torch.dtype,
) -> None:
    """Raise ConfigError for a model, a setting or a device whose bits depend on the batch."""
    heads, on_cuda = spec.attention_shape, device.torch_device.type == "cuda"
    way_out = ""
    if isinstance(spec, TransformersSpec):
        what = f"{spec.architecture} runs on transformers' code"
    elif on_cuda and spec.has_experts:
        what = f"the products of {spec.architecture}'s experts have as many rows as tokens choose"
    elif on_cuda and (heads.latent_dim or heads.bidirectional):
        what = f"{spec.architecture} has attention whose sums depend on the batch"
    elif on_cuda and dtype == torch.float32:
        what, way_out = "attention computes 16 bits on a GPU", "--dtype bfloat16"
    elif on_cuda and config.parallel.tensor_parallel_size > 1:
        what, way_out = "sums over GPUs depend on their size", "--tensor-parallel-size 1"
    elif on_cuda and config.device.cascade_attention_from:
        what, way_out = "cascade attention depends on the batch", "--cascade-attention-from 0"
    elif on_cuda and config.device.attention_backend == "reference":
        what, way_out = "the reference attention depends on the batch", "--attention-backend auto"
    elif config.cache.kv_cache_dtype == "int8":
        what, way_out = "a prompt reads int8 pages otherwise than a decode", "--kv-cache-dtype auto"
    elif not is_batch_invariant(weight_format, dtype, spec):
        what = f"{weight_format.name} products are chosen by the number of rows"
        way_out = "--cpu-weights bf16, packed or int8"
    else:
        return
    raise ConfigError(
        f"--batch-invariant: {what}{f'; {way_out} works' if way_out else ''}", "batch_invariant"
    )


def _refuse_with_states(config: ServeConfig, prepared: PreparedModel, device: Device) -> None:
    """Raise ConfigError for a device or a setting that a model with states cannot have so far."""
    what = f"{prepared.architecture} has layers with a recurrent state"
    if device.torch_device.type != "cpu":
        raise ConfigError(
            f"{what}, which runs on a CPU only so far: --device cpu is needed", "device"
        )
    if config.cache.kv_transfer_config is not None:
        raise ConfigError(
            f"--kv-transfer-config: {what}, which KV connectors do not transfer",
            "kv_transfer_config",
        )


def _state_bytes(spec: ModelSpec) -> int:
    """Return the bytes of the states that a rank keeps of a sequence."""
    return 0 if spec.state_shape is None else spec.state_shape.slot_bytes


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


def _step_memory(
    config: ServeConfig,
    prepared: PreparedModel,
    device: Device,
    spec: ModelSpec,
    dtype: torch.dtype,
) -> Counter[str]:
    """Return the memory of a worker's steps, at most on a CPU, at least on a GPU."""
    num_tokens, shape = step_tokens(config, prepared, device, spec), spec.attention_shape
    outputs = spec.outputs_per_layer
    # Results of all products of one layer, and as much again while they are rounded.
    layer_results = num_tokens * dtype.itemsize * 2 * (outputs + 3 * spec.hidden_size)
    num_drafted = DRAFT_POSITIONS if device.torch_device.type == "cpu" else 0
    num_sampled = min(num_tokens, config.scheduler.max_num_seqs + num_drafted)
    logits = num_sampled * spec.vocab_size * 2 * _FLOAT32 if spec.has_head else 0
    tables = len(set(spec.ropes)) * spec.max_position * shape.rotary_dim * _FLOAT32
    if shape.bidirectional:
        num_blocks = num_scratch_blocks(num_tokens, config.scheduler.max_num_seqs)
        heads = shape.num_kv_heads * 2 * shape.head_dim
        layer_results += num_blocks * SCRATCH_BLOCK * heads * dtype.itemsize
    return Counter(
        {f"steps of {num_tokens:,} tokens": layer_results + logits, "rotary tables": tables}
    )


def _least_blocks(config: ServeConfig, layout: KVLayout, longest: int) -> int:
    """Return the fewest blocks of a useful pool, with the null block.

    A lower bound for windows: the engine knows what a request holds of them at once.
    """
    if layout.is_scratch:
        return 2
    cache, tokens = config.cache, longest
    if config.model.max_model_len is None:
        tokens = min(longest, LEAST_TOKENS) if cache.pool_setting is None else 1
    held = (min(tokens, window or tokens) for window in layout.windows)
    return 1 + sum(-(-count // cache.block_size) for count in held)


def _check_host_memory(num_rows: int, num_bytes: int) -> None:
    """Raise ConfigError if the rows of a GPU's batch do not fit the host."""
    free = available_memory()
    if num_bytes > free:
        raise ConfigError(
            f"--max-num-seqs {num_rows}: {num_bytes} bytes ({memory_size(num_bytes)}) of rows is "
            f"more than the {free} bytes ({memory_size(free)}) of memory that are free",
            "max_num_seqs",
        )


# ---- The refusal ----


def refusal(
    plan: MemoryPlan,
    config: ServeConfig,
    prepared: PreparedModel,
    device: Device,
    rank: int = 0,
    draft: PreparedModel | None = None,
) -> ConfigError:
    """Return the error about a model that does not fit: the sum, and flags that make it fit."""
    if plan.shortfall > 0:
        what = f"{plan.model} does not fit into the {plan.device}"
    else:
        what = (
            f"the KV pool of {plan.num_blocks} blocks of {plan.block_size} tokens is too small: "
            f"{plan.least_blocks} are needed"
        )
    flags = fitting_flags(plan, config, prepared, device, rank, draft)
    if flags:
        way = f"it fits with {' or '.join(flags)}"
    else:
        way = f"no flag makes it fit: {memory_size(plan.shortfall)} more must be free"
    return ConfigError("\n".join((what, *plan.table(), way)), config.cache.pool_setting)


def fitting_flags(
    plan: MemoryPlan,
    config: ServeConfig,
    prepared: PreparedModel,
    device: Device,
    rank: int = 0,
    draft: PreparedModel | None = None,
) -> list[str]:
    """Return flags each of which alone makes the model fit; else those that do so together."""

    def attempt(settings: ServeConfig) -> MemoryPlan | None:
        try:
            validate(settings)
            return plan_memory(settings, prepared, device, rank, draft=draft)
        except TokendError:
            return None

    found = _pool_flags(plan, config, device)
    best, together, words = plan, config, []
    for section, field, values in _smaller_settings(device):
        for value in values:
            tried = attempt(_with_setting(config, section, field, value))
            if tried is not None and tried.fits:
                found.append(f"{flag_name(field)} {value}")
                break
        smaller = _with_setting(together, section, field, values[-1])
        tried = attempt(smaller)
        if tried is not None and tried.shortfall < best.shortfall:
            best, together = tried, smaller
            words.append(f"{flag_name(field)} {values[-1]}")
    if not found and best.fits:
        return [" ".join(words)]
    return found


def _pool_flags(plan: MemoryPlan, config: ServeConfig, device: Device) -> list[str]:
    """Return sizes of the pool, and lengths of requests, for which the rest leaves memory."""
    found: list[str] = []
    if not plan.block_bytes:
        return found
    least = plan.least_blocks * plan.block_bytes
    if least <= plan.left:
        pool = max(least, min(plan.pool_bytes, device.default_pool_bytes(plan.left)))
        if config.cache.kv_cache_memory is not None:
            found.append(f"--kv-cache-memory {-(-pool // _MIB)}M")
        if config.cache.num_gpu_blocks_override is not None:
            found.append(f"--num-gpu-blocks-override {pool // plan.block_bytes}")
    most_blocks = min(plan.num_blocks, plan.left // plan.block_bytes)
    tokens = (most_blocks - 1) // plan.num_groups * plan.block_size
    if most_blocks < plan.least_blocks and tokens > 0:
        found.append(f"--max-model-len {tokens}")
    return found


def _smaller_settings(device: Device) -> list[tuple[str, str, tuple[str | int | float, ...]]]:
    """Section, field and values, the mildest first, of settings that take less memory."""
    if not device.shares_memory:
        return [
            ("cache", "gpu_memory_utilization", (0.95, 0.98)),
            ("cache", "kv_cache_dtype", ("fp8",)),
            ("scheduler", "max_num_batched_tokens", (4096, 2048, 1024, 512)),
            ("scheduler", "max_num_seqs", (128, 64, 32, 16)),
        ]
    return [
        ("cache", "kv_cache_dtype", ("int8",)),
        ("model", "cpu_weights", ("packed", "int8")),
        ("cache", "num_state_slots", (64, 16, LEAST_STATE_SLOTS)),
        ("scheduler", "max_num_seqs", (256, 128, 64, 32, 16, 8, 4, 1)),
        ("scheduler", "max_num_batched_tokens", (128, 64, 32)),
    ]


def _with_setting(config: ServeConfig, section: str, field: str, value: object) -> ServeConfig:
    return changed(config, **{section: changed(getattr(config, section), **{field: value})})
