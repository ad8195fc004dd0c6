"""Engines that crash in turn because of one request: it ends, and the others continue.

The front end's own code counts crashes; engines crash before their first step if the request is
queued or running, and when they schedule it if it arrives later.
"""

from dataclasses import dataclass, field

import pytest

from api_server.engine.engine_client import OpenRequest
from engine_core.scheduler.features.crash_isolation import TRIALS
from proto.messages.engine_io import EngineCoreRequest, FinishReason, RequestProgress
from proto.messages.sampling_params import SamplingParams
from proto.settings.config import SchedulerConfig
from tests.fakes.engine_harness import EOS
from tests.fakes.gates import NoFeature
from tests.fakes.input_harness import InputProcessorHarness
from tests.fakes.paged_runner import undisturbed

CRASHES = SchedulerConfig().crashes_until_isolated
GUILTY = [1, 2, 3]


@dataclass
class Stream:
    request_id: int
    tokens: list[int] = field(default_factory=list)
    num_choices: int = 1
    finished_choices: tuple[int, ...] = ()

    @property
    def output_token_ids(self):
        return (tuple(self.tokens),)


class DeadlyGate(NoFeature):
    """Crashes the engine when it checks the poisonous request."""

    def is_blocked(self, candidate):
        if candidate.request.prompt_token_ids == GUILTY:
            raise EngineDiesError
        return False


class EngineDiesError(Exception):
    pass


class FrontEnd:
    """A front end that sends open requests to one engine after another and counts crashes."""

    def __init__(self, prompts):
        self.open = [
            OpenRequest(
                EngineCoreRequest(
                    epoch=1,
                    request_id=number,
                    prompt_token_ids=prompt,
                    sampling_params=SamplingParams(max_tokens=4, eos_token_ids=(EOS,)),
                    seed=0,
                    arrival_time=0.0,
                ),
                Stream(number),
            )
            for number, prompt in enumerate(prompts)
        ]
        self.errors = {}

    def report_begun(self, request, alone):
        entry = self.open[request.request_id]
        entry.alone = entry.alone or alone
        entry.record_progress(RequestProgress(request.request_id, 0, 0))

    def meet(self, epoch):
        """Start an engine and send it all open requests."""
        harness = InputProcessorHarness(gates=[DeadlyGate()])
        harness.engine.report_begun = self.report_begun
        for entry in sorted(self.unfinished, key=lambda each: -each.crash_count):
            entry.sent_to = epoch
            harness.receive(entry.message(epoch))
        for _, output in harness.outputs.outputs:
            assert output.finish_reason is FinishReason.ERROR
            self.errors[output.request_id] = output.error
        return harness.engine

    def hear(self, engine):
        """Process the outputs of a step."""
        for (number, _), tokens in engine.tokens.items():
            self.open[number].stream.tokens += tokens
        engine.tokens.clear()

    def lose(self):
        any_started = any(each.started for each in self.open)
        for each in self.unfinished:
            each.lose_engine(CRASHES, others_started=any_started)

    @property
    def unfinished(self):
        return [
            each
            for each in self.open
            if len(each.stream.tokens) < 4 and each.request.request_id not in self.errors
        ]


def step(engine):
    """An engine that crashes when the poisonous request is in its queue, or runs."""
    scheduler = engine.scheduler
    scheduler.crash_isolation.isolate_suspect()
    ready = [each for each in scheduler.waiting if not each.status.is_blocked]
    if any(each.prompt_token_ids == GUILTY for each in [*scheduler.running, *ready]):
        raise EngineDiesError
    engine.step()


@pytest.mark.parametrize("place", [0, 1, 2])
def test_only_the_request_that_crashes_engines_is_ended(place):
    prompts = [[5] * 20, [6]]
    prompts.insert(place, GUILTY)
    front_end = FrontEnd(prompts)
    num_deaths = 0
    for epoch in range(1, 12):
        engine = front_end.meet(epoch)
        try:
            while engine.scheduler.has_work:
                step(engine)
                front_end.hear(engine)
        except EngineDiesError:
            num_deaths += 1
            front_end.lose()
    assert num_deaths == CRASHES + TRIALS
    assert list(front_end.errors) == [place]
    assert f"crashed {num_deaths} times" in front_end.errors[place].message
    for entry in front_end.open:
        if entry.request.request_id != place:
            prompt = entry.request.prompt_token_ids
            assert entry.stream.tokens == undisturbed(list(prompt), 4)
