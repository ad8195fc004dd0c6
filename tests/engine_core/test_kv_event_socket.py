"""The sockets of KV events: publishing, replays, and invalid messages of subscribers."""

import os
import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from engine_core.kv_events import MAX_REQUEST_BYTES, KVEventPublisher
from proto.codec import MessageDecoder
from proto.messages.kv_events import LAST_SEQUENCE, AllBlocksCleared, KVEventBatch
from proto.settings.kv_events_config import KVEventsConfig
from tests.fakes.kv_events import geometry

NUM_BATCHES = 20_000
"""More bytes than the buffers of the kernel hold."""
EPOCH = 3
FIRST = (EPOCH - 1) << 40
"""The sequence of an engine's first batch, which says that nothing is cached."""

DECODER: MessageDecoder[KVEventBatch] = MessageDecoder(KVEventBatch)

Start = Callable[..., KVEventPublisher]
Connect = Callable[..., "zmq.Socket[bytes]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts publishers, which close with the test."""
    started: list[KVEventPublisher] = []

    def factory(epoch: int = EPOCH, **keys: Any) -> KVEventPublisher:
        endpoints: dict[str, Any] = {
            "endpoint": f"ipc://{tmp_path}/kv",
            "replay_endpoint": f"ipc://{tmp_path}/replay",
        }
        publisher = KVEventPublisher(KVEventsConfig(**endpoints | keys), epoch, geometry())
        started.append(publisher)
        return publisher

    yield factory
    for publisher in started:
        if not publisher._socket.closed:
            publisher.close()


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Return a function that connects sockets, which close with the test."""
    context = zmq.Context()

    def factory(
        kind: int, endpoint: str | None, topic: bytes = b"", **options: int
    ) -> "zmq.Socket[bytes]":
        assert endpoint is not None
        socket = context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        for name, value in options.items():
            socket.setsockopt(getattr(zmq, name), value)
        if kind == zmq.SUB:
            socket.setsockopt(zmq.SUBSCRIBE, topic)
        socket.connect(endpoint)
        return socket

    yield factory
    context.destroy(0)


def publish(publisher: KVEventPublisher) -> None:
    publisher.observer.cleared()
    publisher.publish()


def publish_until_heard(publisher: KVEventPublisher, *subscribers: "zmq.Socket[bytes]") -> None:
    deadline = time.monotonic() + 20.0
    while not all(each.poll(20) for each in subscribers):
        assert time.monotonic() < deadline
        publish(publisher)


def sequence_of(message: list[bytes]) -> int:
    _, sequence, batch = message
    assert all(type(event) is AllBlocksCleared for event in DECODER.decode(batch).events)
    return int.from_bytes(sequence, "big")


def replay(socket: "zmq.Socket[bytes]", first: int) -> list[int]:
    """Ask for the batches from a sequence on; return the sequences of the answer."""
    socket.send_multipart([b"", first.to_bytes(8, "big")])
    sequences: list[int] = []
    while True:
        assert socket.poll(10_000)
        empty, *message = socket.recv_multipart()
        assert empty == b""
        if message[1] == LAST_SEQUENCE:
            assert message == [b"", LAST_SEQUENCE, b""]
            return sequences
        sequences.append(sequence_of(message))


@pytest.mark.parametrize(
    "frame",
    [
        os.urandom(1000),
        pickle.dumps(print),
        b"\x01" + bytes(10 * MAX_REQUEST_BYTES),
        bytes(50 << 20),
    ],
    ids=["random", "pickle", "long subscription", "huge"],
)
def test_input_from_a_subscriber_disturbs_no_other(
    start: Start, connect: Connect, frame: bytes
) -> None:
    publisher = start()
    bad = connect(zmq.XSUB, publisher.config.endpoint)
    for frames in ([frame], [b"", frame], [b"", b"", frame], [b"", bytes(8), b""], [b"", bytes(7)]):
        connect(zmq.DEALER, publisher.config.replay_endpoint).send_multipart(frames)
    good = connect(zmq.SUB, publisher.config.endpoint)
    bad.send(frame)
    publish_until_heard(publisher, good)
    first = sequence_of(good.recv_multipart())
    assert first > FIRST
    dealer = connect(zmq.DEALER, publisher.config.replay_endpoint)
    assert replay(dealer, first)[0] == first


def test_a_slow_subscriber_misses_events_and_delays_no_other(
    start: Start, connect: Connect
) -> None:
    publisher = start(hwm=500)
    quick, slow = (connect(zmq.SUB, publisher.config.endpoint, RCVHWM=1) for _ in range(2))
    publish_until_heard(publisher, quick, slow)
    while quick.poll(50):
        quick.recv_multipart()
    for _ in range(NUM_BATCHES):
        publish(publisher)
        assert quick.poll(5_000), "a reading subscriber gets every batch"
        quick.recv_multipart()
    num_late = 0
    while slow.poll(200):
        slow.recv_multipart()
        num_late += 1
    assert 0 < num_late < NUM_BATCHES


def test_batches_that_were_missed_can_be_replayed(start: Start, connect: Connect) -> None:
    publisher = start(buffer_steps=5)
    dealer = connect(zmq.DEALER, publisher.config.replay_endpoint)
    assert replay(dealer, 0) == [FIRST]
    for _ in range(3):
        publish(publisher)
    assert replay(dealer, FIRST + 2) == [FIRST + 2, FIRST + 3]
    assert replay(dealer, FIRST + 9) == []
    for _ in range(6):
        publish(publisher)
    assert replay(dealer, 0) == list(range(FIRST + 5, FIRST + 10)), "the last buffer_steps"
    req = connect(zmq.REQ, publisher.config.replay_endpoint)
    req.send((FIRST + 9).to_bytes(8, "big"))
    assert sequence_of(req.recv_multipart()) == FIRST + 9


def test_a_subscriber_that_reads_no_replay_delays_nothing(start: Start, connect: Connect) -> None:
    publisher = start(buffer_steps=50)
    for _ in range(50):
        publisher.publish([AllBlocksCleared()] * 20_000)
    greedy = connect(zmq.DEALER, publisher.config.replay_endpoint, RCVHWM=1)
    for _ in range(50):
        greedy.send_multipart([b"", bytes(8)])
    patient = connect(zmq.DEALER, publisher.config.replay_endpoint)
    assert len(replay(patient, FIRST + 40)) == 11
    publish(publisher)
    assert replay(patient, FIRST + 51) == [FIRST + 51]


def test_the_restart_of_an_engine_is_a_gap_after_which_nothing_is_cached(
    start: Start, connect: Connect
) -> None:
    publisher = start()
    subscriber = connect(zmq.SUB, publisher.config.endpoint)
    publish_until_heard(publisher, subscriber)
    last = sequence_of(subscriber.recv_multipart())
    publisher.close()
    successor = start(epoch=EPOCH + 1)
    dealer = connect(zmq.DEALER, successor.config.replay_endpoint)
    assert replay(dealer, last + 1) == [EPOCH << 40]


def test_subscribers_filter_by_topic(start: Start, connect: Connect) -> None:
    publisher = start(topic="kv@pod@model")
    endpoint = publisher.config.endpoint
    other, own = (connect(zmq.SUB, endpoint, topic) for topic in (b"kv@other", b"kv@pod"))
    publish_until_heard(publisher, own)
    assert own.recv_multipart()[0] == b"kv@pod@model"
    assert not other.poll(50)


def test_a_free_port_is_named(start: Start, connect: Connect) -> None:
    publisher = start(endpoint="tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0")
    assert not publisher.config.endpoint.endswith(":0")
    dealer = connect(zmq.DEALER, publisher.config.replay_endpoint)
    assert replay(dealer, 0) == [FIRST]


def test_the_last_events_are_sent_before_the_end(start: Start, connect: Connect) -> None:
    publisher = start()
    subscriber = connect(zmq.SUB, publisher.config.endpoint)
    publish_until_heard(publisher, subscriber)
    publisher.observer.cleared()
    expected = publisher._sequence
    publisher.close()
    sequences = []
    while subscriber.poll(200):
        sequences.append(sequence_of(subscriber.recv_multipart()))
    assert sequences[-1] == expected
