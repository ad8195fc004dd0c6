"""The socket of KV events keeps publishing, whatever subscribers send to it."""

import os
import pickle
import tempfile
import time

import pytest
import zmq

from engine_core import kv_events
from engine_core.kv_events import MAX_SUBSCRIPTION_BYTES, KVEventPublisher
from proto.codec import MessageDecoder
from proto.kv_events import AllBlocksCleared, KVEventBatch

NUM_BATCHES = 20_000
"""More bytes than the buffers of the kernel hold."""


@pytest.mark.parametrize(
    "frame",
    [
        os.urandom(1000),
        pickle.dumps(print),
        b"\x01" + bytes(10 * MAX_SUBSCRIPTION_BYTES),
        bytes(50 << 20),
    ],
    ids=["random", "pickle", "long subscription", "huge"],
)
def test_input_from_a_subscriber_disturbs_no_other(frame: bytes) -> None:
    context = zmq.Context()
    with tempfile.TemporaryDirectory(prefix="t-") as place:
        publisher = KVEventPublisher(f"ipc://{place}/kv", 3)
        good, bad = context.socket(zmq.SUB), context.socket(zmq.XSUB)
        good.setsockopt(zmq.SUBSCRIBE, b"")
        for each in (bad, good):
            each.setsockopt(zmq.LINGER, 0)
            each.connect(publisher.endpoint)
        bad.send(frame)
        log = publisher.observer
        deadline = time.monotonic() + 20.0
        while not good.poll(20):
            assert time.monotonic() < deadline
            log.cleared()
            publisher.publish()
        batch = MessageDecoder(KVEventBatch).decode(good.recv())
        assert batch.epoch == 3
        assert set(map(type, batch.events)) == {AllBlocksCleared}
        publisher.close()
        context.destroy(0)


def test_a_slow_subscriber_misses_events_and_delays_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_events, "MAX_QUEUED_BATCHES", 500)
    context = zmq.Context()
    with tempfile.TemporaryDirectory(prefix="t-") as place:
        publisher = KVEventPublisher(f"ipc://{place}/kv", 3)
        log = publisher.observer
        quick, slow = context.socket(zmq.SUB), context.socket(zmq.SUB)
        for each in (quick, slow):
            each.setsockopt(zmq.SUBSCRIBE, b"")
            each.setsockopt(zmq.RCVHWM, 1)
            each.connect(publisher.endpoint)

        def publish() -> None:
            log.cleared()
            publisher.publish()

        while not (quick.poll(5) and slow.poll(5)):
            publish()
        while quick.poll(50):
            quick.recv()
        for _ in range(NUM_BATCHES):
            publish()
            assert quick.poll(5_000), "a reading subscriber gets every batch"
            quick.recv()
        num_late = 0
        while slow.poll(200):
            slow.recv()
            num_late += 1
        assert 0 < num_late < NUM_BATCHES
        publisher.close()
        context.destroy(0)


def test_the_last_events_are_sent_before_the_end() -> None:
    context = zmq.Context()
    with tempfile.TemporaryDirectory(prefix="t-") as place:
        publisher = KVEventPublisher(f"ipc://{place}/kv", 3)
        subscriber = context.socket(zmq.SUB)
        subscriber.setsockopt(zmq.SUBSCRIBE, b"")
        subscriber.connect(publisher.endpoint)
        log = publisher.observer
        num_published = 0
        while not subscriber.poll(20):
            log.cleared()
            publisher.publish()
            num_published += 1
        log.cleared()
        publisher.close()
        batches = []
        while subscriber.poll(200):
            batches.append(MessageDecoder(KVEventBatch).decode(subscriber.recv()))
        assert batches[-1].sequence == num_published
        context.destroy(0)
