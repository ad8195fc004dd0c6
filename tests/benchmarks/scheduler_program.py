"""Reads workloads from stdin and prints their timings, one JSON line each, until EOF."""

import gc
import itertools
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import thread_time_ns
from typing import Final

import msgspec

from engine_core.compiled import use_compiled

if __name__ == "__main__":
    use_compiled()  # before the import of any module with a compiled form

from engine_core.block_hashing import BlockHasher
from engine_core.core import EngineCore, scheduler_settings
from engine_core.live_view import EngineViewPublisher
from engine_core.pool_plan import PoolPlan, plan_pool
from engine_core.trace.file import start_trace
from engine_core.trace.recorder import TraceRecorder
from engine_core.transport import FrontEndLinks
from proto import PROTOCOL_VERSION
from proto.codec import MessageDecoder, encode, from_json, to_json_line
from proto.messages.engine_io import EngineCoreOutputs, EngineCoreRequest
from proto.messages.lifecycle import WorkerReady
from proto.messages.model_runner_output import ModelRunnerOutput
from proto.messages.sampling_params import SamplingParams
from proto.messages.scheduler_output import SchedulerOutput
from proto.runtime.process import freeze_heap
from proto.settings.config import CacheConfig, SchedulerConfig, ServeConfig, TraceConfig
from proto.settings.config_checks import validate
from tests.benchmarks.messages import RequestRecipe, SchedulerTimings, SchedulerWorkload, Timing
from tests.benchmarks.null_worker import GEOMETRY, NUM_TOKEN_IDS, FakeWorker

# From many samples to a median and a 99th percentile.


def timing(samples: Sequence[float]) -> Timing | None:
    """Return median and 99th percentile, None without samples."""
    if not samples:
        return None
    ordered = sorted(samples)
    return Timing(statistics.median(ordered), ordered[int(len(ordered) * 0.99)])


# From the recipe of a workload to token ids and requests.


EPOCH = 1
LOWEST_TOKEN_ID, HIGHEST_TOKEN_ID = 1000, 30_000


def prompt_of(recipe: RequestRecipe) -> list[int]:
    """Return the token ids of a prompt."""
    tokens: list[int] = []
    for seed, number in recipe.segments:
        plain = range(LOWEST_TOKEN_ID, HIGHEST_TOKEN_ID)
        tokens += random.Random(seed).choices(plain, k=number)
    return tokens


def requests_of(workload: SchedulerWorkload) -> Iterator[EngineCoreRequest]:
    """Yield the requests of a workload endlessly."""
    recipes = [(recipe, prompt_of(recipe)) for recipe in workload.requests]
    for request_id, (recipe, prompt) in enumerate(itertools.cycle(recipes)):
        yield EngineCoreRequest(
            epoch=EPOCH,
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=recipe.max_tokens),
            seed=request_id,
            arrival_time=float(request_id),
            priority=recipe.priority,
            tenant=recipe.tenant,
        )


# The engine of a workload, set up as in the daemon, whose messages are kept instead of sent.


_FINGERPRINT = bytes(32)
_FRONT_END = 0


class KeptMessages(FrontEndLinks):
    """Replaces the links to the front ends. last: the last message."""

    def __init__(self) -> None:
        super().__init__("", EPOCH, ())
        self.last = EngineCoreOutputs(EPOCH, 0, 0.0)

    @property
    def alive(self) -> list[int]:
        return [_FRONT_END]

    def send(self, front_end: int, message: msgspec.Struct) -> None:
        assert isinstance(message, EngineCoreOutputs)
        self.last = message


class BenchEngine:
    """The parts of an engine and the requests of a workload.

    Settings that the workload does not name have their defaults, but the queue is unlimited.
    views: of the live view, if there is a subscriber.
    """

    def __init__(self, workload: SchedulerWorkload) -> None:
        """Raise ConfigError for a workload with invalid or unavailable settings."""
        config = ServeConfig(
            cache=CacheConfig(
                block_size=workload.block_size,
                num_gpu_blocks_override=workload.num_blocks,
                eviction_policy=workload.eviction_policy,
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=workload.max_num_seqs,
                max_num_batched_tokens=workload.max_num_batched_tokens,
                scheduling_policy=workload.scheduling_policy,
                scheduler_features=workload.scheduler_features,
                max_num_queued_reqs=0,
                max_num_queued_tokens=0,
            ),
        )
        validate(config)
        worker = WorkerReady(
            PROTOCOL_VERSION, EPOCH, 0, GEOMETRY, 0, NUM_TOKEN_IDS, _FINGERPRINT, "none"
        )
        plan = plan_pool([worker], config, workload.max_model_len)
        self.sent = KeptMessages()
        recorder = _start_trace(config, plan, worker) if workload.traced else None
        self.core = EngineCore(config, plan, worker, self.sent, EPOCH, recorder=recorder)
        self.views: list[EngineViewPublisher] = []
        if workload.watched:
            live_view = self.core.output_dispatcher.live_view
            live_view.watch(_FRONT_END, wanted=True)
            self.views.append(live_view)
        freeze_heap()
        self._requests = requests_of(workload)
        self._concurrency = workload.concurrency

    def offer(self) -> None:
        """Add requests up to the workload's concurrency."""
        scheduler, input_processor = self.core.scheduler, self.core.input_processor
        while scheduler.num_unfinished < self._concurrency:
            before = scheduler.num_unfinished
            input_processor.process_message(_FRONT_END, next(self._requests))
            assert scheduler.num_unfinished > before, "the engine refused a request"
        self.core.output_dispatcher.flush()


