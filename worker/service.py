"""The worker's side of its links: load, agree on the cache, then step after step.

supervisor ── boot ──▶ load weights ── WorkerReady ──▶ engine
engine ── InitializeCache ──▶ allocate ── CacheReady ──▶ engine
engine ── SchedulerOutput ──▶ ModelRunner ── ModelRunnerOutput ──▶ engine
engine ── GrammarOutput ──▶ before it samples, where the step has constrained sequences

When the engine dies the supervisor names the epoch of the next one (NewEngine): rows and
KV are given up, the weights stay, and all but the loading begins again. For 30 s: a worker
without an engine ends itself.

Workers that share a model meet when the engine has them make their caches, and part when it dies:
one that waits for a step's other parts then loses its group, and waits for the supervisor, as it
does when another worker has died.
"""

import json
import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

from proto import PROTOCOL_VERSION
from proto.errors import ModelError, ProtocolError
from proto.faults import Saboteur
from proto.heap import settle_heap
from proto.lifecycle import (
    AwaitsRanks,
    CacheReady,
    Distrust,
    InitializeCache,
    KVCacheGeometry,
    NewEngine,
    Notice,
    ProcessBoot,
    Progress,
    Shutdown,
    WeightMemory,
    WorkerReady,
)
from proto.model_runner_output import ModelRunnerOutput
from proto.phase_clock import PhaseClock
from proto.prepared_model import PreparedModel
from proto.process import describe
from proto.scheduler_output import GrammarOutput, SchedulerOutput
from proto.sockets import Link, Poller, worker_path
from worker.ahead import AtOnce, Launched, Runner
from worker.attention.base import AttentionShape
from worker.attention.flashinfer import load_library
from worker.attention.kv_store import TritonStore
from worker.attention.registry import create_backend
from worker.batch.rows import Rows
from worker.cuda_runner import CudaRunnerMaker, Kernels
from worker.device.accelerator import Cuda
from worker.device.choice import create_device
from worker.engine_wait import EngineWait
from worker.faulty_model import FaultyModel
from worker.fingerprint import kv_fingerprint
from worker.inbox import FromEngine, Inbox, StepAbandonedError
from worker.kernels import load_kernels
from worker.kv_cache import KVCache, kv_cache_geometry, resolve_kv_dtype
from worker.kv_layout import kv_layout
from worker.layers.triton_rows import TritonRotate
from worker.loader.choice import activation_dtype, choose_form
from worker.loader.form_report import dense_notice, memory_line
from worker.loader.forms import DenseForm, WeightForm
from worker.loader.index import read_index
from worker.loader.pieces import shares_of
from worker.loader.weights import load_model
from worker.model_runner import ModelRunner
from worker.models.decoder import Decoder
from worker.models.registry import spec_from_config
from worker.parallel.create import create_group
from worker.parallel.group import GroupLostError
from worker.parallel.patience import Patience
from worker.sample.device_draw import TritonDraw
from worker.sample.device_edits import TritonEdits
from worker.sample.sampler import create_sampler

logger = logging.getLogger("tokend.worker")


def main(boot: ProcessBoot, supervisor: Link) -> None:
    """Load the model, then serve one engine after the other until the supervisor says Shutdown."""

    def meet(epoch: int) -> Link:
        path = worker_path(boot.run_dir, epoch, boot.index)
        return Link.connect(path, FromEngine)

    Service(boot, meet, supervisor).run()


