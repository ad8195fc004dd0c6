"""Adapters of a real engine process, over its sockets."""

from collections.abc import Callable
from typing import Any

from proto.messages.engine_io import EngineCoreOutputs
from proto.messages.lifecycle import CacheReady, EngineReady, Fatal, InitializeCache, NewFrontEnd
from proto.messages.lora import (
    AdapterCall,
    AdapterCard,
    AdapterList,
    AdapterLoaded,
    AdapterReply,
    AdapterUsage,
    DropAdapter,
    LoadAdapter,
    LoRARequest,
)
from proto.messages.scheduler_output import SchedulerOutput
from proto.settings.config import LoRAConfig
from tests.fakes.engine_process import EPOCH, EngineProcess
from tests.fakes.lora import digest_of

Start = Callable[..., EngineProcess]


def begin(start: Start, **lora: Any) -> EngineProcess:
    """Start an engine with adapters; its worker is ready."""
    engine = start(lora=LoRAConfig(enable_lora=True, **lora))
    engine.worker.send(engine.worker_ready())
    engine.expect(engine.worker, InitializeCache)
    engine.worker.send(CacheReady(EPOCH, 0))
    return engine


def answer_load(engine: EngineProcess, epoch: int = EPOCH, **fields: Any) -> LoadAdapter:
    """Answer the next load as the worker; the content of a path is the path."""
    load: LoadAdapter = engine.expect(engine.worker, LoadAdapter)
    loaded = {"digest": digest_of(load.path.encode()), "effect": 1.0, "num_bytes": 9, **fields}
    engine.worker.send(AdapterLoaded(epoch, 0, load.lora_int_id, **loaded))
    return load


def test_adapters_of_the_start_are_listed_when_the_engine_is_ready(start: Start) -> None:
    engine = begin(start, lora_modules=("a=/a", '{"name": "b", "path": "/b"}'))
    for path in ("/a", "/b"):
        assert answer_load(engine).path == path
    engine.expect(engine.supervisor, EngineReady)
    cards: dict[str, AdapterCard] = {}
    while len(cards) < 2:
        engine.expect(engine.front_ends[0], AdapterList).apply_to(cards)
    assert list(cards) == ["a", "b"]
    later = engine.add_front_end(0, 1)
    engine.supervisor.send(NewFrontEnd(0, 1))
    assert isinstance(engine.expect(later, EngineReady), EngineReady)
    assert engine.expect(later, AdapterList).adapters == list(cards.values())


def test_an_adapter_of_the_start_that_cannot_be_loaded_ends_it_by_name(start: Start) -> None:
    engine = begin(start, lora_modules=("a=/a",))
    load = engine.expect(engine.worker, LoadAdapter)
    engine.worker.send(AdapterLoaded(EPOCH, 0, load.lora_int_id, b""))
    fatal = engine.expect(engine.supervisor, Fatal)
    assert fatal.error.message.startswith("ConfigError: --lora-modules a:")


def test_a_request_waits_for_its_adapter_and_no_other_request_for_it(start: Start) -> None:
    engine = begin(start)
    engine.expect(engine.supervisor, EngineReady)
    (front_end,) = engine.front_ends
    front_end.send(AdapterCall(EPOCH, 1, "load", "a", "/a"))
    answer_load(engine)
    listed = engine.expect(front_end, AdapterList, lambda each: bool(each.adapters))
    assert engine.expect(front_end, AdapterReply).status == 200
    assert engine.expect(engine.supervisor, AdapterList) == listed
    lora = listed.adapters[0].lora

    engine.restart_workers(EPOCH + 1)
    engine.expect(engine.worker, InitializeCache)
    engine.worker.send(CacheReady(EPOCH + 1, 0))
    front_end.send(engine.request(1, [1, 2], 2, lora_request=lora))
    load = engine.expect(engine.worker, LoadAdapter)
    assert (load.path, load.digest) == ("/a", digest_of(b"/a"))
    front_end.send(engine.request(2, [1, 2], 3))
    engine.outputs_of(2)  # while the adapter is read
    engine.worker.send(AdapterLoaded(EPOCH + 1, 0, load.lora_int_id, digest_of(b"/a"), effect=1.0))
    engine.outputs_of(1)

    front_end.send(AdapterCall(EPOCH, 2, "unload", "a"))
    assert engine.expect(front_end, AdapterReply).status == 200
    assert engine.expect(engine.worker, DropAdapter).lora_int_id == load.lora_int_id
    engine.expect(front_end, AdapterUsage, lambda each: each.num_resident == 0)
    front_end.send(engine.request(3, [1, 2], 2, lora_request=lora))
    refused = engine.expect(front_end, EngineCoreOutputs, lambda each: each.outputs)
    assert refused.outputs[0].error.kind == "unknown_model"


def test_steps_name_the_adapter_and_its_scale(start: Start) -> None:
    engine = begin(start, lora_modules=("a=/a",))
    answer_load(engine)
    engine.expect(engine.supervisor, EngineReady)
    # of an adapter that was dropped before this answer arrived
    engine.worker.send(AdapterLoaded(EPOCH, 0, 99, digest_of(b"")))
    lora = LoRARequest(7, "a", "/elsewhere", digest_of(b"/a"), 0.5)
    engine.front_ends[0].send(engine.request(1, [1, 2], 2, lora_request=lora))
    step = engine.expect(engine.worker, SchedulerOutput, lambda each: each.new_requests)
    assert (step.new_requests[0].lora_int_id, step.new_requests[0].lora_scale) == (1, 0.5)


def test_without_the_setting_requests_and_calls_are_refused(start: Start) -> None:
    engine = start()
    engine.start()
    (front_end,) = engine.front_ends
    front_end.send(AdapterCall(EPOCH, 1, "load", "a", "/a"))
    reply = engine.expect(front_end, AdapterReply)
    assert (reply.status, "--enable-lora" in reply.message) == (400, True)
    lora = LoRARequest(1, "a", "/a", bytes(32))
    front_end.send(engine.request(1, [1, 2], 2, lora_request=lora))
    refused = engine.expect(front_end, EngineCoreOutputs, lambda each: each.outputs)
    assert "--enable-lora" in refused.outputs[0].error.message
