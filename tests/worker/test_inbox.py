"""Grammar masks arrive separately from steps, and a step waits for its own."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from proto import PROTOCOL_VERSION
from proto.messages.lifecycle import CacheReady, InitializeCache, NewEngine, Shutdown, WorkerReady
from proto.messages.model_runner_output import ModelRunnerOutput
from proto.messages.sampling_params import SamplingParams
from proto.messages.scheduler_output import (
    CachedRequestData,
    GrammarOutput,
    NewRequestData,
    SchedulerOutput,
)
from proto.runtime.sockets import Link, Poller
from tests.worker.test_service import LIMIT_SECONDS, Running
from worker.worker import FromEngine, Inbox

ONLY = 7
"""The token that the masks here allow."""


def step(number: int, epoch: int = 1, *, known: bool = False) -> SchedulerOutput:
    """A step that starts or continues a constrained sequence of two tokens."""
    new = NewRequestData(
        seq_id=3,
        prompt_token_ids=[1, 2],
        output_token_ids=[],
        sampling_params=SamplingParams(max_tokens=5, temperature=0.0),
        seed=0,
        choice=0,
        block_ids=[[1]],
        num_computed_tokens=0,
        num_scheduled_tokens=2,
    )
    cached = CachedRequestData([3], [number], [1], [None])
    return SchedulerOutput(
        epoch=epoch,
        step=number,
        new_requests=[] if known else [new],
        cached_requests=cached if known else CachedRequestData(),
        total_num_scheduled_tokens=1 if known else 2,
        finished_seq_ids=[],
        preempted_seq_ids=[],
        constrained_seq_ids=[3],
    )


def masks(number: int, vocab_size: int, epoch: int = 1) -> GrammarOutput:
    words = np.zeros(-(-vocab_size // 32), dtype="<u4")
    words[ONLY // 32] = 1 << ONLY % 32
    return GrammarOutput(epoch, number, [3], words.tobytes())


def test_steps_keep_their_order_and_masks_are_matched_by_step():
    inbox = Inbox()
    inbox.add_messages([step(1), step(2, known=True), masks(1, 40)])
    assert [inbox.pop_message().step, inbox.pop_message().step] == [1, 2]
    assert inbox.pop_message() is None
    assert inbox.pop_grammars(2) is None
    assert inbox.pop_grammars(1).step == 1
    assert inbox.pop_grammars(1) is None
    inbox.add_messages([masks(2, 40), masks(3, 40)])
    assert inbox.pop_grammars(2) is None  # masks of a step without constrained rows
    assert inbox.pop_grammars(3).step == 3


class Engine:
    """The engine's link to a worker with a tiny model."""

    def __init__(self, running: Running, run_dir: str, epoch: int) -> None:
        received = WorkerReady | CacheReady | ModelRunnerOutput
        self.link = Link.bind(f"{run_dir}/e{epoch}", received)
        running.links.append(self.link)
        self._links = running.links
        self.epoch = epoch

    def start(self) -> int:
        """Initialise the worker; returns its vocabulary size."""
        ready = self.expect(WorkerReady)
        self.link.send(InitializeCache(PROTOCOL_VERSION, self.epoch, 8, 16, 32))
        self.expect(CacheReady)
        return ready.vocab_size

    def expect(self, kind: type) -> Any:
        poller = Poller(self._links)
        while True:
            for each in self.link.receive():
                assert isinstance(each, kind), each
                return each
            assert poller.wait(LIMIT_SECONDS), f"no {kind.__name__}"


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with tempfile.TemporaryDirectory(prefix="t-") as run_dir:
        monkeypatch.setattr(
            Running,
            "_connect_engine",
            lambda self, epoch: Link.connect(f"{run_dir}/e{epoch}", FromEngine),
        )
        running = Running(tmp_path, run_dir)
        yield running, run_dir
        for link in running.links:
            link.close()


def test_a_step_waits_for_its_masks_even_if_the_next_step_arrives_first(pair):
    running, run_dir = pair
    engine = Engine(running, run_dir, 1)
    vocab_size = engine.start()
    engine.link.send(step(1))
    engine.link.send(step(2, known=True))
    engine.link.send(masks(1, vocab_size))
    first = engine.expect(ModelRunnerOutput)
    assert (first.step, first.sampled_token_ids) == (1, [[ONLY]])
    engine.link.send(masks(2, vocab_size))
    second = engine.expect(ModelRunnerOutput)
    assert (second.step, second.sampled_token_ids) == (2, [[ONLY]])
    running.supervisor.send(Shutdown())
    running.thread.join(LIMIT_SECONDS)
    assert not running.thread.is_alive()


def test_a_worker_waiting_for_masks_handles_a_new_engine_and_shutdown(pair):
    running, run_dir = pair
    first = Engine(running, run_dir, 1)
    first.start()
    first.link.send(step(1))
    second = Engine(running, run_dir, 2)
    running.supervisor.send(NewEngine(2, 2))
    vocab_size = second.start()
    second.link.send(step(1, 2))
    second.link.send(masks(1, vocab_size, 2))
    assert second.expect(ModelRunnerOutput).sampled_token_ids == [[ONLY]]
    second.link.send(step(2, 2, known=True))
    running.supervisor.send(Shutdown())
    running.thread.join(LIMIT_SECONDS)
    assert not running.thread.is_alive()
    assert running.errors == []
