"""Adapters by name in an engine: calls, contents, loads by workers, new workers and engines."""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace as changed

from engine_core.adapters import CALL_SECONDS, MAX_CRASHES, AdapterRegistry
from engine_core.request import Request
from proto.errors import ConfigError, ErrorInfo, InvalidRequestError, UnknownModelError
from proto.messages.engine_io import FinishReason
from proto.messages.lora import (
    AdapterCall,
    AdapterCard,
    AdapterList,
    AdapterLoaded,
    AdapterReply,
    LoRARequest,
)
from proto.settings.config import LoRAConfig
from proto.settings.lora_modules import LoRAModule
from tests.fakes.clock import FakeClock
from tests.fakes.engine_harness import EngineHarness
from tests.fakes.lora import digest_of


class FakeWorkers:
    """Workers whose files are in `files`: content by path. An answer is given by `answer`."""

    def __init__(self, num_ranks: int = 1) -> None:
        self.num_ranks = num_ranks
        self.is_ready = True
        self.files: dict[str, bytes] = {}
        self.sent: list[tuple[str, int]] = []
        self.asked: list[tuple[int, str, bytes]] = []
        self.held: dict[int, bytes] = {}
        self.effect = 0.5
        self.changes_images = False
        self._answers: list[list[AdapterLoaded]] = []

    def load_adapter(self, lora_int_id: int, path: str, digest: bytes) -> None:
        self.sent.append(("load", lora_int_id))
        self.asked.append((lora_int_id, path, digest))

    def drop_adapter(self, lora_int_id: int) -> None:
        self.sent.append(("drop", lora_int_id))
        self.held.pop(lora_int_id, None)
        self.asked = [asked for asked in self.asked if asked[0] != lora_int_id]

    def pop_loaded_adapters(self) -> list[list[AdapterLoaded]]:
        answers, self._answers = self._answers, []
        return answers

    def answer(self, **changes: Any) -> None:
        """Answer the oldest load."""
        lora_int_id, path, _ = self.asked.pop(0)
        error = None
        if path not in self.files:
            error = ErrorInfo("invalid_request", f"{path} has no adapter", "lora_path")
        else:
            self.held[lora_int_id] = self.files[path]
        answers = [
            AdapterLoaded(
                **{
                    "epoch": 1,
                    "rank": rank,
                    "lora_int_id": lora_int_id,
                    "digest": digest_of(self.files.get(path, b"")),
                    "lora_rank": 8,
                    "num_bytes": 1000,
                    "effect": self.effect,
                    "changes_images": self.changes_images,
                    "error": error,
                    **changes,
                }
            )
            for rank in range(self.num_ranks)
        ]
        self._answers.append(answers)


class FakeLinks:
    """What front ends and the supervisor are sent."""

    def __init__(self) -> None:
        self.replies: list[tuple[int, AdapterReply]] = []
        self.sent: list[AdapterList] = []
        self.cards: dict[str, AdapterCard] = {}
        self.supervisor: list[Any] = []

    def send_adapters(self, message: AdapterList) -> None:
        self.sent.append(message)
        message.apply_to(self.cards)

    def send(self, *message: Any) -> None:
        if len(message) == 1:
            self.supervisor.append(message[0])
        else:
            self.replies.append((message[0], message[1]))

    def pop_reply(self) -> tuple[int, str]:
        ((_, reply),) = self.replies
        self.replies.clear()
        return reply.status, reply.message

    @property
    def names(self) -> list[str]:
        return list(self.cards)


