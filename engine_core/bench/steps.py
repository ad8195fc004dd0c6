"""How long the halves of a step take, and its three messages.

offer ▸ schedule() ▸ SchedulerOutput ▸ fake worker ▸ ModelRunnerOutput ▸ update ▸ EngineCoreOutputs
        measured     measured                         measured           measured  measured

CPU time of the thread: whoever else wants the core does not count.
"""

from dataclasses import dataclass, field
from time import thread_time_ns
from typing import Final

from engine_core.bench.engine import BenchEngine
from engine_core.bench.fake_worker import FakeWorker
from engine_core.bench.summary import timing
from proto.benchmark import SchedulerTimings, SchedulerWorkload
from proto.codec import MessageDecoder, encode
from proto.engine_io import EngineCoreOutputs
from proto.model_runner_output import ModelRunnerOutput
from proto.scheduler_output import SchedulerOutput

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
    """Steps an engine whose worker is not there."""

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
        """One step; its figures are appended to `samples` if it is one that counts."""
        parts = self._engine.parts
        self._engine.offer()
        start = thread_time_ns()
        output = parts.scheduler.schedule()
        scheduled = thread_time_ns()

        answer = self._worker.answer(output)
        encode_start = thread_time_ns()
        step_frame, result_frame = encode(output), encode(answer)
        encoded = thread_time_ns()
        self._step_decoder.decode(step_frame)
        result = self._result_decoder.decode(result_frame)
        decoded = thread_time_ns()

        update_start = thread_time_ns()
        parts.outbox.add_step(parts.scheduler.update_from_output(output, result))
        parts.outbox.flush()
        updated = thread_time_ns()

        outputs_start = thread_time_ns()
        outputs_frame = encode(self._engine.sent.last)
        outputs_encoded = thread_time_ns()
        self._outputs_decoder.decode(outputs_frame)
        outputs_decoded = thread_time_ns()

        self._show(samples)
        if self._only_preempting and not output.preempted_handles:
            return
        samples.schedule.append((scheduled - start) / 1e3)
        samples.update.append((updated - update_start) / 1e3)
        samples.encode.append((encoded - encode_start + outputs_encoded - outputs_start) / 1e3)
        samples.decode.append((decoded - encoded + outputs_decoded - outputs_encoded) / 1e3)
        samples.wire_bytes.append(len(step_frame) + len(result_frame) + len(outputs_frame))
        samples.num_scheduled.append(len(answer.handles))
        samples.num_preempted.append(len(output.preempted_handles))

    def _show(self, samples: Samples) -> None:
        """Make a view if somebody watches, about as often as steps of a CPU have one."""
        self._num_steps += 1
        for views in self._views if self._num_steps % STEPS_A_VIEW == 0 else ():
            start = thread_time_ns()
            encode(views.make(0.0))
            samples.view.append((thread_time_ns() - start) / 1e3)
