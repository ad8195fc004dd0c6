"""Links: delivery, bounded buffers, undecodable frames, and peers that stop reading."""

import os
import pickle
import time

import msgspec
import pytest
import zmq

from proto.errors import TokendError
from proto.messages.engine_io import Abort, AdminCall, ToEngine
from proto.runtime import sockets
from proto.runtime.sockets import (
    Link,
    PeerStalledError,
    Poller,
    front_end_path,
    supervisor_path,
    worker_path,
)
from tests.fakes.links import receive

WAIT_SECONDS = 10.0


class Blob(msgspec.Struct, array_like=True, tag=1):
    data: bytes


@pytest.fixture
def pair(short_dir):
    links = []

    def factory(receives=ToEngine):
        path = str(short_dir / f"l{len(links)}")
        links.extend((Link.bind(path, receives), Link.connect(path, receives)))
        return links[-2], links[-1]

    yield factory
    for link in links:
        link.close()


def send_until_stalled(link):
    """Return how many messages of 100 kB a link accepts before it stalls, 10,000 at most."""
    for count in range(10_000):
        try:
            link.send(Blob(bytes(100_000)))
        except PeerStalledError:
            return count
    return 10_000


def test_messages_go_both_ways_in_order(pair):
    bound, connected = pair()
    sent = [AdminCall(1, each, "check_integrity") for each in range(100)]
    for message in sent:
        connected.send(message)
    assert receive(bound, 100) == sent
    bound.send(Abort(1, 2, "disconnect"))
    assert receive(connected, 1) == [Abort(1, 2, "disconnect")]


def test_messages_sent_before_the_peer_binds_are_delivered(short_dir):
    path = str(short_dir / "late")
    connected = Link.connect(path, ToEngine)
    connected.send(Abort(1, 1, "disconnect"))
    bound = Link.bind(path, ToEngine)
    bound.send(Abort(1, 2, "disconnect"))
    poller = Poller([bound, connected])
    received = {bound: [], connected: []}
    while not all(received.values()):
        poller.wait(WAIT_SECONDS)
        for link in received:
            received[link] += link.receive()
    assert received[bound] == [Abort(1, 1, "disconnect")]
    assert received[connected] == [Abort(1, 2, "disconnect")]
    bound.close()
    connected.close()


def test_a_poll_is_not_ended_by_becoming_writable(short_dir):
    bound = Link.bind(str(short_dir / "late"), ToEngine)
    bound.send(Abort(1, 2, "disconnect"))  # without a peer it stays in the buffer
    connected = Link.connect(bound.path, ToEngine)
    begun = time.monotonic()
    assert Poller([bound]).wait(0.3) == []
    assert time.monotonic() - begun >= 0.29  # a poll counts whole milliseconds
    assert receive(connected, 1) == [Abort(1, 2, "disconnect")]
    bound.close()
    connected.close()


def test_garbage_is_dropped_and_counted(pair):
    bound, connected = pair()
    connected.zmq_socket.send(b"\xc1")
    connected.zmq_socket.send(msgspec.msgpack.encode([99, 1]))
    connected.send(Abort(1, 1, "disconnect"))
    assert receive(bound, 1) == [Abort(1, 1, "disconnect")]
    assert bound.num_undecodable == 2


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [os.urandom(1000)],
        [pickle.dumps({"a": print})],
        [msgspec.msgpack.encode([77, "unknown"])],
        [b"\x91" * 1_000_000],
        [b"\xc1", msgspec.msgpack.encode([99])],
    ],
    ids=["empty", "random", "pickle", "unknown type", "nested", "in two parts"],
)
def test_a_message_after_garbage_is_received(pair, frames):
    bound, connected = pair()
    connected.zmq_socket.send_multipart(frames)
    connected.send(Abort(1, 1, "disconnect"))
    assert receive(bound, 1) == [Abort(1, 1, "disconnect")]
    assert bound.num_undecodable == len(frames)


def test_a_frame_above_the_limit_is_never_received(pair, monkeypatch):
    """ZMQ closes the connection and opens another one, which delivers later messages."""
    monkeypatch.setattr(sockets, "MAX_MESSAGE_BYTES", 1000)
    bound, connected = pair(Blob | Abort)
    connected.send(Blob(bytes(2000)))
    poller = Poller([bound])
    received = []
    while not received:
        connected.send(Abort(1, 1, "disconnect"))
        poller.wait(0.05)
        received = bound.receive()
    assert set(map(type, received)) == {Abort}
    assert bound.num_undecodable == 0


