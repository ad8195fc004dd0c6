"""Builds what computes steps on a GPU: build_runner, build_drafter, and the largest step of each.

Each function reads from top to bottom: attention, CUDA graphs of decodes, runner, sampling.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch

from proto.errors import ConfigError
from worker.attention.backend import AttentionBackend, AttentionInputs
from worker.attention.state_cache import AttentionWithStates
from worker.batch.input_batch import InputBatch
from worker.cuda.accelerator import Accelerator
from worker.cuda.async_runner import AsyncModelRunner, CudaModelRunner
from worker.cuda.attention.flashinfer import FlashInferAttention, refuse_unsupported
from worker.cuda.attention.flashinfer_group import Library, Options
from worker.cuda.attention.flashinfer_latent import create_flashinfer
from worker.cuda.attention.kv_store import TritonStore
from worker.cuda.graphs import DecodeGraphs, graph_sizes
from worker.cuda.layers.adapter_slots import SlotAdapters
from worker.cuda.sampling.device_kernels import (
    RowEditArrays,
    TritonDraw,
    TritonEdits,
    largest_edits,
)
from worker.cuda.sampling.device_sampler import DeviceDraw, DeviceSampler, largest_params
from worker.cuda.sampling.draft_draw import DeviceDraftDraw
from worker.cuda.states import CudaStates, NoAttention
from worker.cuda.transfers import QueuedTransfers
from worker.models.decoder import Decoder
from worker.reference.attention import ReferenceAttention
from worker.sampling.sampler import Sampler
from worker.speculation.draft_model import DraftModel
from worker.speculation.drafter import Drafter
from worker.speculation.eagle import EagleDrafter
from worker.speculation.eagle_head import EagleHead
from worker.step.model_runner import SyncModelRunner
from worker.step.pooling import PoolingHead, PoolingRunner
from worker.step.runner_parts import DrafterParts, RunnerParts

logger = logging.getLogger("tokend.attention")

PREFILL_TOKENS: Final = 2048
"""Most tokens of a sequence in a pass of a draft model."""


@dataclass(frozen=True, slots=True)
class DeviceKernels:
    """Kernels on the accelerator beside torch's.

    load_flashinfer: returns FlashInfer, or raises ConfigError if it is not installed.
    """

    load_flashinfer: Callable[[], Library]
    store: TritonStore
    draw: TritonDraw
    edits: TritonEdits


class CudaDraftModel(DraftModel):
    """A DraftModel whose decodes are graphs; None if they cannot be captured."""

    def __init__(self, graphs: DecodeGraphs | None, *args: Any) -> None:
        super().__init__(*args)
        self._graphs = graphs

    def _run_model(
        self, groups: Sequence[AttentionInputs], token_ids: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        if self._graphs is not None and self._graphs.fits(groups):
            return self._graphs.replay(groups, token_ids, positions)
        return super()._run_model(groups, token_ids, positions)


@dataclass(frozen=True, slots=True)
class Gpu:
    """What runners and drafters on a GPU are made with.

    accelerator: of one model; graphs of a drafter have memory of their own, because they are
    replayed while the states of a step are still to be read. sampler: of steps that are sampled on
    the host.
    """

    accelerator: Accelerator
    kernels: DeviceKernels
    sampler: Sampler


def build_runner(gpu: Gpu, parts: RunnerParts) -> AsyncModelRunner | SyncModelRunner:
    """Return a runner, warmed up; captures CUDA graphs first.

    A model that pools waits for the results of each step.
    """
    if parts.pooling_head is not None:
        pooling = _pooling_runner(gpu, parts, parts.pooling_head)
        pooling.warm_up()
        return SyncModelRunner(pooling)
    sizes = _graph_sizes(parts, parts.batch)
    attention = _create_attention(gpu, parts, parts.batch, sizes)
    graphs = _capture(gpu, parts, parts.batch, attention, sizes)
    runner = _create_runner(gpu, parts, attention, graphs)
    runner.warm_up()
    sampler = DeviceSampler(
        accelerator=gpu.accelerator,
        batch=parts.batch,
        last=runner.last_tokens,
        vocab_size=parts.model.spec.vocab_size,
        draw=gpu.kernels.draw,
        edits=gpu.kernels.edits,
    )
    return AsyncModelRunner(runner, gpu.accelerator, sampler)


def build_drafter(gpu: Gpu, parts: DrafterParts) -> Drafter:
    """Return the drafter of a model or a head, warmed up; captures CUDA graphs first."""
    sizes = _graph_sizes(parts, parts.target.batch)
    attention = _create_attention(gpu, parts, parts.target.batch, sizes)
    graphs = _capture(gpu, parts, parts.target.batch, attention, sizes)
    draw = DeviceDraftDraw(gpu.accelerator, gpu.kernels.draw)
    transfers = QueuedTransfers(gpu.accelerator)
    own = (attention, parts.kv_cache, draw, parts.target, transfers)
    drafter: Drafter
    if isinstance(parts.model, Decoder):
        drafter = CudaDraftModel(graphs, parts.model, *own, PREFILL_TOKENS)
    else:
        drafter = EagleDrafter(parts.model, *own)
    drafter.warm_up()
    return drafter


def run_largest_step(gpu: Gpu, parts: RunnerParts, num_tokens: int, num_seqs: int) -> None:
    """Compute the step that takes the most memory, in block 0 of a cache.

    Each sequence has counts, penalties, a mask, and a top-p over the whole vocabulary; the rows of
    the batch are as long as sequences can be, and each token has an adapter if there are adapters.
    Of a model that pools all tokens are pooled.
    """
    if parts.pooling_head is not None:
        pooling = _pooling_runner(gpu, parts, parts.pooling_head)
        with _adapting_all(parts, num_tokens):
            pooling.run_largest(num_tokens, num_seqs)
        return
    vocab_size = parts.model.spec.vocab_size
    counts = gpu.accelerator.zeros(num_seqs * vocab_size, torch.int32)
    runner = _create_runner(gpu, parts, _create_attention(gpu, parts, parts.batch, ()), None)
    with _adapting_all(parts, num_tokens):
        wide = _float32_copy(runner.run_dummy_step(num_tokens, num_seqs))
    rows, slots, masks, rules, words = QueuedTransfers(gpu.accelerator).to_device(
        largest_edits(num_seqs, vocab_size)
    )
    edits = RowEditArrays(rows, slots, masks, rules.view(-1, 3), words.view(num_seqs, -1))
    gpu.kernels.edits.edit_rows(wide, edits, counts.view(num_seqs, vocab_size))
    _device_draw(gpu).draw_tokens(wide, largest_params(num_seqs))


@torch.inference_mode()
def run_largest_pass(gpu: Gpu, parts: DrafterParts, num_tokens: int, num_seqs: int) -> None:
    """Compute the largest pass of a drafter, as `run_largest_step` does."""
    if isinstance(parts.model, EagleHead):
        head = parts.model
        size = head.spec.hidden_size
        hidden = gpu.accelerator.zeros(num_tokens * size, head.dtype).view(-1, size)
        # Two steps are in flight, and each has its own.
        states = [head.features(hidden) for _ in range(2)]
        tokens = gpu.accelerator.zeros(num_tokens, torch.int64)
        head.store(tokens, states[0], tokens, parts.kv_cache, tokens)
        logits = head.logits(states[0][:num_seqs])
    else:
        target = parts.target.batch
        batch = InputBatch(
            num_seqs,
            target.token_ids.shape[1] - 1,
            target.block_table.block_size,
            len(parts.kv_cache.layout.windows),
        )
        alone = RunnerParts(
            config=parts.config,
            model=parts.model,
            dtype=parts.dtype,
            kv_cache=parts.kv_cache,
            batch=batch,
        )
        runner = _create_runner(gpu, alone, _create_attention(gpu, alone, batch, ()), None)
        logits = runner.run_dummy_step(num_tokens, num_seqs)
    _device_draw(gpu).draw_tokens(
        _float32_copy(logits), largest_params(num_seqs), masks_dropped=True
    )


def _adapting_all(parts: RunnerParts, num_tokens: int) -> AbstractContextManager[None]:
    """Let each token of a step have an adapter, if the model has adapters."""
    adapters = parts.model.adapters
    if isinstance(adapters, SlotAdapters):
        return adapters.in_largest_step(num_tokens)
    return nullcontext()


def _device_draw(gpu: Gpu) -> DeviceDraw:
    return DeviceDraw(QueuedTransfers(gpu.accelerator), gpu.kernels.draw)


def _float32_copy(logits: torch.Tensor) -> torch.Tensor:
    return logits.to(torch.float32, copy=True).contiguous()


def _create_runner(
    gpu: Gpu, parts: RunnerParts, attention: AttentionBackend, graphs: DecodeGraphs | None
) -> CudaModelRunner:
    return CudaModelRunner(
        gpu.accelerator.zeros(len(parts.batch.num_tokens), torch.int64),
        graphs,
        model=parts.model,
        attention=attention,
        sampler=gpu.sampler,
        batch=parts.batch,
        kv_cache=parts.kv_cache,
        transfers=QueuedTransfers(gpu.accelerator),
        experts=parts.experts,
        drafter=parts.drafter,
        fault_injector=parts.fault_injector,
        adapters=parts.adapters,
    )


def _pooling_runner(gpu: Gpu, parts: RunnerParts, head: PoolingHead) -> PoolingRunner:
    return PoolingRunner(
        head,
        model=parts.model,
        attention=_create_attention(gpu, parts, parts.batch, ()),
        sampler=gpu.sampler,
        batch=parts.batch,
        kv_cache=parts.kv_cache,
        transfers=QueuedTransfers(gpu.accelerator),
        adapters=parts.adapters,
    )


def _graph_sizes(parts: RunnerParts | DrafterParts, batch: InputBatch) -> tuple[int, ...]:
    """Return the graphs to capture.

    None for cascade attention, planned by the host, nor for transformers' code, which may ask
    the device for numbers, nor where sequences must not be split (`Options.batch_invariant`).
    """
    config = parts.config
    eager = config.enforce_eager or config.batch_invariant or not parts.model.can_be_captured
    if eager or config.cascade_attention_from:
        return ()
    return graph_sizes(len(batch.num_tokens))


def _capture(
    gpu: Gpu,
    parts: RunnerParts | DrafterParts,
    batch: InputBatch,
    attention: AttentionBackend,
    sizes: tuple[int, ...],
) -> DecodeGraphs | None:
    """Capture graphs of decodes of these sizes, if attention can be captured."""
    backend = attention.attention if isinstance(attention, AttentionWithStates) else attention
    if not sizes or not isinstance(backend, FlashInferAttention | NoAttention):
        return None
    assert isinstance(parts.model, Decoder)
    graphs = DecodeGraphs(parts.model, attention, gpu.accelerator, sizes)
    graphs.capture(batch.block_table, parts.show_captured, parts.kv_cache.layout.num_groups)
    return graphs


def _create_attention(
    gpu: Gpu, parts: RunnerParts | DrafterParts, batch: InputBatch, sizes: tuple[int, ...]
) -> AttentionBackend:
    """Return the attention of a model, with its states, for graphs of these sizes."""
    attention = _create_backend(gpu, parts, batch, sizes)
    if not isinstance(parts, RunnerParts) or parts.states is None:
        return attention
    if sizes:
        assert isinstance(parts.states, CudaStates)
        parts.states.reserve_graphs(max(sizes))
    return AttentionWithStates(attention, parts.states)


def _create_backend(
    gpu: Gpu, parts: RunnerParts | DrafterParts, batch: InputBatch, sizes: tuple[int, ...]
) -> AttentionBackend:
    """Return the backend of the layers with attention.

    In plain torch for heads that no kernel computes, unless a setting forbids it: ConfigError.
    """
    config, shape, cache = parts.config, parts.model.spec.attention_shape, parts.kv_cache
    if config.attention_backend == "cpu":
        raise ConfigError("--attention-backend cpu needs --device cpu")
    if not parts.model.spec.has_attention:
        return NoAttention()
    try:
        refuse_unsupported(shape, parts.dtype, cache.dtype)
        library = gpu.kernels.load_flashinfer()
    except ConfigError as reason:
        if config.attention_backend == "flashinfer" or config.batch_invariant:
            raise
        logger.warning("attention runs on the slow reference: %s", reason)
        return ReferenceAttention(cache, shape, QueuedTransfers(gpu.accelerator))
    pages = max(sizes, default=0) * batch.block_table.ids.shape[2]
    options = Options(sizes, pages, config.cascade_attention_from, config.batch_invariant)
    logger.info("attention runs on FlashInfer")
    return create_flashinfer(
        cache,
        shape,
        parts.dtype,
        gpu.accelerator,
        library,
        gpu.kernels.store,
        options,
    )
