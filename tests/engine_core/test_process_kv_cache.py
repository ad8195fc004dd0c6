"""The engine process: size of the KV pool, and KV events."""

import msgspec
import pytest
import zmq

from engine_core.block_hashing import BlockHasher
from proto.codec import MessageDecoder
from proto.messages.engine_io import AdminCall, AdminReply, EngineCoreOutputs
from proto.messages.kv_events import AllBlocksCleared, KVEventBatch
from proto.messages.lifecycle import (
    CacheReady,
    EngineReady,
    Fatal,
    InitializeCache,
    KVGroup,
    Notice,
)
from proto.settings.config import CacheConfig, SchedulerConfig
from tests.fakes.engine_process import BLOCK_SIZE, EPOCH
from tests.fakes.events import num_cached_tokens
from tests.fakes.kv_events import CachedHashes, events_config, names
from tests.fakes.paged_runner import PagedRunner, undisturbed


def test_a_pool_without_room_for_a_block_is_refused_by_name(start):
    engine = start()
    engine.worker.send(engine.worker_ready(kv_cache_bytes=100))
    fatal = engine.expect(engine.supervisor, Fatal)
    assert "--kv-cache-memory" in fatal.error.message


def test_a_model_with_windows(start):
    engine = start(scheduler=SchedulerConfig(max_num_batched_tokens=64))
    windows = (None, 40, 40)
    engine.runner = PagedRunner(BLOCK_SIZE, windows=windows)
    ready = engine.worker_ready()
    groups = tuple(KVGroup(window) for window in windows)
    geometry = msgspec.structs.replace(ready.geometry, groups=groups)
    engine.worker.send(msgspec.structs.replace(ready, geometry=geometry))
    assert engine.expect(engine.worker, InitializeCache).num_blocks == 100
    engine.worker.send(CacheReady(EPOCH, 0))
    # ceil(103 / 16) + 1 blocks for each window, the other 83 for full attention.
    assert engine.expect(engine.supervisor, EngineReady).max_model_len == 83 * BLOCK_SIZE
    (front_end,) = engine.front_ends
    prompt = [position % 900 for position in range(1000)]
    for request_id, num_cached in ((1, 0), (2, 992)):
        front_end.send(engine.request(request_id, prompt, 20))
        for _ in range((1000 - num_cached - 1) // 64):
            engine.run_step()
        outputs = engine.outputs_of(request_id)
        assert num_cached_tokens(outputs[0]) == num_cached
        tokens = [token for each in outputs for token in each.new_token_ids]
        assert tokens == undisturbed(prompt, 20)
    front_end.send(AdminCall(EPOCH, 1, "check_integrity"))
    assert engine.expect(front_end, AdminReply) == AdminReply(EPOCH, 1, True)
    assert engine.shutdown() == 0


@pytest.fixture
def subscribe():
    """Return a function that connects SUB sockets, which close with the test."""
    sockets = []

    def factory(endpoint: str) -> zmq.Socket:
        socket = zmq.Context.instance().socket(zmq.SUB)
        sockets.append(socket)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(endpoint)
        return socket

    yield factory
    for socket in sockets:
        socket.close(linger=0)


@pytest.mark.parametrize("endpoint", ["ipc", "tcp://127.0.0.1:0"])
def test_kv_events_report_cached_blocks(start, subscribe, endpoint):
    engine = start(cache=CacheConfig(kv_events_config=events_config(endpoint=endpoint)))
    engine.worker.send(engine.worker_ready())
    engine.expect(engine.worker, InitializeCache)
    engine.worker.send(CacheReady(EPOCH, 0))
    notice = engine.expect(engine.supervisor, Notice, lambda each: "KV events" in each.message)
    socket = subscribe(notice.message.removeprefix("KV events: "))
    ready = engine.expect(engine.supervisor, EngineReady)
    assert ready.kv_events.endpoint == notice.message.removeprefix("KV events: ")
    (front_end,) = engine.front_ends
    decoder = MessageDecoder(KVEventBatch)
    # A late subscriber starts from an empty cache once it receives the event.
    calls = 0
    while not socket.poll(20):
        calls += 1
        assert calls < 500
        front_end.send(AdminCall(EPOCH, calls, "reset_prefix_cache"))
        assert engine.expect(front_end, AdminReply).ok

    prompts = [list(range(40)), [*range(16), *range(500, 540)], list(range(100, 116))]
    expected = set()
    for request_id, prompt in enumerate(prompts, 1):
        front_end.send(engine.request(request_id, prompt, 1))
        engine.outputs_of(request_id)
        hashes = []
        BlockHasher(BLOCK_SIZE, b"f" * 32).extend(hashes, prompt)
        expected |= {(0, name) for name in names(hashes)}
    known, sequences = CachedHashes(), []
    while known.held != expected:
        assert socket.poll(20_000), "the events are not complete"
        topic, sequence, payload = socket.recv_multipart()
        batch = decoder.decode(payload)
        assert (topic, batch.data_parallel_rank) == (b"", 0)
        sequences.append(int.from_bytes(sequence, "big"))
        for event in batch.events:
            known.apply(event)
    assert sequences == list(range(sequences[0], sequences[0] + len(sequences)))
    front_end.send(AdminCall(EPOCH, 0, "reset_prefix_cache"))
    assert engine.expect(front_end, AdminReply).ok
    assert socket.poll(20_000)
    assert decoder.decode(socket.recv_multipart()[2]).events == [AllBlocksCleared()]
    assert engine.shutdown() == 0


def test_an_endpoint_that_cannot_be_bound_is_refused_by_name(start):
    engine = start(
        cache=CacheConfig(kv_events_config=events_config(endpoint="ipc:///nowhere/at/all"))
    )
    engine.worker.send(engine.worker_ready())
    engine.expect(engine.worker, InitializeCache)
    engine.worker.send(CacheReady(EPOCH, 0))
    fatal = engine.expect(engine.supervisor, Fatal)
    assert "--kv-events-config: endpoint ipc:///nowhere/at/all" in fatal.error.message


def test_residency_of_blocks_travels_with_the_statistics(start):
    engine = start(cache=CacheConfig(num_gpu_blocks_override=3, kv_cache_metrics_one_in=1))
    engine.start()
    (front_end,) = engine.front_ends
    front_end.send(engine.request(1, [1] * 16, 2))
    engine.outputs_of(1)
    front_end.send(engine.request(2, [2] * 17, 1))
    engine.run_step()
    message = engine.expect(
        front_end, EngineCoreOutputs, lambda each: each.stats and each.stats.kv_evictions
    )
    (eviction, *_) = message.stats.kv_evictions
    assert eviction.lifetime >= eviction.idle >= 0