class Scene:
    """An engine's scheduler and registry, with fake workers and links."""

    def __init__(
        self, adapters: tuple[AdapterCard, ...] = (), num_ranks: int = 1, **settings: Any
    ) -> None:
        self.engine = EngineHarness(lora=LoRAConfig(enable_lora=True, **settings))
        self.engine.adapters = None  # the registry answers for the workers here
        self.workers = FakeWorkers(num_ranks)
        self.links = FakeLinks()
        self.clock = FakeClock()
        links: Any = self.links
        workers: Any = self.workers
        self.registry = AdapterRegistry(
            self.engine.scheduler, workers, links, links, 1, adapters, self.clock
        )
        self.num_calls = 0

    def call(self, action: Any, name: str, path: str = "", **fields: Any) -> None:
        self.num_calls += 1
        call = AdapterCall(1, self.num_calls, action, name, path, **fields)
        self.registry.begin_call(0, call)
        self.exchange()

    def exchange(self) -> None:
        self.engine.record_outputs(self.registry.exchange())

    def load(self, name: str, content: bytes = b"a", **fields: Any) -> tuple[int, str]:
        """Load an adapter from a file of its content; return status and text of the reply."""
        path = f"/{name}"
        self.workers.files[path] = content
        self.call("load", name, path, **fields)
        while self.workers.asked:
            self.workers.answer()
            self.exchange()
        return self.links.pop_reply()

    def lora(self, name: str) -> LoRARequest:
        return self.links.cards[name].lora

    def add(self, lora: LoRARequest, *, accepted: bool = False, max_tokens: int = 3) -> Request:
        found = self.registry.find(lora, accepted=accepted)
        return self.engine.add_one([1, 2], max_tokens, lora_request=found)

    def step(self, *, answers: bool = True) -> None:
        self.engine.step()
        self.exchange()
        while answers and self.workers.asked:
            self.workers.answer()
            self.exchange()

    def fail_corrupted(self, request: Request) -> None:
        """Answer a step with logits of a request that are not finite."""
        output = self.engine.scheduler.schedule()
        result = self.engine.runner.execute(output)
        result = changed(result, failed_seq_ids=[request.seq_id], sampled_token_ids=[[]])
        self.engine.record_outputs(self.engine.scheduler.update_from_output(output, result))

    def corrupted(self) -> dict[str, int]:
        gate = self.engine.scheduler.adapters
        assert gate is not None
        return gate.usage(1).num_corrupted

    def run(self, *requests: Request) -> None:
        for _ in range(100):
            if all(self.engine.finish_reason_of(each) is not None for each in requests):
                return
            self.step()
        raise AssertionError("some requests never ended")


def error_of(scene: Scene, request: Request) -> ErrorInfo:
    error = scene.engine.outputs[request.request_id, 0][-1].error
    assert error is not None
    return error


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_a_loaded_name_is_listed_and_served(scene: Scene) -> None:
    assert scene.load("a") == (200, "Success: LoRA adapter 'a' added successfully.")
    (card,) = scene.links.cards.values()
    assert (card.rank, card.num_bytes, card.lora.digest) == (8, 1000, digest_of(b"a"))
    assert scene.links.supervisor == scene.links.sent
    request = scene.add(scene.lora("a"))
    scene.run(request)
    assert scene.workers.sent == [("load", 1)]


def test_a_taken_name_is_refused_unless_it_is_loaded_in_place(scene: Scene) -> None:
    scene.load("a")
    status, text = scene.load("a", b"b")
    assert (status, "already been loaded" in text) == (400, True)
    assert scene.lora("a").digest == digest_of(b"a")
    assert scene.load("a", b"b", load_inplace=True)[0] == 200
    assert scene.lora("a").digest == digest_of(b"b")
    assert scene.links.names == ["a"]


def test_names_of_equal_content_share_it(scene: Scene) -> None:
    scene.load("a")
    scene.load("b", b"a")
    assert scene.lora("a").lora_int_id == scene.lora("b").lora_int_id
    assert list(scene.workers.held) == [scene.lora("a").lora_int_id]


def test_requests_finish_with_the_content_they_began_with(scene: Scene) -> None:
    scene.load("a")
    old = scene.lora("a")
    request = scene.add(old, max_tokens=9)
    scene.step()
    assert scene.load("a", b"b", load_inplace=True)[0] == 200
    assert old.lora_int_id in scene.workers.held, "its requests still run"
    later = scene.add(old)  # sent before the front end heard of the reload
    assert later.lora_request == scene.lora("a")
    scene.run(request, later)
    scene.step()
    assert request.lora_request == old
    assert list(scene.workers.held) == [scene.lora("a").lora_int_id]


def test_an_unloaded_name_ends_no_request_and_takes_no_new_one(scene: Scene) -> None:
    scene.load("a")
    lora = scene.lora("a")
    request = scene.add(lora, max_tokens=9)
    scene.step()
    scene.call("unload", "a")
    assert scene.links.pop_reply() == (200, "Success: LoRA adapter 'a' removed successfully.")
    assert scene.links.names == []
    with pytest.raises(UnknownModelError, match="unloaded"):
        scene.registry.find(lora, accepted=False)
    scene.run(request)
    scene.step()
    assert scene.workers.held == {}
    scene.call("unload", "a")
    assert scene.links.pop_reply() == (404, "The lora adapter 'a' cannot be found.")


def test_a_load_that_fails_is_answered_and_leaves_nothing(scene: Scene) -> None:
    scene.call("load", "a", "/nowhere")
    scene.workers.answer()
    scene.exchange()
    assert scene.links.pop_reply() == (400, "/nowhere has no adapter")
    assert scene.links.sent == []
    assert scene.load("a")[0] == 200


