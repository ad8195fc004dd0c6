"""The engine process during a step that does not end."""

import time
from collections.abc import Iterator

import pytest

from proto.messages.engine_io import EngineCoreOutputs
from proto.messages.scheduler_output import SchedulerOutput
from proto.settings.config import SchedulerConfig, ServeConfig
from tests.fakes.engine_process import EngineProcess


@pytest.fixture
def engine() -> Iterator[EngineProcess]:
    """A short path for sockets; tmp_path is too long."""
    config = ServeConfig(scheduler=SchedulerConfig(max_num_seqs=1, max_num_queued_reqs=2))
    process = EngineProcess("/tmp", config=config)
    process.start()
    yield process
    process.close()


def test_refusals_and_ends_do_not_wait_for_the_step(engine: EngineProcess) -> None:
    (front_end,) = engine.front_ends
    now = time.monotonic()
    front_end.send(engine.request(1, [1, 2, 3], 5, deadline=now + 2.0))
    step = engine.expect(engine.worker, SchedulerOutput)
    front_end.send(engine.request(2, [1, 2, 3], 5, queue_deadline=now + 1.0))
    for request_id in (3, 4):
        front_end.send(engine.request(request_id, [1, 2, 3], 5))
    for request_id, kind in ((4, "queue_full"), (2, "queue_timeout"), (1, "time_limit")):
        message = engine.expect(front_end, EngineCoreOutputs, lambda each: each.outputs)
        (output,) = message.outputs
        assert output.error is not None
        assert (output.request_id, output.error.kind) == (request_id, kind)
    engine.worker.send(engine.runner.execute(step))
    num_tokens = 0
    while num_tokens < 5:
        engine.run_step()
        message = engine.expect(front_end, EngineCoreOutputs, lambda each: each.outputs)
        (output,) = message.outputs
        assert output.request_id == 3
        num_tokens += len(output.new_token_ids)
    assert engine.shutdown() == 0
