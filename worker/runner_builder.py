"""Build what computes the steps of an engine: KV pool, input batch, attention, runner, connector.

RunnerBuilder is created once a worker and decides how large the KV pool may be;
`build_model_runner` is called for each engine. CudaRunnerBuilder assembles the parts on a GPU.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from proto.config import DeviceConfig, ServeConfig
from proto.errors import ConfigError
from proto.faults import FaultInjector
from proto.kv_transfer_config import kv_transfer_config
from proto.lifecycle import InitializeCache, Notice, Progress
from worker.async_runner import AsyncModelRunner, Runner
from worker.attention.base import AttentionBackend
from worker.attention.flashinfer import FlashInferAttention, load_library, refuse_unsupported
from worker.attention.flashinfer_group import Library, Options
from worker.attention.flashinfer_latent import create_flashinfer
from worker.attention.kv_store import TritonStore
from worker.attention.reference import ReferenceAttention
from worker.attention.registry import create_backend
from worker.attention.scratch_pages import SCRATCH_BLOCK, num_scratch_blocks
from worker.cuda_graphs import DecodeGraphs, graph_sizes
from worker.device.accelerator import Accelerator
from worker.device.transfers import DevicePlacement, Placement
from worker.input_batch import InputBatch
from worker.kv_cache import KVCache
from worker.kv_connector.base import (
    NO_CONNECTOR,
    WorkerConnector,
    WorkerContext,
    create_worker_connector,
)
from worker.kv_connector.steps import with_hooks
from worker.loaded_model import LoadedModel
from worker.memory_nodes import memory_placement
from worker.memory_plan import step_tokens
from worker.model_runner import DeviceTokens, ModelRunner, SyncModelRunner
from worker.models.decoder import Decoder
from worker.pooling import PoolingHead, PoolingRunner
from worker.routed_experts import RoutedExpertsCache, record_experts, routing_bytes
from worker.sampling.device_kernels import RowEditArrays, TritonDraw, TritonEdits, largest_edits
from worker.sampling.device_sampler import DeviceDraw, DeviceSampler, KeyedDraw, largest_params
from worker.sampling.sampler import Sampler, create_sampler
from worker.speculation.draft_model import TOKEN_BYTES, DraftModel
from worker.speculation.draft_sampler import DeviceDraftDraw, DraftDraw, HostDraw
from worker.speculation.drafter import DraftedModel, Drafter
from worker.speculation.eagle import EagleDrafter
from worker.speculation.eagle_head import EagleHead
from worker.state_cache import AttentionWithStates, StateCache
from worker.thread_team import thread_team

logger = logging.getLogger("tokend.attention")


class RunnerBuilder:
    """Builds runners over one model, one for each engine.

    fault_injector: replaces hidden states by NaN if a test asks for it. report: sends a message to
    the supervisor. step_tokens: token budget of a step, for which memory is kept beside the pool.
    kv_cache_bytes: memory for the KV pool, the same for every engine of this worker.
    routing_bytes: of a token's routed experts; 0 if no request may return them.
    """

    def __init__(
        self,
        config: ServeConfig,
        loaded: LoadedModel,
        fault_injector: FaultInjector,
        report: Callable[[Progress | Notice], None],
    ) -> None:
        self._config = config
        self._loaded = loaded
        self._fault_injector = fault_injector
        self._report = report
        self._device = loaded.device
        # Other products may have other bits with other threads
        self._team = thread_team() if loaded.is_batch_invariant and not loaded.on_cuda else None
        self.step_tokens = step_tokens(config, loaded.prepared, self._device, loaded.model.spec)
        # Ranks route alike, and the engine reads the answers of the first.
        records = config.model.enable_return_routed_experts and loaded.group.rank == 0
        self._expert_record = (
            record_experts(loaded.model, self.step_tokens, self._device.torch_device)
            if records
            else None
        )
        if loaded.draft is not None and isinstance(loaded.draft.model, EagleHead):
            loaded.draft.model.record_residuals(self.step_tokens)
        peak = self._device.peak_bytes(self._run_largest_step)
        tokens = loaded.plan.num_blocks * config.cache.block_size
        kv_bytes = loaded.geometry.bytes_per_token
        self.routing_bytes = routing_bytes(loaded.model.spec) if records else 0
        token_bytes = kv_bytes + self.routing_bytes
        if (draft := loaded.draft) is not None:
            token_bytes += draft.geometry.bytes_per_token
            if not isinstance(draft.model, EagleHead):
                token_bytes += TOKEN_BYTES
        self.kv_cache_bytes = 0
        if token_bytes:
            pool_bytes = self._device.kv_cache_bytes(config.cache, tokens * token_bytes, peak)
            self.kv_cache_bytes = pool_bytes * kv_bytes // token_bytes

    def build_model_runner(self, message: InitializeCache) -> tuple[Runner, WorkerConnector]:
        """Return the runner and the KV connector for an engine.

        Raises ConfigError if memory is missing, or for an impossible connector.
        """
        cache, batch = (
            self._create_pool(message),
            self._create_batch(message.max_model_len, message.block_size),
        )
        connector = self._connect(message, cache)
        if not self._loaded.on_cuda:
            runner = self._build_on_host(message, cache, batch, connector)
            return SyncModelRunner(runner, self._team), connector
        builder = self._cuda_builder()
        if (head := self._loaded.pooling_head) is not None:
            return builder.build_pooling(head, cache, batch, connector), connector
        drafter = self._create_drafter(message, batch)
        async_runner = builder.build(
            cache, batch, self._show_captured, connector, self._experts(cache), drafter
        )
        return async_runner, connector

    def _show_captured(self, fraction: float) -> None:
        self._report(Progress("worker", self._loaded.group.rank, "capturing graphs", fraction))

    def build_on_host(self, message: InitializeCache) -> ModelRunner:
        """Return a runner on the CPU without a connector, for benchmarks."""
        cache, batch = (
            self._create_pool(message),
            self._create_batch(message.max_model_len, message.block_size),
        )
        return self._build_on_host(message, cache, batch, NO_CONNECTOR)

    def _build_on_host(
        self,
        message: InitializeCache,
        cache: KVCache,
        batch: InputBatch,
        connector: WorkerConnector,
    ) -> ModelRunner:
        backend = create_backend(
            self._config.device.attention_backend,
            cache,
            self._loaded.model.spec.attention_shape,
            self._loaded.attention_kernels,
        )
        attention = self._with_states(with_hooks(backend, connector), message)
        head = self._loaded.pooling_head
        runner = (
            ModelRunner(
                model=self._model(),
                attention=attention,
                sampler=create_sampler(),
                batch=batch,
                kv_cache=cache,
                experts=self._experts(cache),
                drafter=self._create_drafter(message, batch),
            )
            if head is None
            else PoolingRunner(
                head,
                model=self._model(),
                attention=attention,
                sampler=create_sampler(),
                batch=batch,
                kv_cache=cache,
            )
        )
        runner.warm_up()
        return runner

    def _create_drafter(self, message: InitializeCache, batch: InputBatch) -> Drafter | None:
        """Return the drafter for an engine, if there is a draft model."""
        draft = self._loaded.draft
        if draft is None:
            return None
        cache = self._placed(
            KVCache(
                draft.geometry,
                draft.layout,
                message.num_blocks,
                message.block_size,
                self._device.torch_device,
            )
        )
        group = self._loaded.layout.windows.index(None)
        target = DraftedModel(
            batch, group, self._loaded.model.spec.vocab_size, self.step_tokens, draft.max_model_len
        )
        if self._loaded.on_cuda:
            builder = self._cuda_builder(draft.model)
            return builder.build_drafter(cache, target, self._show_captured)
        attention = create_backend(
            self._config.device.attention_backend,
            cache,
            draft.model.spec.attention_shape,
            draft.attention_kernels,
        )
        draw = HostDraw(create_sampler())
        return create_drafter(draft.model, attention, cache, draw, target)

    def _with_states(
        self, attention: AttentionBackend, message: InitializeCache
    ) -> AttentionBackend:
        """Return the backend with the states of layers without attention, if there are any."""
        shape = self._loaded.layout.states
        if shape is None:
            return attention
        states = StateCache(shape, message.num_state_slots, message.block_size)
        if (placement := memory_placement()) is not None:
            placement.interleave(states.buffer)
        if self._config.cache.kv_cache_populate:
            states.populate()
        return AttentionWithStates(attention, states)

    def _experts(self, cache: KVCache) -> RoutedExpertsCache | None:
        record = self._expert_record
        if record is None:
            return None
        return RoutedExpertsCache(self._loaded.model.spec, cache, record)

    def _connect(self, message: InitializeCache, cache: KVCache) -> WorkerConnector:
        config, group = self._config, self._loaded.group
        context = WorkerContext(
            group.rank, group.size, message.fingerprint, message.block_size, config
        )
        transfer = kv_transfer_config(config.cache.kv_transfer_config)
        connector = create_worker_connector(transfer, context)
        connector.register_kv_caches(cache)
        return connector

    def _create_pool(self, message: InitializeCache) -> KVCache:
        cache = self._create_step_cache(message.num_blocks, message.block_size)
        return self._placed(cache)

    def _placed(self, cache: KVCache) -> KVCache:
        """Spread the memory of a cache over the nodes of a CPU; commit it if that is wanted."""
        if not self._loaded.on_cuda and (placement := memory_placement()) is not None:
            placement.interleave(cache.buffer)
        if self._config.cache.kv_cache_populate:
            cache.populate()
        return cache

    def _create_step_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """Return the KV cache that the engine asks for, or scratch pages for an encoder's steps."""
        if not self._loaded.layout.is_scratch:
            return self._create_cache(num_blocks, block_size)
        num_seqs = self._config.scheduler.max_num_seqs
        return self._create_cache(num_scratch_blocks(self.step_tokens, num_seqs), SCRATCH_BLOCK)

    def _create_cache(self, num_blocks: int, block_size: int) -> KVCache:
        loaded = self._loaded
        return KVCache(
            loaded.geometry, loaded.layout, num_blocks, block_size, self._device.torch_device
        )

    def _create_batch(self, max_model_len: int, block_size: int) -> InputBatch:
        return InputBatch(
            self._config.scheduler.max_num_seqs,
            max_model_len,
            block_size,
            self._loaded.layout.num_groups,
        )

    def _run_largest_step(self) -> None:
        """Run a step of as many tokens and sequences as the settings allow."""
        scheduler, longest = self._config.scheduler, self._loaded.model.spec.max_position
        num_seqs = min(scheduler.max_num_seqs, self.step_tokens)
        num_tokens = min(self.step_tokens, num_seqs * longest)
        block_size = self._config.cache.block_size
        batch = self._create_batch(longest, block_size)
        if (head := self._loaded.pooling_head) is not None:
            cache = self._create_step_cache(1, block_size)
            runner = self._cuda_builder().pooling_runner(head, cache, batch, NO_CONNECTOR)
            runner.run_largest(num_tokens, num_seqs)
            return
        cache = self._create_cache(1, block_size)
        self._cuda_builder().run_largest_step(cache, batch, num_tokens, num_seqs)
        if (draft := self._loaded.draft) is not None:
            longest = min(longest, draft.model.spec.max_position)  # the batch is the target's
            num_tokens = min(self.step_tokens, num_seqs * longest)
            cache = KVCache(draft.geometry, draft.layout, 1, block_size, self._device.torch_device)
            self._cuda_builder(draft.model).run_largest_pass(cache, batch, num_tokens, num_seqs)

    def _cuda_builder(self, model: Decoder | EagleHead | None = None) -> "CudaRunnerBuilder":
        """Return a builder for the model, or one for a model that drafts.

        Graphs of the two have memory apart: those of drafts are replayed while the states of a step
        are still to be read.
        """
        return CudaRunnerBuilder(
            config=self._config.device,
            model=model or self._model(),
            accelerator=Accelerator(self._device.torch_device),
            kernels=DeviceKernels(load_library, TritonStore(), TritonDraw(), TritonEdits()),
            sampler=create_sampler(),
            dtype=self._loaded.dtype,
        )

    def _model(self) -> Decoder:
        """Return the model, with injected faults if there are any."""
        model = self._loaded.model
        return model if self._fault_injector.idle else FaultyModel(model, self._fault_injector)