def test_loads_are_carried_out_one_after_the_other(scene: Scene) -> None:
    scene.workers.files = {"/a": b"a", "/b": b"b"}
    scene.call("load", "a", "/a")
    scene.call("load", "a", "/b")
    scene.call("load", "b", "/b")
    for _ in range(2):
        assert len(scene.workers.asked) == 1
        scene.workers.answer()
        scene.exchange()
    assert [reply.status for _, reply in scene.links.replies] == [200, 400, 200]


def test_an_adapter_without_effect_is_reported(scene: Scene) -> None:
    scene.workers.effect = 0.0
    status, text = scene.load("a")
    assert status == 200
    assert "exactly zero" in text
    assert any("exactly zero" in getattr(each, "message", "") for each in scene.links.supervisor)


def test_an_adapter_whose_numbers_become_nan_is_reported_once(scene: Scene) -> None:
    """By name, until the name gets another content."""
    for content in (b"a", b"b"):
        scene.load("a", content, load_inplace=True)
        scene.links.supervisor.clear()
        for number in (1, 2):
            request = scene.add(scene.lora("a"))
            scene.step()
            scene.fail_corrupted(request)
            scene.exchange()
            assert "the adapter a" in error_of(scene, request).message
            assert scene.corrupted() == {"a": number}
        notices = [each.message for each in scene.links.supervisor]
        assert notices == ["adapter a: the logits of a request contain NaN or infinity"]
    scene.call("unload", "a")
    assert scene.corrupted() == {}


def test_ranks_must_read_the_same() -> None:
    scene = Scene(num_ranks=2)
    assert scene.load("a")[0] == 200
    (card,) = scene.links.cards.values()
    assert card.num_bytes == 2000
    scene.workers.files["/b"] = b"b"
    scene.call("load", "b", "/b")
    lora_int_id, _, _ = scene.workers.asked.pop()
    scene.workers._answers = [
        [AdapterLoaded(1, rank, lora_int_id, digest_of(bytes([rank]))) for rank in range(2)]
    ]
    scene.exchange()
    assert scene.links.pop_reply() == (500, "the workers have read different adapters")


def test_files_that_have_changed_fail_the_requests_that_need_them(scene: Scene) -> None:
    """Only these: what other requests use is in the workers' memory."""
    scene.load("a")
    scene.load("b", b"b")
    scene.workers.held.clear()
    scene.registry.lose_workers()
    scene.engine.scheduler.begin_worker_epoch(2)
    scene.registry.begin_worker_epoch()
    scene.workers.files["/a"] = b"changed"
    bad, good = scene.add(scene.lora("a")), scene.add(scene.lora("b"))
    scene.run(bad, good)
    error = error_of(scene, bad)
    assert (error.kind, error.param) == ("invalid_request", "model")
    assert "load it again" in error.message
    assert scene.load("a", b"changed", load_inplace=True)[0] == 200
    again = scene.add(scene.lora("a"))
    scene.run(again)


def test_new_workers_load_what_requests_and_calls_need(scene: Scene) -> None:
    scene.load("a")
    request = scene.add(scene.lora("a"), max_tokens=9)
    scene.step()
    scene.workers.files["/b"] = b"b"
    scene.call("load", "b", "/b")
    scene.workers.asked.clear()
    scene.workers.held.clear()
    scene.registry.lose_workers()
    scene.engine.lose_workers()
    scene.registry.begin_worker_epoch()
    scene.run(request)
    assert scene.links.names == ["a", "b"]
    assert scene.links.pop_reply()[0] == 200
    assert sorted(scene.workers.held.values()) == [b"a", b"b"]


def test_an_adapter_that_crashes_the_workers_is_not_tried_for_ever(scene: Scene) -> None:
    scene.workers.files["/a"] = b"a"
    scene.call("load", "a", "/a")
    for epoch in range(2, 2 + MAX_CRASHES):
        assert len(scene.workers.asked) == 1, "it is tried again"
        scene.workers.asked.clear()
        scene.registry.lose_workers()
        scene.engine.lose_workers(epoch)
        scene.engine.record_outputs(scene.registry.begin_worker_epoch())
        scene.exchange()
    assert scene.workers.asked == []
    status, text = scene.links.pop_reply()
    assert (status, "died 3 times" in text) == (500, True)