def _start_trace(config: ServeConfig, plan: PoolPlan, worker: WorkerReady) -> TraceRecorder:
    """Trace to a file that is unlinked at once."""
    scheduler = scheduler_settings(config, worker)
    with tempfile.TemporaryDirectory() as folder:
        trace = TraceConfig(sched_trace=str(Path(folder) / "trace.jsonl"))
        started = start_trace(trace, scheduler, plan, worker, EPOCH, True)
    assert started is not None
    return started[1]


# How long the halves of a step take, and its three messages.
#
# offer ▸ schedule() ▸ SchedulerOutput ▸ null worker ▸ ModelRunnerOutput ▸ update ▸ outputs
#         measured     measured                         measured           measured  measured
#
# CPU time of the thread, so other load on the core does not count.


STEPS_A_VIEW: Final = 16


@dataclass
class Samples:
    """One entry for each step that counts; microseconds, bytes and numbers of requests."""

    schedule: list[float] = field(default_factory=list)
    update: list[float] = field(default_factory=list)
    encode: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    wire_bytes: list[float] = field(default_factory=list)
    view: list[float] = field(default_factory=list)
    num_scheduled: list[int] = field(default_factory=list)
    num_preempted: list[int] = field(default_factory=list)


def time_steps(workload: SchedulerWorkload) -> SchedulerTimings:
    """Play a workload: warm up, then measure."""
    player = StepPlayer(workload)
    for _ in range(workload.warm_up_steps):
        player.step(Samples())
    samples = Samples()
    for _ in range(workload.measured_steps):
        player.step(samples)
    counted = samples.num_scheduled
    return SchedulerTimings(
        workload=workload.name,
        num_steps=len(counted),
        num_scheduled=sum(counted) / max(1, len(counted)),
        num_preempted=sum(samples.num_preempted) / max(1, len(counted)),
        schedule=timing(samples.schedule),
        update=timing(samples.update),
        encode=timing(samples.encode),
        decode=timing(samples.decode),
        wire_bytes=timing(samples.wire_bytes),
        view=timing(samples.view),
    )


class StepPlayer:
    """Steps an engine without a worker."""

    def __init__(self, workload: SchedulerWorkload) -> None:
        self._engine = BenchEngine(workload)
        self._worker = FakeWorker()
        self._views = self._engine.views
        self._num_steps = 0
        self._only_preempting = workload.measure == "preempting steps"
        self._step_decoder = MessageDecoder[SchedulerOutput](SchedulerOutput)
        self._result_decoder = MessageDecoder[ModelRunnerOutput](ModelRunnerOutput)
        self._outputs_decoder = MessageDecoder[EngineCoreOutputs](EngineCoreOutputs)

    def step(self, samples: Samples) -> None:
        """Run one step; append its figures to `samples` if it counts."""
        core = self._engine.core
        self._engine.offer()
        start = thread_time_ns()
        output = core.scheduler.schedule()
        scheduled = thread_time_ns()

        answer = self._worker.answer(output)
        encode_start = thread_time_ns()
        step_frame, result_frame = encode(output), encode(answer)
        encoded = thread_time_ns()
        self._step_decoder.decode(step_frame)
        result = self._result_decoder.decode(result_frame)
        decoded = thread_time_ns()

        update_start = thread_time_ns()
        core.output_dispatcher.add_outputs(core.scheduler.update_from_output(output, result))
        core.output_dispatcher.flush()
        updated = thread_time_ns()

        outputs_start = thread_time_ns()
        outputs_frame = encode(self._engine.sent.last)
        outputs_encoded = thread_time_ns()
        self._outputs_decoder.decode(outputs_frame)
        outputs_decoded = thread_time_ns()

        self._show(samples)
        if self._only_preempting and not output.preempted_seq_ids:
            return
        samples.schedule.append((scheduled - start) / 1e3)
        samples.update.append((updated - update_start) / 1e3)
        samples.encode.append((encoded - encode_start + outputs_encoded - outputs_start) / 1e3)
        samples.decode.append((decoded - encoded + outputs_decoded - outputs_encoded) / 1e3)
        samples.wire_bytes.append(len(step_frame) + len(result_frame) + len(outputs_frame))
        samples.num_scheduled.append(len(answer.seq_ids))
        samples.num_preempted.append(len(output.preempted_seq_ids))

    def _show(self, samples: Samples) -> None:
        """Make a live view if there is a subscriber, about as often as on a CPU."""
        self._num_steps += 1
        for views in self._views if self._num_steps % STEPS_A_VIEW == 0 else ():
            start = thread_time_ns()
            encode(views.make_view(0.0))
            samples.view.append((thread_time_ns() - start) / 1e3)


# How long the block hashes of a prompt take.


def time_hashing(workload: SchedulerWorkload) -> SchedulerTimings:
    """Hash the prompt of the first request `measured_steps` times."""
    hasher = BlockHasher(workload.block_size, _FINGERPRINT)
    tokens = prompt_of(workload.requests[0])
    samples = []
    for _ in range(workload.warm_up_steps + workload.measured_steps):
        started = thread_time_ns()
        hasher.extend([], tokens)
        samples.append((thread_time_ns() - started) / 1e3)
    counted = samples[workload.warm_up_steps :]
    return SchedulerTimings(workload=workload.name, num_steps=len(counted), hash=timing(counted))


def play(workload: SchedulerWorkload) -> SchedulerTimings:
    """Measure one workload in a new engine."""
    from tests.benchmarks.scheduler_program import time_hashing, time_steps

    if workload.measure == "hashing":
        return time_hashing(workload)
    return time_steps(workload)


def main() -> None:
    """Run workloads until EOF, with the compiled modules of the engine."""
    for line in sys.stdin.buffer:
        timings = play(from_json(line, SchedulerWorkload))
        gc.unfreeze()
        gc.collect()  # frees the last engine, so that the next one has a clean heap
        sys.stdout.buffer.write(to_json_line(timings))
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
