"""A scheduler with real model runners behind it, without sockets and processes."""

import torch

from proto.messages.prepared_model import PreparedModel, VisionFacts
from tests.fakes.devices import CPU
from tests.fakes.engine_harness import EngineHarness
from tests.fakes.prepared_models import spec_of
from worker.attention.kv_cache import KVCache
from worker.attention.state_cache import AttentionWithStates, StateCache
from worker.batch.input_batch import InputBatch
from worker.host.device import HostDevice
from worker.loader.weights import load_model
from worker.models.decoder import Decoder
from worker.parallel.group import RankGroup
from worker.plan.memory_plan import layer_cache
from worker.step.encoder_cache import EncoderCache
from worker.step.model_runner import ModelRunner
from worker.step.routed_experts import RoutedExpertsCache, record_experts

BLOCK = 4
NUM_STATE_SLOTS = 9
"""Two for each of four sequences, and the null slot."""
_MAX_ROWS = 64
_MAX_STEP_TOKENS = 256
_ALONE = RankGroup()


def load(prepared: PreparedModel, group: RankGroup = _ALONE, device: HostDevice = CPU) -> Decoder:
    """Load a model in float32 as one rank of a group."""
    spec = spec_of(prepared)
    return load_model(prepared, spec, torch.float32, device, lambda fraction: None, None, group)


def runner_of(
    decoder: Decoder,
    num_blocks: int,
    num_state_slots: int = NUM_STATE_SLOTS,
    kv_dtype: torch.dtype = torch.float32,
    device: HostDevice = CPU,
    *,
    returns_experts: bool = False,
    max_logged: int = 0,
    vision: VisionFacts | None = None,
    encoder_cache: EncoderCache | None = None,
) -> ModelRunner:
    """Return a runner whose KV pool and states have NaN wherever nothing was written.

    Pages of int8 have the largest number there. max_logged: tokens of a draft that a state has a
    log of. vision, encoder_cache: of a model that reads images.
    """
    spec = decoder.spec
    layout, geometry = layer_cache(spec, kv_dtype, max_logged)
    cache = KVCache(geometry, layout, num_blocks, BLOCK)
    cache.block_rows()[1:] = 0xFF  # NaN in every dtype of floats, and in the scales of int8
    has_states = layout.states is not None
    rows = InputBatch(
        _MAX_ROWS,
        spec.max_position,
        BLOCK,
        layout.num_groups,
        has_states=has_states,
        vision=vision,
    )
    attention = device.attention("auto", cache, spec.attention_shape)
    if layout.states is not None:
        states = StateCache(layout.states, num_state_slots, BLOCK)
        states.buffer.fill_(float("nan"))
        attention = AttentionWithStates(attention, states)
    experts = None
    if returns_experts:
        record = record_experts(decoder, _MAX_STEP_TOKENS, device.torch_device)
        experts = RoutedExpertsCache(spec, cache, record)
    return ModelRunner(
        decoder,
        attention,
        device.sampler(),
        rows,
        cache,
        device.transfers(),
        experts=experts,
        encoder_cache=encoder_cache,
    )


def engine_for(
    decoder: Decoder, num_blocks: int, num_state_slots: int = NUM_STATE_SLOTS, **settings: object
) -> tuple[EngineHarness, int]:
    """Return an engine without a runner, and the number of blocks that its runner needs."""
    layout, geometry = layer_cache(decoder.spec, torch.float32)
    num_blocks *= layout.num_block_groups
    harness = EngineHarness(
        num_blocks=num_blocks,
        block_size=BLOCK,
        max_model_len=decoder.spec.max_position,
        windows=layout.windows,
        groups=geometry.groups,
        num_state_slots=num_state_slots if layout.states else 0,
        enable_prefix_caching=geometry.is_cached,
        **settings,  # type: ignore[arg-type]
    )
    return harness, num_blocks