def test_garbage_is_logged_with_backoff_and_cannot_forge_lines(pair, caplog):
    bound, connected = pair()
    evil = msgspec.msgpack.encode([2, 1, 2, "\x1b[2J\nFATAL forged"])
    for _ in range(600):
        connected.zmq_socket.send(evil)
    connected.send(Abort(1, 1, "disconnect"))
    receive(bound, 1)
    assert bound.num_undecodable == 600
    assert len(caplog.records) == 10  # 1, 2, 4 … 512
    assert all(each.getMessage().isprintable() for each in caplog.records)


def test_a_peer_that_does_not_read_is_reported_and_memory_is_bounded(pair, monkeypatch):
    monkeypatch.setattr(sockets, "MAX_PENDING_BYTES", 1 << 20)
    monkeypatch.setattr(sockets, "MAX_QUEUED_MESSAGES", 20)
    bound, _silent = pair(Blob)
    sent = send_until_stalled(bound)
    assert not bound.flush()
    # Both ends of ZMQ hold 20 messages, the buffer 10, the kernel a few.
    assert sent < 200


def test_buffered_messages_are_sent_when_the_peer_reads_again(pair, monkeypatch):
    monkeypatch.setattr(sockets, "MAX_QUEUED_MESSAGES", 20)
    bound, connected = pair(Blob)
    sent = 0
    while bound.flush():
        bound.send(Blob(sent.to_bytes(4, "little")))
        sent += 1
    bound.send(Blob(sent.to_bytes(4, "little")))
    sent += 1
    poller = Poller([bound, connected])
    received = []
    while len(received) < sent:
        poller.wait(WAIT_SECONDS)
        received += connected.receive()
    assert [int.from_bytes(each.data, "little") for each in received] == list(range(sent))
    assert bound.flush()


def test_messages_do_not_overtake_buffered_ones(pair, monkeypatch):
    monkeypatch.setattr(sockets, "MAX_QUEUED_MESSAGES", 20)
    bound, connected = pair(Blob)
    sent = 0
    while bound.flush():
        bound.send(Blob(sent.to_bytes(4, "little")))
        sent += 1
    received = receive(connected, sent - 1)
    assert bound.zmq_socket.poll(WAIT_SECONDS * 1000, zmq.POLLOUT)  # ZMQ accepts messages again
    bound.send(Blob(sent.to_bytes(4, "little")))
    received += receive(connected, 2)
    assert [int.from_bytes(each.data, "little") for each in received] == list(range(sent + 1))


def test_a_poller_waits_on_links_and_descriptors(pair):
    bound, connected = pair()
    reader, writer = os.pipe()
    poller = Poller([bound], [reader])
    assert poller.wait(0) == []
    os.write(writer, b"x")
    assert poller.wait(WAIT_SECONDS) == [reader]
    poller.remove(reader)
    assert poller.wait(0) == []
    connected.send(Abort(1, 1, "disconnect"))
    assert poller.wait(WAIT_SECONDS) == [bound]
    poller.remove(bound)
    assert poller.wait(0) == []
    os.close(reader)
    os.close(writer)


def test_paths_differ_by_epoch_and_incarnation():
    paths = [
        worker_path("/r", 1, 0),
        worker_path("/r", 2, 0),
        worker_path("/r", 1, 1),
        front_end_path("/r", 1, 0),
        front_end_path("/r", 2, 0),
        supervisor_path("/r", "worker", 0, 0),
        supervisor_path("/r", "worker", 0, 1),
        supervisor_path("/r", "engine_core", 0, 0),
        supervisor_path("/r", "engine_core", 0, 0, has_place=False),
    ]
    assert len(set(paths)) == len(paths)


def test_some_messages_can_be_left_for_later(pair):
    bound, connected = pair()
    for number in range(3):
        connected.send(Abort(1, number, "disconnect"))
    found = []
    while len(found) < 3:
        found += bound.receive(1)
        assert Poller([bound]).wait(WAIT_SECONDS) or len(found) == 3
    assert [each.request_id for each in found] == [0, 1, 2]
    assert bound.receive(0) == []


def test_a_path_too_long_for_the_kernel_is_refused_by_name(short_dir):
    with pytest.raises(TokendError, match="107"):
        Link.bind(str(short_dir / ("x" * 120)), ToEngine)


def test_close_of_the_bound_end_removes_the_path(pair):
    bound, connected = pair()
    connected.close()
    assert os.path.exists(bound.path)
    bound.close()
    assert not os.path.exists(bound.path)
    bound.close()


def test_fileno_is_readable_when_a_message_arrives(pair):
    bound, connected = pair()
    assert bound.receive() == []
    connected.send(Abort(1, 1, "disconnect"))
    assert Poller([], [bound.fileno()]).wait(WAIT_SECONDS) == [bound.fileno()]
