"""The loop itself, with an executor and a service that are scripts."""

from collections import deque

import pytest

from engine_core.executor.base import WorkerFailedError
from engine_core.stepper import SynchronousStepper
from proto.model_runner_output import ModelRunnerOutput
from tests.fakes.engine_harness import EngineHarness
from tests.fakes.paged_runner import undisturbed


class InlineExecutor:
    """Computes a step when it is submitted."""

    def __init__(self, runner):
        self.runner = runner
        self.results = deque()
        self.submitted = []

    def submit(self, output):
        self.submitted.append(output)
        self.results.append(self.runner.execute(output))

    def receive(self):
        results = list(self.results)
        self.results.clear()
        return results


class ScriptedService:
    """Runs an action at each wait; waits that nothing will end stop the engine."""

    def __init__(self, actions=()):
        self.actions = deque(actions)
        self.stopped = False
        self.published = []
        self.waits = []

    def serve(self, timeout_seconds=None):
        self.waits.append(timeout_seconds)
        if self.actions:
            self.actions.popleft()(self)
            return True
        if self.executor.results:
            return True
        if timeout_seconds is None:
            self.stopped = True
        return False

    def publish(self, outputs):
        self.published += [each for client in outputs.values() for each in client]


class Loop:
    def __init__(self, actions=(), check=lambda: None):
        self.engine = EngineHarness()
        self.executor = InlineExecutor(self.engine.runner)
        self.service = ScriptedService(actions)
        self.service.executor = self.executor
        self.stepper = SynchronousStepper(self.engine.scheduler, self.executor, self.service, check)


def test_it_steps_until_nothing_is_left_and_checks_its_books_once():
    checks = []
    loop = Loop(check=lambda: checks.append(1))
    loop.engine.add_one([1, 2], max_tokens=3)
    loop.stepper.run()
    tokens = [token for each in loop.service.published for token in each.new_token_ids]
    assert tokens == undisturbed([1, 2], 3)
    assert checks == [1]
    assert loop.executor.submitted[-1].finished_handles
    loop.engine.assert_at_rest()


def test_it_rests_while_all_that_is_left_is_held_and_goes_on_when_it_is_let_go():
    def pause(service):
        loop.engine.scheduler.pause("finish_running")

    def resume(service):
        assert loop.engine.scheduler.num_unfinished == 1
        assert not loop.engine.scheduler.has_work
        assert service.waits[-1] is not None, "it waits for messages"
        loop.engine.scheduler.resume()

    loop = Loop([pause, lambda _: None, resume])
    loop.engine.add_one([1, 2], max_tokens=2)
    loop.stepper.run()
    tokens = [token for each in loop.service.published for token in each.new_token_ids]
    assert tokens == undisturbed([1, 2], 2)
    loop.engine.assert_at_rest()


def test_books_that_do_not_add_up_end_the_engine():
    def check():
        raise RuntimeError("lost block")

    loop = Loop(check=check)
    with pytest.raises(RuntimeError, match="lost block"):
        loop.stepper.run()


def test_it_stops_between_steps_without_starting_another():
    def stop(service):
        service.stopped = True

    loop = Loop([stop])
    loop.engine.add_one([1], max_tokens=3)
    loop.stepper.run()
    assert loop.executor.submitted == []


def test_it_stops_in_the_middle_of_a_step():
    def stop(service):
        service.stopped = True

    loop = Loop([lambda _: None, stop])
    loop.engine.add_one([1], max_tokens=3)
    loop.stepper.run()
    assert len(loop.executor.submitted) == 1
    assert loop.service.published == []


def test_an_answer_nobody_asked_for_names_the_worker():
    loop = Loop()
    loop.executor.results.append(ModelRunnerOutput(1, 99, [5], [[1]]))
    with pytest.raises(WorkerFailedError, match="worker 0"):
        loop.stepper.run()