def test_requests_of_an_adapter_that_crashes_the_workers_end(scene: Scene) -> None:
    scene.load("a")
    lora = scene.lora("a")
    scene.workers.held.clear()
    scene.registry.lose_workers()
    scene.engine.lose_workers()
    request, other = scene.add(lora), scene.engine.add_one([7], 30)
    for epoch in range(3, 3 + MAX_CRASHES):
        scene.step(answers=False)
        scene.workers.asked.clear()
        scene.registry.lose_workers()
        scene.engine.lose_workers(epoch)
        scene.engine.record_outputs(scene.registry.begin_worker_epoch())
    assert "died 3 times" in error_of(scene, request).message
    with pytest.raises(InvalidRequestError, match="not tried again"):
        scene.add(lora)
    scene.run(other)


def test_a_disk_that_does_not_answer_holds_back_no_later_call(scene: Scene) -> None:
    scene.workers.files = {"/a": b"a", "/b": b"b"}
    scene.call("load", "a", "/a")
    scene.call("load", "b", "/b")
    assert scene.registry.seconds_to_next_end == CALL_SECONDS
    scene.clock.now += CALL_SECONDS
    scene.exchange()
    assert scene.links.pop_reply()[0] == 500
    scene.exchange()
    scene.workers.answer()
    scene.exchange()
    assert scene.links.pop_reply() == (200, "Success: LoRA adapter 'b' added successfully.")
    assert list(scene.workers.held) == [2]


def test_a_disk_that_does_not_answer_ends_the_requests_that_wait_for_it(scene: Scene) -> None:
    """After a while, and no others; once the disk is back, the adapter is read again."""
    scene.load("a")
    scene.registry.lose_workers()
    scene.engine.lose_workers()
    scene.registry.begin_worker_epoch()
    scene.workers.held.clear()
    waiting, other = scene.add(scene.lora("a")), scene.engine.add_one([7], 3)
    scene.step(answers=False)
    assert scene.registry.seconds_to_next_end == CALL_SECONDS
    scene.clock.now += CALL_SECONDS
    scene.exchange()
    error = error_of(scene, waiting)
    assert (error.kind, error.param) == ("internal", "model")
    assert "could not be read within 300 s" in error.message
    assert scene.workers.sent[-2:] == [("load", 1), ("drop", 1)]
    assert scene.registry.seconds_to_next_end is None
    scene.run(other)
    assert scene.engine.finish_reason_of(other) is FinishReason.LENGTH
    again = scene.add(scene.lora("a"))
    scene.run(again)
    assert scene.engine.finish_reason_of(again) is FinishReason.LENGTH


def test_a_load_behind_one_that_is_given_up_has_its_whole_time() -> None:
    """Workers read one adapter after the other."""
    scene = Scene(max_loras=2)
    for name in "ab":
        scene.load(name, name.encode())
    scene.registry.lose_workers()
    scene.engine.lose_workers()
    scene.registry.begin_worker_epoch()
    scene.workers.held.clear()
    waiting = [scene.add(scene.lora(name)) for name in "ab"]
    scene.step(answers=False)
    assert scene.workers.sent[-2:] == [("load", 1), ("load", 2)]
    for request in waiting:
        assert scene.registry.seconds_to_next_end == CALL_SECONDS
        scene.clock.now += CALL_SECONDS
        scene.exchange()
        assert "could not be read within 300 s" in error_of(scene, request).message
    assert scene.registry.seconds_to_next_end is None


def test_an_adapter_that_was_dropped_while_it_was_read_gets_another_id(scene: Scene) -> None:
    """A worker may have answered before it heard of that, and dropped it after its answer."""
    scene.load("a")
    lora = scene.lora("a")
    scene.registry.lose_workers()
    scene.engine.lose_workers()
    scene.registry.begin_worker_epoch()
    scene.workers.held.clear()
    request = scene.add(lora)
    scene.step(answers=False)
    scene.call("unload", "a")
    scene.engine.scheduler.abort_request(request.request_id)
    scene.exchange()
    assert scene.workers.sent[-2:] == [("load", 1), ("drop", 1)]
    again = scene.add(lora, accepted=True)
    scene.run(again)
    assert scene.workers.sent[-1][1] == 2


def test_another_engine_has_the_names_and_finds_the_contents(scene: Scene) -> None:
    scene.load("a")
    scene.load("b", b"b")
    scene.call("unload", "b")
    unnamed = scene.lora("a")
    unloaded = LoRARequest(2, "b", "/b", digest_of(b"b"))
    successor = Scene(adapters=tuple(scene.links.cards.values()))
    successor.workers.files = scene.workers.files
    successor.registry.announce_adopted()
    assert successor.links.sent == [AdapterList(1, list(scene.links.cards.values()))]
    assert successor.workers.sent == [], "nothing is loaded before a request needs it"
    named, running = successor.add(unnamed), successor.add(unloaded, accepted=True)
    successor.run(named, running)
    assert sorted(successor.workers.held.values()) == [b"a"]
    successor.call("load", "a", "/a", resent=True)
    assert successor.links.pop_reply()[0] == 200, "the engine that died had carried it out"


