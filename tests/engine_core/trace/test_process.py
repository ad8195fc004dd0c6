"""The engine process with `--sched-trace`: its file, from the first line to the last."""

import stat

from proto.messages.engine_io import Abort, EngineCoreOutputs
from proto.messages.lifecycle import CacheReady, Fatal, InitializeCache
from proto.messages.sched_trace import Finish, TraceEnd
from proto.runtime.sockets import Poller
from proto.settings.config import SchedulerConfig, TraceConfig
from tests.benchmarks.simulator.follow import Follower
from tests.benchmarks.simulator.recording import read
from tests.fakes.engine_process import EPOCH, TIMEOUT_SECONDS


def test_what_the_engine_decided_is_in_its_file_and_is_decided_again(start, tmp_path) -> None:
    path = tmp_path / "run.jsonl"
    engine = start(
        trace=TraceConfig(sched_trace=str(path)),
        scheduler=SchedulerConfig(max_num_batched_tokens=32, max_num_seqs=2),
    )
    engine.start()
    (front_end,) = engine.front_ends
    for request_id in range(4):
        front_end.send(engine.request(request_id, [9] * 40 + [request_id], 6, n=2))
    front_end.send(Abort(EPOCH, 2, "disconnect"))
    _serve_until_over(engine, 6)
    assert engine.shutdown() == 0
    own = tmp_path / f"run.{EPOCH}.jsonl"
    assert stat.S_IMODE(own.stat().st_mode) == 0o600
    recording = read(str(own))
    assert recording.header.epoch == EPOCH
    assert recording.header.num_blocks == 100
    assert recording.header.scheduler.max_num_seqs == 2
    assert recording.lines[-1] == TraceEnd(reason="shutdown")
    assert len(recording.sequences) == 8
    reasons = [each.reason for each in recording.lines if isinstance(each, Finish)]
    assert reasons.count("abort") == 2
    verdict = Follower(recording).run()
    assert verdict.difference == ""
    assert verdict.num_admitted >= 6


def _serve_until_over(engine, number) -> None:
    """Answer all steps until this many choices have had their final output."""
    (front_end,) = engine.front_ends
    while number:
        assert Poller([engine.worker, front_end]).wait(TIMEOUT_SECONDS)
        for step in engine.worker.receive():
            engine.worker.send(engine.runner.execute(step))
        for message in front_end.receive():
            outputs = message.outputs if isinstance(message, EngineCoreOutputs) else ()
            number -= sum(each.finish_reason is not None for each in outputs)


def test_a_file_that_cannot_be_written_ends_the_start(start, tmp_path) -> None:
    engine = start(trace=TraceConfig(sched_trace=str(tmp_path / "nowhere" / "run.jsonl")))
    engine.worker.send(engine.worker_ready())
    engine.expect(engine.worker, InitializeCache)
    engine.worker.send(CacheReady(EPOCH, 0))
    fatal = engine.expect(engine.supervisor, Fatal)
    assert "--sched-trace" in fatal.error.message
