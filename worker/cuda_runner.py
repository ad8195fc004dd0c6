"""A runner whose model, KV cache and sampling are on an accelerator, put together.

Owns which parts belong together: attention by FlashInfer allows graphs, the reference does
not; both compute ahead. Knows nothing of sockets.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from proto.config import DeviceConfig
from proto.errors import ConfigError
from worker.async_runner import AsyncModelRunner, DeviceTokens
from worker.attention.base import AttentionBackend
from worker.attention.flashinfer import FlashInferAttention, refuse_unsupported
from worker.attention.flashinfer_group import Library, Options
from worker.attention.kv_store import KVStore
from worker.attention.reference import ReferenceAttention
from worker.cuda_graphs import GraphForward, ladder
from worker.device.accelerator import Accelerator
from worker.device.placement import OnDevice
from worker.forward import EagerForward, Forward
from worker.input_batch import InputBatch
from worker.kv_cache import KVCache
from worker.kv_connector.base import NO_CONNECTOR, WorkerConnector
from worker.kv_connector.steps import with_hooks
from worker.model_runner import ModelRunner
from worker.models.decoder import Decoder
from worker.sampling.device_kernels import RowEditArrays, TritonEdits, largest_edits
from worker.sampling.device_sampler import DeviceDraw, DeviceSampler, KeyedDraw, largest_params
from worker.sampling.sampler import Sampler

logger = logging.getLogger("tokend.attention")


@dataclass(frozen=True, slots=True)
class Kernels:
    """What computes on the accelerator beside torch.

    library: gives FlashInfer, or raises ConfigError where it is not installed.
    """

    library: Callable[[], Library]
    store: KVStore
    draw: KeyedDraw
    edits: TritonEdits


class CudaRunnerMaker:
    """Makes runners over one model."""

    def __init__(
        self,
        config: DeviceConfig,
        model: Decoder,
        accelerator: Accelerator,
        kernels: Kernels,
        sampler: Sampler,
        dtype: torch.dtype,
    ) -> None:
        spec = model.spec
        self._config = config
        self._model = model
        self._accelerator = accelerator
        self._kernels = kernels
        self._sampler = sampler
        self._dtype = dtype
        self._shape = spec.attention_shape

    def runner(
        self,
        kv_cache: KVCache,
        rows: InputBatch,
        progress: Callable[[float], None],
        connector: WorkerConnector = NO_CONNECTOR,
    ) -> AsyncModelRunner:
        """What serves an epoch; captures graphs, of which `progress` is told the finished part.

        connector: may want calls around each layer's attention, which no graph has.
        """
        num_rows = len(rows.num_tokens)
        sizes = self._capture_sizes(num_rows)
        pages = max(sizes, default=0) * rows.block_table.ids.shape[2]
        attention = with_hooks(self._attention(kv_cache, sizes, pages), connector)
        eager = EagerForward(self._model, attention)
        forward: Forward = eager
        if sizes and isinstance(attention, FlashInferAttention):
            forward = graphs = GraphForward(eager, self._model, attention, self._accelerator, sizes)
            graphs.capture(rows.block_table, progress)
        tokens = DeviceTokens(self._accelerator, num_rows)
        runner = self._model_runner(attention, kv_cache, rows, forward, tokens)
        runner.warm_up()
        sampler = DeviceSampler(
            self._accelerator,
            rows,
            tokens.last,
            self._model.spec.vocab_size,
            self._kernels.draw,
            self._kernels.edits,
        )
        return AsyncModelRunner(runner, rows, tokens, self._accelerator, sampler)

    def run_largest_step(
        self, kv_cache: KVCache, table_of: InputBatch, num_tokens: int, num_seqs: int
    ) -> None:
        """Compute what takes the most memory, in a cache whose block 0 is enough.

        Each sequence has its counts, penalties and a mask, and is drawn from by a top-p that looks
        through all tokens.
        table_of: rows as long as sequences get.
        """
        attention = self._attention(kv_cache, (), 0)
        forward = EagerForward(self._model, attention)
        tokens = DeviceTokens(self._accelerator, num_seqs)
        runner = self._model_runner(attention, kv_cache, table_of, forward, tokens)
        vocab_size = self._model.spec.vocab_size
        counts = self._accelerator.zeros(num_seqs * vocab_size, torch.int32)
        scores = runner.run_nobodys(num_tokens, num_seqs)
        wide = scores.to(torch.float32, copy=True).contiguous()
        at, slots, masks, rules, words = OnDevice(self._accelerator).send(
            largest_edits(num_seqs, vocab_size)
        )
        changes = RowEditArrays(at, slots, masks, rules.view(-1, 3), words.view(num_seqs, -1))
        self._kernels.edits.edit_rows(wide, changes, counts.view(num_seqs, vocab_size))
        DeviceDraw(OnDevice(self._accelerator), self._kernels.draw).tokens(
            wide, largest_params(num_seqs)
        )

    def _model_runner(
        self,
        attention: AttentionBackend,
        kv_cache: KVCache,
        rows: InputBatch,
        forward: Forward,
        tokens: DeviceTokens,
    ) -> ModelRunner:
        return ModelRunner(
            self._model,
            attention,
            self._sampler,
            rows,
            kv_cache,
            OnDevice(self._accelerator),
            forward,
            tokens,
        )

    def _capture_sizes(self, num_rows: int) -> tuple[int, ...]:
        """None where the host has a part in each step, as it has in sharing prefixes."""
        if self._config.enforce_eager or self._config.cascade_attention_from:
            return ()
        return ladder(num_rows)

    def _attention(self, kv_cache: KVCache, sizes: tuple[int, ...], pages: int) -> AttentionBackend:
        name = self._config.attention_backend
        if name == "reference":
            return ReferenceAttention(kv_cache, self._shape)
        if name == "cpu":
            raise ConfigError("--attention-backend cpu needs --device cpu", "attention_backend")
        try:
            refuse_unsupported(self._shape, self._dtype, kv_cache.dtype)
            library = self._kernels.library()
        except ConfigError as reason:
            if name == "flashinfer":
                raise
            logger.warning("attention runs on the slow reference: %s", reason)
            return ReferenceAttention(kv_cache, self._shape)
        options = Options(sizes, pages, self._config.cascade_attention_from)
        logger.info("attention runs on FlashInfer")
        return FlashInferAttention(
            kv_cache,
            self._shape,
            self._dtype,
            self._accelerator,
            library,
            self._kernels.store,
            options,
        )