def test_an_adapter_that_changes_images_is_known_as_one_by_all_engines(scene: Scene) -> None:
    """Also by an engine that learns of it with a request that another one has accepted."""
    scene.load("a")
    scene.workers.changes_images = True
    scene.load("b", b"b")
    assert [scene.lora(name).changes_images for name in "ab"] == [False, True]
    successors = [Scene(adapters=tuple(scene.links.cards.values())), Scene()]
    for engine, accepted in ((scene, False), (successors[0], False), (successors[1], True)):
        lora = changed(scene.lora("b"), scale=0.5)
        found = engine.registry.find(lora, accepted=accepted)
        assert (found.changes_images, found.scale, found.digest) == (True, 0.5, digest_of(b"b"))


def test_an_engine_takes_over_what_another_one_changes_meanwhile(scene: Scene) -> None:
    scene.load("a")
    scene.load("b", b"b")
    cards = list(scene.links.cards.values())
    scene.registry.adopt_names(cards[1:])
    scene.registry.announce_adopted()
    assert scene.links.names == ["b"]
    scene.exchange()
    assert list(scene.workers.held.values()) == [b"b"]


def test_a_front_end_that_died_gets_no_reply(scene: Scene) -> None:
    scene.workers.files["/a"] = b"a"
    scene.call("load", "a", "/a")
    scene.registry.forget_front_end(0)
    scene.workers.answer()
    scene.exchange()
    assert scene.links.replies == []
    assert scene.links.names == ["a"]


def test_one_adapter_may_apply_to_requests_that_name_none(scene: Scene) -> None:
    scene.load("a")
    scene.load("b", b"b")
    for name, scales in (("a", [0.5, 0.0]), ("b", [0.0, 0.5]), ("", [0.0, 0.0])):
        scene.call("default", name, scale=0.5)
        assert scene.links.pop_reply()[0] == 200
        assert [card.default_scale for card in scene.links.cards.values()] == scales
    scene.call("default", "c", scale=0.5)
    assert scene.links.pop_reply()[0] == 404
    assert [card.number for card in scene.links.cards.values()] == [0, 1]


def pump(scene: Scene) -> Callable[[], bool]:
    def receive() -> bool:
        scene.workers.answer()
        return True

    return receive


def test_adapters_at_the_start_are_loaded_before_the_engine_is_ready(scene: Scene) -> None:
    scene.workers.files = {"/a": b"a", "/b": b"b"}
    modules = [LoRAModule("a", "/a"), LoRAModule("b", "/b")]
    scene.registry.load_modules(modules, pump(scene))
    assert scene.links.names == ["a", "b"]
    with pytest.raises(ConfigError, match="--lora-modules c: /c has no adapter"):
        scene.registry.load_modules([LoRAModule("c", "/c")], pump(scene))
    scene.registry.load_modules([LoRAModule("d", "/a")], lambda: False)
    assert scene.links.names == ["a", "b"], "a shutdown ends the loading"


def test_the_live_view_shows_where_adapters_are() -> None:
    scene = Scene(max_loras=1, max_cpu_loras=1)
    scene.load("a")
    scene.load("b", b"b")
    request = scene.add(scene.lora("a"))
    scene.step(answers=False)
    shown = [(view.name, view.state, view.num_unfinished) for view in scene.registry.views()]
    assert shown == [("a", 1, 1)]
    scene.run(request)


def test_what_is_sent_grows_with_the_changes_and_not_with_the_names(scene: Scene) -> None:
    """To front ends and supervisor, though all names have the same content."""
    for number in range(100):
        assert scene.load(f"name-{number}", b"ab"[number % 2 :][:1])[0] == 200
    scene.call("default", "name-3", scale=0.5)
    scene.call("default", "name-4", scale=0.5)
    for number in range(99):
        scene.call("unload", f"name-{number}")
    sent = scene.links.sent
    assert sum(len(each.adapters) + len(each.removed) for each in sent) == 100 + 1 + 2 + 99
    assert sent == scene.links.supervisor
    assert scene.links.names == ["name-99"]
    assert scene.links.cards["name-99"].default_scale == 0.0
