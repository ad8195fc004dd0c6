"""Makes what computes the steps of an engine: KV pool, rows and the runner over them.

Owns how much memory the pool may have, which is settled once: engines plan alike, whatever is
free by then. Knows nothing of links.
"""

from proto.config import ServeConfig
from proto.faults import FaultInjector
from proto.kv_transfer_config import kv_transfer_config
from proto.lifecycle import InitializeCache
from worker.async_runner import Runner, SyncModelRunner
from worker.attention.flashinfer import load_library
from worker.attention.kv_store import TritonStore
from worker.attention.registry import create_backend
from worker.cuda_runner import CudaRunnerMaker, Kernels
from worker.device.accelerator import Cuda
from worker.faulty_model import FaultyModel
from worker.input_batch import InputBatch
from worker.kv_cache import KVCache
from worker.kv_connector.base import NO_CONNECTOR, WorkerConnector, WorkerContext
from worker.kv_connector.factory import create_worker_connector
from worker.kv_connector.steps import with_hooks
from worker.loaded_model import LoadedModel
from worker.model_runner import ModelRunner
from worker.models.decoder import Decoder
from worker.reports import Reports
from worker.sampling.device_kernels import TritonDraw, TritonEdits
from worker.sampling.sampler import create_sampler


class RunnerMaker:
    """Makes runners over one model, one for each engine.

    saboteur: breaks the model's numbers where a test has asked for it.
    """

    def __init__(
        self, config: ServeConfig, loaded: LoadedModel, saboteur: FaultInjector, reports: Reports
    ) -> None:
        self._config = config
        self._loaded = loaded
        self._saboteur = saboteur
        self._reports = reports
        self._device = loaded.device
        self._has_room = False
        self.step_tokens = self._device.step_tokens(config.scheduler)
        """Most tokens of a step, for which there is room beside the pool."""
        self._device.check_blocks(config.cache, loaded.geometry.bytes_per_token)
        peak = self._device.peak_of(self._run_largest_step)
        self.kv_cache_bytes = self._device.kv_cache_bytes(config.cache, loaded.part_of_kv, peak)
        """For the KV pool of any engine."""

    def make(self, message: InitializeCache) -> tuple[Runner, WorkerConnector]:
        """What serves the engine that wants such a cache, and copies between it and elsewhere.

        Raises ConfigError without memory, and for a connector that cannot be.
        """
        self._check_rows(message)
        cache, rows = self._pool_and_rows(message)
        connector = self._connect(message, cache)
        if not self._loaded.on_cuda:
            return SyncModelRunner(self._host_runner(cache, rows, connector)), connector
        runner = self._cuda_runners().runner(
            cache,
            rows,
            lambda fraction: self._reports.progress("capturing graphs", fraction),
            connector,
        )
        return runner, connector

    def on_host(self, message: InitializeCache) -> ModelRunner:
        """The runner alone, on a CPU."""
        return self._host_runner(*self._pool_and_rows(message), NO_CONNECTOR)

    def _connect(self, message: InitializeCache, cache: KVCache) -> WorkerConnector:
        config, group = self._config, self._loaded.group
        context = WorkerContext(
            group.rank, group.size, message.fingerprint, message.block_size, config
        )
        transfer = kv_transfer_config(config.cache.kv_transfer_config)
        connector = create_worker_connector(transfer, context)
        connector.register_kv_caches(cache)
        return connector

    def _host_runner(
        self, cache: KVCache, rows: InputBatch, connector: WorkerConnector
    ) -> ModelRunner:
        spec = self._loaded.model.spec
        shape = spec.attention_shape
        plain = create_backend(self._config.device.attention_backend, cache, shape)
        attention = with_hooks(plain, connector)
        runner = ModelRunner(self._checked_model(), attention, create_sampler(), rows, cache)
        runner.warm_up()
        return runner

    def _pool_and_rows(self, message: InitializeCache) -> tuple[KVCache, InputBatch]:
        cache = self._pool(message.num_blocks, message.block_size)
        if self._config.cache.kv_cache_populate:
            cache.populate()
        return cache, self._rows(message.max_model_len)

    def _pool(self, num_blocks: int, block_size: int) -> KVCache:
        loaded = self._loaded
        return KVCache(
            loaded.geometry, loaded.layout, num_blocks, block_size, self._device.torch_device
        )

    def _rows(self, max_model_len: int) -> InputBatch:
        config = self._config
        return InputBatch(
            config.scheduler.max_num_seqs,
            max_model_len,
            config.cache.block_size,
            self._loaded.layout.num_groups,
        )

    def _run_largest_step(self) -> None:
        """As many tokens and sequences as the settings allow; only their memory matters."""
        scheduler, longest = self._config.scheduler, self._loaded.model.spec.max_position
        num_seqs = min(scheduler.max_num_seqs, self.step_tokens)
        num_tokens = min(self.step_tokens, num_seqs * longest)
        cache = self._pool(1, self._config.cache.block_size)
        self._cuda_runners().run_largest_step(cache, self._rows(longest), num_tokens, num_seqs)

    def _cuda_runners(self) -> CudaRunnerMaker:
        return CudaRunnerMaker(
            self._config.device,
            self._checked_model(),
            Cuda(self._device.torch_device),
            Kernels(load_library, TritonStore(), TritonDraw(), TritonEdits()),
            create_sampler(),
            self._loaded.dtype,
        )

    def _checked_model(self) -> Decoder:
        """The model, or one that is wrong at times, where a test has asked for it."""
        model = self._loaded.model
        return model if self._saboteur.idle else FaultyModel(model, self._saboteur)

    def _check_rows(self, message: InitializeCache) -> None:
        """Before anything is allocated; once, as for the pool."""
        if self._has_room:
            return
        num_rows, loaded = self._config.scheduler.max_num_seqs, self._loaded
        self._device.check_rows(
            num_rows,
            InputBatch.bytes_needed(
                num_rows, message.max_model_len, message.block_size, loaded.layout.num_groups
            ),
            message.num_blocks * message.block_size * loaded.geometry.bytes_per_token,
        )
        self._has_room = True
