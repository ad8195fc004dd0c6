"""Profiles of an engine process and its workers."""

from collections.abc import Callable
from pathlib import Path

import pytest

from proto.messages.engine_io import AdminCall, AdminName, AdminReply
from proto.messages.lifecycle import (
    CacheReady,
    EngineAlive,
    EngineReady,
    InitializeCache,
    NewFrontEnd,
    Ping,
)
from proto.messages.profiler import ProfileCall, ProfileReply
from proto.runtime.sockets import Link
from proto.settings.config import ParallelConfig, TraceConfig
from tests.fakes.engine_process import EPOCH, EngineProcess
from tests.fakes.lifecycle_messages import profiler_config


class Scene:
    """An engine with two ranks."""

    def __init__(self, start: Callable[..., EngineProcess], folder: Path) -> None:
        self.engine = start(
            trace=TraceConfig(profiler_config=profiler_config(folder)),
            parallel=ParallelConfig(tensor_parallel_size=2),
        )
        self.ranks = [self.engine.worker, self.engine.add_worker(1)]
        for rank, link in enumerate(self.ranks):
            link.send(self.engine.worker_ready(rank=rank))
        for rank, link in enumerate(self.ranks):
            self.engine.expect(link, InitializeCache)
            link.send(CacheReady(EPOCH, rank))
        self.engine.expect(self.engine.supervisor, EngineReady)
        (self.front_end,) = self.engine.front_ends
        self.call_id = 0

    def call(self, name: AdminName) -> None:
        self.call_id += 1
        self.front_end.send(AdminCall(EPOCH, self.call_id, name))

    def answer(self, action: str, *errors: str) -> None:
        """Answer the next call as all ranks; errors: of each."""
        for rank, link in enumerate(self.ranks):
            message = self.engine.expect(link, ProfileCall)
            assert message.action == action
            error = errors[rank] if errors else ""
            path = f"/rank{rank}" if action == "stop" and not error else ""
            link.send(ProfileReply(EPOCH, rank, message.number, path, error))

    def reply(self) -> AdminReply:
        reply = self.engine.expect(self.front_end, AdminReply)
        assert reply.call_id == self.call_id
        return reply

    def refusal(self, name: AdminName) -> str:
        self.call(name)
        reply = self.reply()
        assert (reply.ok, reply.value) == (False, 0)
        return reply.detail


@pytest.fixture
def scene(start: Callable[..., EngineProcess], tmp_path: Path) -> Scene:
    return Scene(start, tmp_path)


def test_a_profile_begins_and_ends_when_all_ranks_have_answered(
    scene: Scene, tmp_path: Path
) -> None:
    assert scene.refusal("stop_profile") == "no profile is running"
    scene.call("start_profile")
    assert scene.refusal("start_profile") == "a profile is being started or stopped"
    assert scene.refusal("stop_profile") == "a profile is being started or stopped"
    scene.engine.supervisor.send(Ping())
    assert scene.engine.expect(scene.engine.supervisor, EngineAlive).awaits == (0, 1)
    scene.call_id = 2
    scene.answer("start")
    assert scene.reply().ok
    assert "end it with POST /stop_profile" in scene.refusal("start_profile")
    scene.call("stop_profile")
    scene.answer("stop")
    reply = scene.reply()
    assert reply.ok
    *own, first, second = reply.detail.splitlines()
    assert (first, second) == ("/rank0", "/rank1")
    assert sorted(own) == sorted(map(str, tmp_path.iterdir()))
    assert any("BusyLoop.run_until_shutdown" in Path(path).read_text() for path in own)
    assert scene.refusal("stop_profile") == "no profile is running"


def test_a_rank_that_fails_is_named(scene: Scene) -> None:
    """If it is at the start, the others drop their profiles."""
    scene.call("start_profile")
    scene.answer("start", "", "no counters")
    reply = scene.reply()
    assert (reply.ok, reply.detail, reply.value) == (False, "worker 1: no counters", 1)
    scene.answer("discard")
    assert scene.refusal("stop_profile") == "no profile is running"
    scene.call("start_profile")
    scene.answer("start")
    assert scene.reply().ok
    scene.call("stop_profile")
    scene.answer("stop", "disk full", "")
    reply = scene.reply()
    assert not reply.ok
    assert reply.detail.startswith("worker 0: disk full; written: ")
    assert reply.detail.endswith(", /rank1")


@pytest.mark.parametrize("action", ["start", "run", "stop"])
def test_a_profile_ends_with_its_workers(scene: Scene, action: str) -> None:
    scene.call("start_profile")
    if action != "start":
        scene.answer("start")
        assert scene.reply().ok
    if action == "stop":
        scene.call("stop_profile")
        scene.engine.expect(scene.ranks[0], ProfileCall)
    scene.engine.restart_workers(EPOCH + 1)
    if action == "run":
        scene.call("stop_profile")
    reply = scene.reply()
    assert not reply.ok
    assert reply.value == 1
    assert "the workers were restarted, and their traces are lost" in reply.detail
    assert "being started" in scene.refusal("start_profile")


def test_a_front_end_that_died_gets_no_reply(scene: Scene) -> None:
    """Its successor counts its calls from the start."""
    scene.call("start_profile")
    scene.engine.expect(scene.ranks[0], ProfileCall)
    successor: Link = scene.engine.add_front_end(0, 1)
    scene.engine.supervisor.send(NewFrontEnd(0, 1))
    scene.engine.expect(successor, EngineReady)
    for rank, link in enumerate(scene.ranks):
        link.send(ProfileReply(EPOCH, rank, 1, error="no counters"))
    scene.engine.expect(scene.ranks[0], ProfileCall, lambda each: each.action == "discard")
    successor.send(AdminCall(EPOCH, 1, "get_num_unfinished"))
    scene.front_end, scene.call_id = successor, 1
    assert scene.reply().ok


def test_without_the_setting_calls_are_refused(start: Callable[..., EngineProcess]) -> None:
    engine = start()
    engine.start()
    engine.front_ends[0].send(AdminCall(EPOCH, 1, "start_profile"))
    reply = engine.expect(engine.front_ends[0], AdminReply)
    assert (reply.ok, reply.detail) == (False, "--profiler-config is not set")