class FaultyModel(Decoder):
    """A model whose hidden states are NaN in steps with an injected fault; weights are shared.

    It is in the product, not under tests/, because tests inject the fault by an environment
    variable into a real worker process.
    """

    def __init__(self, model: Decoder, fault_injector: FaultInjector) -> None:
        vars(self).update(vars(model))
        self._model = model
        self._fault_injector = fault_injector

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.logits(hidden)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBackend,
        token_types: torch.Tensor | None = None,
    ) -> torch.Tensor:
        hidden = self._model.forward(token_ids, positions, attention, token_types)
        return hidden * float("nan") if self._fault_injector.injects_nan else hidden


def create_drafter(
    model: Decoder | EagleHead,
    attention: AttentionBackend,
    kv_cache: KVCache,
    draw: DraftDraw,
    target: DraftedModel,
    placement: Placement | None = None,
    graphs: DecodeGraphs | None = None,
) -> Drafter:
    """Return a drafter that is warmed up. graphs: of a draft model's decodes, or None."""
    drafter: Drafter
    if isinstance(model, EagleHead):
        drafter = EagleDrafter(model, attention, kv_cache, draw, target, placement)
    else:
        drafter = DraftModel(model, attention, kv_cache, draw, target, placement, graphs)
    drafter.warm_up()
    return drafter