class Service:
    """One worker. `meet` makes the link to the engine of a worker epoch."""

    def __init__(self, boot: ProcessBoot, meet: Callable[[int], Link], supervisor: Link) -> None:
        self._phases = PhaseClock(boot.born_at)
        self._phases.end("imports")
        self._boot = boot
        self._supervisor = supervisor
        self._meet = meet
        self._epoch = boot.worker_epoch
        self._engine_epoch = boot.epoch
        self._distrusts_engine = False
        self._engine = meet(boot.worker_epoch)
        self._poller = Poller([supervisor, self._engine])
        self._inbox = Inbox()
        self._stopped = False
        self._engine_wait = EngineWait()
        self._runner: Runner | None = None
        self._launched: deque[tuple[SchedulerOutput, Launched]] = deque()
        self._has_room = False
        self._saboteur = Saboteur.of(boot.faults, "worker", boot.index, boot.incarnation)
        num_workers = boot.config.parallel.tensor_parallel_size
        self._device = create_device(boot.config, boot.index)
        self._device.check_kv_dtype(boot.config.cache.kv_cache_dtype)
        self._step_tokens = self._device.step_tokens(boot.config.scheduler)
        self._group = create_group(
            boot.run_dir,
            boot.index,
            num_workers,
            self._device.torch_device,
            lambda: supervisor.send(AwaitsRanks(boot.index)),
            lambda: bool(Poller([supervisor]).wait(0.0)),
        )
        self._patience = Patience(num_workers, lambda: supervisor.send(AwaitsRanks(boot.index)))
        self._has_lost_group = False
        # Loading takes a while, and what has no room now has none beside the weights.
        self._device.kv_cache_bytes(boot.config.cache)
        self._dtype = self._device.resolve_dtype(activation_dtype(boot.config.model))
        self._form = self._choose_form()
        self._model = self._load()
        self._layout = kv_layout(self._model.spec.windows)
        self._geometry = self._cache_geometry()
        self._device.check_blocks(boot.config.cache, self._geometry.bytes_per_token)
        # What is granted once holds for every engine: they plan alike, whatever is free by then.
        peak = self._device.peak_of(self._run_largest_step)
        self._kv_cache_bytes = self._device.kv_cache_bytes(
            boot.config.cache, self._part_of_kv(), peak
        )
        self._phases.end("weights")

    def run(self) -> None:
        """Serve until Shutdown; raises ProcessDiedError when no engine follows one that died."""
        self._engine.send(self._ready())
        settle_heap()  # while the engine plans; what follows must not wait for it
        while not self._stopped:
            # A device that computes may be done before anything arrives: then it is looked at.
            self._receive(0.0 if self._launched else self._engine_wait.seconds_left())
            while not self._stopped and (message := self._inbox.next()) is not None:
                self._serve_with_others(message)
                self._answer_what_is_ready()
            self._answer_what_is_ready()

    def masks_of(self, step: SchedulerOutput) -> GrammarOutput:
        """Wait for the masks of a step; raises StepAbandonedError when none will come."""
        epoch = self._epoch
        while (masks := self._inbox.masks_of(step.step)) is None:
            self._answer_what_is_ready()  # the engine makes them of the tokens before
            self._receive(0.0 if self._launched else None)
            if self._stopped or self._epoch != epoch:
                raise StepAbandonedError
        return masks

    def _receive(self, seconds: float | None) -> None:
        """Obey the supervisor, and take in what the engine has sent, after at most this time."""
        readable = self._poller.wait(seconds)
        if self._supervisor in readable and self._obey():
            self._stopped = True
            return
        messages = self._engine.receive()
        if self._engine.num_undecodable:
            self._distrust_engine()
            return
        self._inbox.put([each for each in messages if each.epoch == self._epoch])

    def _obey(self) -> bool:
        """What the supervisor says; True for Shutdown."""
        for message in self._supervisor.receive():
            if isinstance(message, Shutdown):
                return True
            if isinstance(message, NewEngine):
                self._engine_epoch = message.epoch
                self._change_engine(message.worker_epoch)
        return False

    def _distrust_engine(self) -> None:
        """It sent what is no message: a step is lost, and nothing is left to compute with it."""
        if not self._distrusts_engine:
            self._distrusts_engine = True
            self._supervisor.send(
                Distrust("engine_core", 0, self._engine_epoch, "it sent what is no message")
            )

    def _change_engine(self, epoch: int) -> None:
        """Nothing is left of the old engine but the weights."""
        logger.info("the engine died: waiting for the next one")
        self._poller.remove(self._engine)
        self._engine.close()
        self._runner = None
        self._launched.clear()
        self._group.leave()  # which waits for the end of graphs that the group is part of
        self._has_lost_group = False
        self._distrusts_engine = False
        self._epoch = epoch
        self._inbox = Inbox()
        self._engine = self._meet(epoch)
        self._poller.add(self._engine)
        self._engine.send(self._ready())
        self._engine_wait.begin()

    def _serve_with_others(self, message: InitializeCache | SchedulerOutput) -> None:
        """Without them there is nothing to do until the supervisor says what follows."""
        if self._has_lost_group:
            return
        try:
            self._serve(message)
        except GroupLostError as error:
            logger.warning("%s", error)
            self._has_lost_group = True
            self._engine_wait.begin()

    def _serve(self, message: InitializeCache | SchedulerOutput) -> None:
        if isinstance(message, InitializeCache):
            self._engine_wait.end()
            self._runner = self._initialize(message)
            self._engine.send(CacheReady(message.epoch, self._boot.index))
        elif self._runner is None:
            raise ProtocolError("the engine sent a step before InitializeCache")
        else:
            self._launch(self._runner, message)

    def _launch(self, runner: Runner, step: SchedulerOutput) -> None:
        """Begin a step; a device may still be computing the one before."""
        with self._reporting(step):
            if step.total_num_scheduled_tokens:
                self._saboteur.begin_step()
            self._launched.append((step, runner.launch(step, self)))

    def _answer_what_is_ready(self) -> None:
        """Send the tokens of the steps that are done, the oldest first."""
        while self._launched and self._launched[0][1].ready():
            step, launched = self._launched.popleft()
            with self._reporting(step):
                output = launched.result()
            self._engine.send(output)
        self._patience.await_step(self._launched[0][0].step if self._launched else None)

    @contextmanager
    def _reporting(self, step: SchedulerOutput) -> Iterator[None]:
        """The engine hears what a step has failed of; nobody is left to hear of others."""
        try:
            yield
        except StepAbandonedError:
            pass
        except GroupLostError:
            raise  # whoever caused it says more
        except Exception as error:
            self._engine.send(
                ModelRunnerOutput(
                    step.epoch, step.step, [], [], error=describe(error, self._boot.index)
                )
            )
            raise

    def _choose_form(self) -> WeightForm:
        if self._on_cuda:
            return DenseForm(self._dtype)
        return choose_form(
            self._boot.config.model,
            self._dtype,
            read_index(self._boot.model),
            self._device.matrix_flags,
            load_kernels,
        )

    def _load(self) -> Decoder:
        prepared, form = self._boot.model, self._form
        logger.info(
            "loading %s as %s, weights %s",
            prepared.name,
            str(self._dtype).removeprefix("torch."),
            form.name,
        )
        model = load_model(
            prepared,
            spec_from_config(read_config(prepared)),
            self._dtype,
            self._device.torch_device,
            self._report_progress,
            form,
            self._group,
        )
        logger.info("weights: %s", memory_line(form))
        if notice := dense_notice(form):
            self._supervisor.send(Notice("worker", self._boot.index, notice))
        return model

    def _report_progress(self, fraction: float) -> None:
        self._supervisor.send(Progress("worker", self._boot.index, "loading weights", fraction))

    def _cache_geometry(self) -> KVCacheGeometry:
        spec = self._model.spec
        setting = self._boot.config.cache.kv_cache_dtype
        dtype = resolve_kv_dtype(setting, self._dtype, spec.head_dim)
        return kv_cache_geometry(self._layout, spec.num_kv_heads, spec.head_dim, dtype)

    def _ready(self) -> WorkerReady:
        config = self._boot.config
        return WorkerReady(
            protocol_version=PROTOCOL_VERSION,
            epoch=self._epoch,
            rank=self._boot.index,
            geometry=self._geometry,
            kv_cache_bytes=self._kv_cache_bytes,
            vocab_size=self._model.spec.vocab_size,
            fingerprint=kv_fingerprint(
                self._boot.model.weights_sha256,
                read_config(self._boot.model),
                self._geometry,
                config.cache.block_size,
                str(self._dtype),
                # Another device sums in another order.
                f"cuda {self._form.name}" if self._on_cuda else self._form.name,
                (self._group.rank, self._group.size),
            ),
            device_name=self._device.name,
            weights=tuple(WeightMemory(*each) for each in self._form.memory.items()),
            phases=self._phases.phases,
            computes_ahead=self._on_cuda,
            step_tokens=self._step_tokens,
        )

    def _initialize(self, message: InitializeCache) -> Runner:
        if message.protocol_version != PROTOCOL_VERSION:
            raise ProtocolError(
                f"engine speaks protocol {message.protocol_version}, worker {PROTOCOL_VERSION}"
            )
        self._group.join(message.epoch)
        self._check_rows(message)
        cache, rows = self._pool_and_rows(message)
        if self._on_cuda:
            return self._cuda_runners().runner(cache, rows, self._report_graphs)
        return AtOnce(self._host_runner(cache, rows))

    def _pool_and_rows(self, message: InitializeCache) -> tuple[KVCache, Rows]:
        cache = KVCache(
            self._geometry,
            self._layout,
            message.num_blocks,
            message.block_size,
            self._device.torch_device,
        )
        return cache, self._rows(message.max_model_len)

    def _host_runner(self, cache: KVCache, rows: Rows) -> ModelRunner:
        """What serves an epoch on a CPU."""
        spec = self._model.spec
        shape = AttentionShape(
            spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.attention_scale
        )
        attention = create_backend(self._boot.config.device.attention_backend, cache, shape)
        runner = ModelRunner(self._checked_model(), attention, create_sampler(), rows, cache)
        runner.warm_up()
        return runner

    def _part_of_kv(self) -> Fraction:
        """Of the KV heads that all workers hold together, those of this one."""
        if self._group.size == 1:
            return Fraction(1)
        prepared = self._boot.model
        shares = shares_of(
            spec_from_config(read_config(prepared)), read_index(prepared), self._group.size
        )
        held = [len(share.kv_heads) for share in shares]
        return Fraction(held[self._group.rank], sum(held))

    def _run_largest_step(self) -> None:
        """As many tokens and sequences as the settings allow; only their memory matters."""
        scheduler, longest = self._boot.config.scheduler, self._model.spec.max_position
        num_seqs = min(scheduler.max_num_seqs, self._step_tokens)
        block_size = self._boot.config.cache.block_size
        cache = KVCache(self._geometry, self._layout, 1, block_size, self._device.torch_device)
        num_tokens = min(self._step_tokens, num_seqs * longest)
        self._group.join(self._epoch, "memory")
        self._cuda_runners().run_largest_step(cache, self._rows(longest), num_tokens, num_seqs)

    def _cuda_runners(self) -> CudaRunnerMaker:
        return CudaRunnerMaker(
            self._boot.config.device,
            self._checked_model(),
            Cuda(self._device.torch_device),
            Kernels(load_library, TritonStore(), TritonDraw(), TritonRotate(), TritonEdits()),
            create_sampler(),
            self._dtype,
        )

    def _checked_model(self) -> Decoder:
        """The model, or one that is wrong at times, where a test has asked for it."""
        return self._model if self._saboteur.idle else FaultyModel(self._model, self._saboteur)

    @property
    def _on_cuda(self) -> bool:
        return self._device.torch_device.type == "cuda"

    def _rows(self, max_model_len: int) -> Rows:
        config = self._boot.config
        return Rows(
            config.scheduler.max_num_seqs,
            max_model_len,
            config.cache.block_size,
            self._layout.num_groups,
        )

    def _report_graphs(self, fraction: float) -> None:
        self._supervisor.send(Progress("worker", self._boot.index, "capturing graphs", fraction))

    def _check_rows(self, message: InitializeCache) -> None:
        """Before anything is allocated; once, as for the pool."""
        if self._has_room:
            return
        num_rows = self._boot.config.scheduler.max_num_seqs
        self._device.check_rows(
            num_rows,
            Rows.bytes_needed(
                num_rows, message.max_model_len, message.block_size, self._layout.num_groups
            ),
            message.num_blocks * message.block_size * self._geometry.bytes_per_token,
        )
        self._has_room = True


def read_config(prepared: PreparedModel) -> dict[str, Any]:
    """The model's config.json; raises ModelError naming the file."""
    path = Path(prepared.folder) / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: {error}") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path}: not a JSON object")
    return config
