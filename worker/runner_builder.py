"""Assemble what computes the steps of an engine: KV pool, input batch, connector, runner.

RunnerBuilder is created once a worker and decides how large the KV pool may be;
`build_model_runner` is called for each engine. The device builds the runner of these parts.
"""

from collections.abc import Callable

from proto.messages.lifecycle import InitializeCache, Notice, Progress
from proto.runtime.faults import FaultInjector
from proto.settings.config import ServeConfig
from proto.settings.kv_transfer_config import kv_transfer_config
from worker.attention.kv_cache import KVCache
from worker.attention.scratch_pages import SCRATCH_BLOCK, num_scratch_blocks
from worker.attention.state_cache import StateCache
from worker.batch.input_batch import InputBatch
from worker.kv_connector.base import WorkerConnector, WorkerContext, create_worker_connector
from worker.kv_connector.steps import StepConnector
from worker.layers.layer_progress import LayerProgress
from worker.loaded_model import LoadedDraft, LoadedModel
from worker.plan.memory_plan import step_tokens
from worker.speculation.draft_model import TOKEN_BYTES
from worker.speculation.drafter import DraftedModel, Drafter
from worker.speculation.eagle_head import EagleHead
from worker.step.encoder_cache import EncoderCache
from worker.step.routed_experts import RoutedExpertsCache, record_experts, routing_bytes
from worker.step.runner_parts import DrafterParts, Runner, RunnerParts