@dataclass(frozen=True, slots=True)
class DeviceKernels:
    """Kernels on the accelerator beside torch's.

    load_flashinfer: returns FlashInfer, or raises ConfigError if it is not installed.
    """

    load_flashinfer: Callable[[], Library]
    store: TritonStore
    draw: KeyedDraw
    edits: TritonEdits


class CudaRunnerBuilder:
    """Builds runners over one model on a GPU: attention, CUDA graphs and sampling on the device.

    For a model that drafts it builds the drafter.
    """

    def __init__(
        self,
        config: DeviceConfig,
        model: Decoder | EagleHead,
        accelerator: Accelerator,
        kernels: DeviceKernels,
        sampler: Sampler,
        dtype: torch.dtype,
    ) -> None:
        self._config = config
        self._model = model
        self._accelerator = accelerator
        self._kernels = kernels
        self._sampler = sampler
        self._dtype = dtype
        self._shape = model.spec.attention_shape

    def build(
        self,
        kv_cache: KVCache,
        batch: InputBatch,
        on_progress: Callable[[float], None],
        connector: WorkerConnector = NO_CONNECTOR,
        experts: RoutedExpertsCache | None = None,
        drafter: Drafter | None = None,
    ) -> AsyncModelRunner:
        """Return a runner; captures CUDA graphs first.

        on_progress: called with the captured fraction. connector: may need calls around each
        layer's attention, which exclude graphs. experts: those of each token, if they are kept.
        drafter: from `build_drafter` of another builder.
        """
        attention, graphs = self._create_layers(kv_cache, batch, on_progress, connector)
        tokens = DeviceTokens(self._accelerator, len(batch.num_tokens))
        runner = self._create_runner(attention, kv_cache, batch, graphs, tokens, experts, drafter)
        runner.warm_up()
        sampler = DeviceSampler(
            accelerator=self._accelerator,
            batch=batch,
            last=tokens.last,
            vocab_size=self._model.spec.vocab_size,
            draw=self._kernels.draw,
            edits=self._kernels.edits,
        )
        return AsyncModelRunner(runner, tokens, self._accelerator, sampler)

    def build_drafter(
        self,
        kv_cache: KVCache,
        target: DraftedModel,
        on_progress: Callable[[float], None],
    ) -> Drafter:
        """Return the drafter of this model; captures CUDA graphs first.

        kv_cache: of the drafter, with as many blocks as the target has.
        """
        attention, graphs = self._create_layers(kv_cache, target.batch, on_progress)
        return create_drafter(
            self._model,
            attention,
            kv_cache,
            DeviceDraftDraw(self._accelerator, self._kernels.draw),
            target,
            DevicePlacement(self._accelerator),
            graphs,
        )

    def _create_layers(
        self,
        kv_cache: KVCache,
        batch: InputBatch,
        on_progress: Callable[[float], None],
        connector: WorkerConnector = NO_CONNECTOR,
    ) -> tuple[AttentionBackend, DecodeGraphs | None]:
        """Return the attention, and graphs of decodes if they can be captured."""
        sizes = self._graph_sizes(len(batch.num_tokens))
        pages = max(sizes, default=0) * batch.block_table.ids.shape[2]
        attention = with_hooks(self._create_attention(kv_cache, sizes, pages), connector)
        if not sizes or not isinstance(attention, FlashInferAttention):
            return attention, None
        assert isinstance(self._model, Decoder)
        graphs = DecodeGraphs(self._model, attention, self._accelerator, sizes)
        graphs.capture(batch.block_table, on_progress, len(kv_cache.layout.windows))
        return attention, graphs

    def build_pooling(
        self,
        head: PoolingHead,
        kv_cache: KVCache,
        batch: InputBatch,
        connector: WorkerConnector = NO_CONNECTOR,
    ) -> SyncModelRunner:
        """Return a runner of a model that pools; each step waits for its results."""
        runner = self.pooling_runner(head, kv_cache, batch, connector)
        runner.warm_up()
        return SyncModelRunner(runner)

    def pooling_runner(
        self, head: PoolingHead, kv_cache: KVCache, batch: InputBatch, connector: WorkerConnector
    ) -> PoolingRunner:
        assert isinstance(self._model, Decoder)
        return PoolingRunner(
            head,
            model=self._model,
            attention=with_hooks(self._create_attention(kv_cache, (), 0), connector),
            sampler=self._sampler,
            batch=batch,
            kv_cache=kv_cache,
            placement=DevicePlacement(self._accelerator),
            more=DevicePlacement(self._accelerator),
        )

    def run_largest_step(
        self, kv_cache: KVCache, batch: InputBatch, num_tokens: int, num_seqs: int
    ) -> None:
        """Compute the step that takes the most memory, in block 0 of a cache.

        Each sequence has counts, penalties, a mask, and a top-p over the whole vocabulary.
        batch: its rows are as long as sequences can be.
        """
        vocab_size = self._model.spec.vocab_size
        counts = self._accelerator.zeros(num_seqs * vocab_size, torch.int32)
        logits = self._largest_logits(kv_cache, batch, num_tokens, num_seqs)
        wide = logits.to(torch.float32, copy=True).contiguous()
        rows, slots, masks, rules, words = DevicePlacement(self._accelerator).to_device(
            largest_edits(num_seqs, vocab_size)
        )
        edits = RowEditArrays(rows, slots, masks, rules.view(-1, 3), words.view(num_seqs, -1))
        self._kernels.edits.edit_rows(wide, edits, counts.view(num_seqs, vocab_size))
        DeviceDraw(DevicePlacement(self._accelerator), self._kernels.draw).draw_tokens(
            wide, largest_params(num_seqs)
        )

    @torch.inference_mode()
    def run_largest_pass(
        self, kv_cache: KVCache, batch: InputBatch, num_tokens: int, num_seqs: int
    ) -> None:
        """Compute the largest pass of a drafter; arguments as for `run_largest_step`."""
        if isinstance(head := self._model, EagleHead):
            size = head.spec.hidden_size
            hidden = self._accelerator.zeros(num_tokens * size, head.dtype).view(-1, size)
            # Two steps are in flight, and each has its own.
            states = [head.features(hidden) for _ in range(2)]
            tokens = self._accelerator.zeros(num_tokens, torch.int64)
            head.store(tokens, states[0], tokens, kv_cache, tokens)
            logits = head.logits(states[0][:num_seqs])
        else:
            own = InputBatch(
                num_seqs,
                batch.token_ids.shape[1] - 1,
                batch.block_table.block_size,
                len(kv_cache.layout.windows),
            )
            logits = self._largest_logits(kv_cache, own, num_tokens, num_seqs)
        wide = logits.to(torch.float32, copy=True).contiguous()
        DeviceDraw(DevicePlacement(self._accelerator), self._kernels.draw).draw_tokens(
            wide, largest_params(num_seqs), masks_dropped=True
        )

    def _largest_logits(
        self, kv_cache: KVCache, batch: InputBatch, num_tokens: int, num_seqs: int
    ) -> torch.Tensor:
        attention = self._create_attention(kv_cache, (), 0)
        tokens = DeviceTokens(self._accelerator, num_seqs)
        runner = self._create_runner(attention, kv_cache, batch, None, tokens)
        return runner.run_dummy_step(num_tokens, num_seqs)

    def _create_runner(
        self,
        attention: AttentionBackend,
        kv_cache: KVCache,
        batch: InputBatch,
        graphs: DecodeGraphs | None,
        tokens: DeviceTokens,
        experts: RoutedExpertsCache | None = None,
        drafter: Drafter | None = None,
    ) -> ModelRunner:
        assert isinstance(self._model, Decoder)
        return ModelRunner(
            model=self._model,
            attention=attention,
            sampler=self._sampler,
            batch=batch,
            kv_cache=kv_cache,
            placement=DevicePlacement(self._accelerator),
            graphs=graphs,
            device_tokens=tokens,
            experts=experts,
            drafter=drafter,
        )

    def _graph_sizes(self, num_rows: int) -> tuple[int, ...]:
        """Return the graphs to capture.

        None for cascade attention, planned by the host, nor for transformers' code, which may ask
        the device for numbers, nor where sequences must not be split (`Options.batch_invariant`).
        """
        config = self._config
        eager = config.enforce_eager or config.batch_invariant or not self._model.can_be_captured
        if eager or config.cascade_attention_from:
            return ()
        return graph_sizes(num_rows)

    def _create_attention(
        self, kv_cache: KVCache, sizes: tuple[int, ...], pages: int
    ) -> AttentionBackend:
        name = self._config.attention_backend
        if name == "reference":
            return ReferenceAttention(kv_cache, self._shape)
        if name == "cpu":
            raise ConfigError("--attention-backend cpu needs --device cpu", "attention_backend")
        try:
            refuse_unsupported(self._shape, self._dtype, kv_cache.dtype)
            library = self._kernels.load_flashinfer()
        except ConfigError as reason:
            if name == "flashinfer" or self._config.batch_invariant:
                raise
            logger.warning("attention runs on the slow reference: %s", reason)
            return ReferenceAttention(kv_cache, self._shape)
        options = Options(
            sizes, pages, self._config.cascade_attention_from, self._config.batch_invariant
        )
        logger.info("attention runs on FlashInfer")
        return create_flashinfer(
            kv_cache,
            self._shape,
            self._dtype,
            self._accelerator,
            library,
            self._kernels.store,
            options,
        )