class RunnerBuilder:
    """Builds runners over one model, one for each engine.

    fault_injector: replaces hidden states by NaN if a test asks for it. report: sends a message to
    the supervisor. step_tokens: token budget of a step, for which memory is kept beside the pool.
    pixels_folder: of the daemon, with the pixels of images.
    kv_cache_bytes: memory for the KV pool, the same for every engine of this worker.
    routing_bytes: of a token's routed experts; 0 if no request may return them.
    """

    def __init__(
        self,
        config: ServeConfig,
        loaded: LoadedModel,
        fault_injector: FaultInjector,
        report: Callable[[Progress | Notice], None],
        pixels_folder: str,
    ) -> None:
        self._config = config
        self._loaded = loaded
        self._fault_injector = fault_injector
        self._report = report
        self._pixels_folder = pixels_folder
        self._device = loaded.device
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
            pool_bytes = self._device.kv_cache_bytes(
                config.cache, tokens * token_bytes, peak, loaded.plan.states_bytes
            )
            self.kv_cache_bytes = pool_bytes * kv_bytes // token_bytes

    def build_model_runner(self, message: InitializeCache) -> tuple[Runner, StepConnector]:
        """Return the runner and the KV connector for an engine.

        Raises ConfigError if memory is missing, or for an impossible connector.
        """
        cache = self._populated(self._create_step_cache(message.num_blocks, message.block_size))
        states = self._create_states(message)
        connector = self._connect(message, cache, states)
        progress: LayerProgress | None = None
        if connector.per_layer:
            progress = self._device.layer_progress(len(cache.layout.layer_slots))
        self._loaded.model.track_layers(progress)
        runner = self._device.build_runner(self.parts(message, cache, states))
        return runner, StepConnector(connector, progress, len(cache.layout.layer_slots))

    def parts(
        self,
        message: InitializeCache,
        cache: KVCache | None = None,
        states: StateCache | None = None,
    ) -> RunnerParts:
        """Return the parts of a runner for an engine. cache, states: new ones if None."""
        loaded = self._loaded
        if states is None:
            states = self._create_states(message)
        if cache is None:
            cache = self._create_step_cache(message.num_blocks, message.block_size)
        batch = self._create_batch(message.max_model_len, message.block_size)
        return RunnerParts(
            config=self._config.device,
            model=loaded.model,
            dtype=loaded.dtype,
            attention_kernels=loaded.attention_kernels,
            kv_cache=cache,
            batch=batch,
            states=states,
            experts=self._experts(cache),
            drafter=self._create_drafter(message, batch),
            pooling_head=loaded.pooling_head,
            adapters=loaded.adapters,
            encoder_cache=(
                None
                if loaded.vision is None
                else EncoderCache(loaded.vision, self._pixels_folder, loaded.adapters)
            ),
            fault_injector=None if self._fault_injector.idle else self._fault_injector,
            is_batch_invariant=loaded.is_batch_invariant,
            show_captured=self._show_captured,
        )

    def _show_captured(self, fraction: float) -> None:
        self._report(Progress("capturing graphs", fraction))

    def _create_drafter(self, message: InitializeCache, batch: InputBatch) -> Drafter | None:
        """Return the drafter for an engine, if there is a draft model."""
        draft = self._loaded.draft
        if draft is None:
            return None
        cache = self._populated(self._draft_cache(draft, message.num_blocks, message.block_size))
        return self._device.build_drafter(self._drafter_parts(draft, cache, batch))

    def _drafter_parts(self, draft: LoadedDraft, cache: KVCache, batch: InputBatch) -> DrafterParts:
        group = self._loaded.layout.windows.index(None)
        return DrafterParts(
            config=self._config.device,
            model=draft.model,
            dtype=self._loaded.dtype,
            attention_kernels=draft.attention_kernels,
            kv_cache=cache,
            target=DraftedModel(
                batch,
                group,
                self._loaded.model.spec.vocab_size,
                self.step_tokens,
                draft.max_model_len,
            ),
            show_captured=self._show_captured,
        )

    def _create_states(self, message: InitializeCache) -> StateCache | None:
        """Return the states of layers without attention, if there are any."""
        shape = self._loaded.layout.states
        if shape is None:
            return None
        states = self._device.state_cache(shape, message.num_state_slots, message.block_size)
        if self._config.cache.kv_cache_populate:
            states.populate()
        return states

    def _experts(self, cache: KVCache) -> RoutedExpertsCache | None:
        record = self._expert_record
        if record is None:
            return None
        return RoutedExpertsCache(self._loaded.model.spec, cache, record, self._device.zeros)

    def _connect(
        self, message: InitializeCache, cache: KVCache, states: StateCache | None
    ) -> WorkerConnector:
        config, group = self._config, self._loaded.group
        context = WorkerContext(
            group.rank, group.size, message.fingerprint, message.block_size, self._device, config
        )
        transfer = kv_transfer_config(config.cache.kv_transfer_config)
        connector = create_worker_connector(transfer, context)
        connector.register_kv_caches(cache)
        if states is not None:
            connector.register_states(states)
        return connector

    def _populated(self, cache: KVCache) -> KVCache:
        """Commit the memory of a cache if that is wanted."""
        if self._config.cache.kv_cache_populate:
            cache.populate()
        return cache

    def _create_step_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """Return the KV cache that the engine asks for, or scratch pages for an encoder's steps."""
        loaded = self._loaded
        if loaded.layout.is_scratch:
            num_seqs = self._config.scheduler.max_num_seqs
            num_blocks = num_scratch_blocks(self.step_tokens, num_seqs)
            block_size = SCRATCH_BLOCK
        return KVCache(loaded.geometry, loaded.layout, num_blocks, block_size, self._device.zeros)

    def _draft_cache(self, draft: LoadedDraft, num_blocks: int, block_size: int) -> KVCache:
        return KVCache(draft.geometry, draft.layout, num_blocks, block_size, self._device.zeros)

    def _create_batch(self, max_model_len: int, block_size: int) -> InputBatch:
        return InputBatch(
            self._config.scheduler.max_num_seqs,
            max_model_len,
            block_size,
            self._loaded.layout.num_groups,
            has_states=self._loaded.layout.states is not None,
            vision=self._loaded.prepared.vision,
        )

    def _run_largest_step(self) -> None:
        """Run a step of as many tokens and sequences as the settings allow."""
        scheduler, loaded = self._config.scheduler, self._loaded
        longest = loaded.model.spec.max_position
        num_seqs = min(scheduler.max_num_seqs, self.step_tokens)
        num_tokens = min(self.step_tokens, num_seqs * longest)
        block_size = self._config.cache.block_size
        batch = self._create_batch(longest, block_size)
        states = loaded.layout.states
        parts = RunnerParts(
            config=self._config.device,
            model=loaded.model,
            dtype=loaded.dtype,
            kv_cache=self._create_step_cache(1, block_size),
            states=(None if states is None else self._device.state_cache(states, 2, block_size)),
            batch=batch,
            pooling_head=loaded.pooling_head,
        )
        self._device.run_largest_step(parts, num_tokens, num_seqs)
        if (draft := loaded.draft) is not None:
            longest = min(longest, draft.model.spec.max_position)  # the batch is the target's
            num_tokens = min(self.step_tokens, num_seqs * longest)
            cache = self._draft_cache(draft, 1, block_size)
            drafter_parts = self._drafter_parts(draft, cache, batch)
            self._device.run_largest_pass(drafter_parts, num_tokens, num_seqs)
