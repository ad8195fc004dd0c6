"""KV from daemon to daemon: what two workers send, take and refuse, over real sockets."""

import errno
import re
import select
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from proto.codec import encode
from proto.errors import ConfigError
from proto.messages.kv_connector import DeviceBlocks, TransferJob, pack, unpack
from proto.messages.kv_peer import (
    Blocks,
    Hello,
    PeerHold,
    PeerLoad,
    PeerReport,
    PeerSource,
    PeerStep,
    PeerWorkerAddress,
    Refusal,
    Welcome,
)
from proto.settings.kv_transfer_config import KVTransferConfig
from tests.fakes.devices import CPU
from worker.attention.kv_cache import KVCache, kv_cache_geometry, kv_layout
from worker.kv_connector.base import WorkerContext
from worker.kv_connector.peer import channel as channels
from worker.kv_connector.peer import consumer, producer
from worker.kv_connector.peer.channel import Channel, ConnectionLostError, PeerError
from worker.kv_connector.peer.connector import PeerWorker

NUM_BLOCKS = 40
KEYS = [bytes([value]) * 37 for value in range(1, 31)]
REQUEST = "a" * 32
TENANT = 7
SECRET = b"0123456789abcdef"


class Side:
    """A worker of one daemon with its KV cache, whose loop is the test.

    key_file: has SECRET; of all sides that are given no other one.
    """

    key_file = Path()

    def __init__(
        self,
        *,
        role: str = "kv_both",
        dtype: torch.dtype = torch.float32,
        block_size: int = 4,
        rank: int = 0,
        num_ranks: int = 1,
        fingerprint: bytes = b"f" * 32,
        **extra: Any,
    ) -> None:
        layout = kv_layout([None, None])
        geometry = kv_cache_geometry(layout, 2, 8, dtype)
        self.cache = KVCache(geometry, layout, NUM_BLOCKS, block_size)
        self.rows = self.cache.block_rows()
        extra.setdefault("key_file", str(self.key_file))
        config = KVTransferConfig(
            kv_connector="PeerConnector", kv_role=role, kv_connector_extra_config=extra
        )
        context = WorkerContext(rank, num_ranks, fingerprint, block_size, CPU)
        self.worker = PeerWorker(config, context)
        self.worker.register_kv_caches(self.cache)
        self.is_closed = False
        self.sent: list[int] = []
        self.received: list[int] = []
        self.invalid: list[int] = []
        self.reports: list[PeerReport] = []
        self.read_report()
        self.address = self.reports[0].address

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.worker.close()

    def step(self, **changes: Any) -> None:
        self.worker.bind_connector_metadata(pack(PeerStep(**changes)))
        self.worker.handle_preemptions()
        self.worker.start_load_kv()
        self.worker.wait_for_save()

    def read_report(self, seconds: float = 20.0) -> None:
        poll = select.poll()
        poll.register(self.worker.fileno(), select.POLLIN)
        assert poll.poll(seconds * 1000), "nothing was reported in time"
        finished = self.worker.get_finished([])
        self.sent += finished.sending
        self.received += finished.recving
        self.invalid += self.worker.get_block_ids_with_load_errors()
        if metadata := self.worker.build_connector_worker_meta():
            self.reports.append(unpack(metadata, PeerReport))

    def await_received(self) -> list[int]:
        """Wait for the end of a load; return the blocks that it has left invalid."""
        while not self.received:
            self.read_report()
        self.received.clear()
        invalid, self.invalid = self.invalid, []
        return invalid

    def await_sent(self) -> int:
        while not self.sent:
            self.read_report()
        return self.sent.pop()

    def hold(self, keys: list[bytes] = KEYS, request: str = REQUEST, seq_id: int = 1) -> None:
        blocks = list(range(1, 1 + len(keys)))
        self.step(holds=[PeerHold(seq_id, request, TENANT, keys, blocks)])

    def source(self, request: str = REQUEST) -> PeerSource:
        return PeerSource(request, "127.0.0.1", [self.address])

    def load(
        self,
        source: PeerSource,
        keys: list[bytes] = KEYS,
        tenant: int = TENANT,
        first_block: int = 5,
    ) -> list[int]:
        """Load blocks; return those that are invalid afterwards."""
        blocks = list(range(first_block, first_block + len(keys)))
        job = TransferJob(11, "peer", True, [DeviceBlocks(0, blocks)], [], [keys])
        self.step(loads=[PeerLoad(source, tenant, job)])
        return self.await_received()


@pytest.fixture
def sides(tmp_path_factory, monkeypatch):
    """Return a function that makes a Side, closed after the test."""
    key_file = tmp_path_factory.mktemp("key") / "key"
    key_file.write_bytes(SECRET)
    monkeypatch.setattr(Side, "key_file", key_file)
    with ExitStack() as stack:

        def make(**options: Any) -> Side:
            side = Side(**options)
            stack.callback(side.close)
            return side

        yield make


@pytest.fixture
def folder() -> Iterator[Path]:
    """With a path short enough for Unix sockets."""
    with tempfile.TemporaryDirectory(prefix="td-") as path:
        yield Path(path, "sockets")


def transport(name: str, folder: Path) -> dict[str, Any]:
    memory = {"transport": "memory", "socket_folder": str(folder), "key_file": None}
    return memory if name == "memory" else {}


def filled(side: Side) -> torch.Tensor:
    side.rows.copy_(torch.randint(0, 256, side.rows.shape, dtype=torch.uint8))
    return side.rows[1 : 1 + len(KEYS)].clone()


@pytest.mark.parametrize("name", ["tcp", "memory"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_blocks_arrive_as_they_were(sides, monkeypatch, folder, name, dtype):
    """In many batches; the producer's blocks are free after that, and nothing else is written."""
    monkeypatch.setattr(channels, "_BATCH_BYTES", 3000)
    settings = transport(name, folder)
    prefill = sides(dtype=dtype, role="kv_producer", **settings)
    decode = sides(dtype=dtype, role="kv_consumer", **settings)
    expected = filled(prefill)
    prefill.hold()
    assert decode.load(prefill.source()) == []
    assert torch.equal(decode.rows[5 : 5 + len(KEYS)], expected)
    assert not decode.rows[:5].any()
    assert not decode.rows[5 + len(KEYS) :].any()
    assert prefill.await_sent() == 1
    assert [copy.num_bytes for report in decode.reports for copy in report.loads] == [
        expected.numel()
    ]


@pytest.mark.parametrize("name", ["tcp", "memory"])
def test_a_part_of_the_blocks_can_be_loaded(sides, folder, name):
    settings = transport(name, folder)
    prefill, decode = sides(**settings), sides(**settings)
    expected = filled(prefill)
    prefill.hold()
    assert decode.load(prefill.source(), KEYS[3:5]) == []
    assert torch.equal(decode.rows[5:7], expected[3:5])


def warnings(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    ("consumer_options", "load_options", "reason"),
    [
        ({}, {"keys": [b"x" * 37]}, "unknown block"),
        ({}, {"keys": [KEYS[0], b"x" * 37]}, "unknown block"),
        ({}, {"tenant": TENANT + 1}, "another tenant"),
        ({"fingerprint": b"g" * 32}, {}, "fingerprint .* another model or version"),
        ({"block_size": 8}, {}, "block_size 8, not 4"),
        ({"dtype": torch.float16}, {}, "dtype float16, not float32"),
    ],
)
def test_what_a_producer_refuses_is_named_at_both_ends(
    sides, caplog, consumer_options, load_options, reason
):
    """Nothing is written, and the blocks are freed, because the load will not be repeated."""
    prefill, decode = sides(), sides(**consumer_options)
    filled(prefill)
    prefill.hold()
    keys = load_options.get("keys", KEYS)
    assert decode.load(prefill.source(), **load_options) == list(range(5, 5 + len(keys)))
    assert not decode.rows.any()
    assert any(
        "was not loaded" in line and re.search(reason, line)
        for line in warnings(caplog).splitlines()
    )
    assert [report.num_failed for report in decode.reports][-1] == 1
    if not consumer_options:
        assert prefill.await_sent() == 1
        assert "KV was not handed over" in warnings(caplog)


def test_a_request_without_a_lease_is_unknown(sides, monkeypatch, caplog):
    monkeypatch.setattr(producer, "_REGISTER_SECONDS", 0.05)
    prefill, decode = sides(), sides()
    prefill.hold()
    assert decode.load(prefill.source("b" * 32)) != []
    assert "unknown request" in warnings(caplog)
    assert decode.load(prefill.source()) == [], "the lease of the other request is as it was"


def test_a_fetch_may_come_before_the_step_with_its_lease(sides):
    prefill, decode = sides(), sides()
    expected = filled(prefill)
    blocks = list(range(5, 5 + len(KEYS)))
    job = TransferJob(11, "peer", True, [DeviceBlocks(0, blocks)], [], [KEYS])
    decode.step(loads=[PeerLoad(prefill.source(), TENANT, job)])
    time.sleep(0.05)
    prefill.hold()
    assert decode.await_received() == []
    assert torch.equal(decode.rows[5 : 5 + len(KEYS)], expected)


def test_another_number_of_ranks_is_named(sides, caplog):
    prefill, decode = sides(), sides(num_ranks=2)
    prefill.hold()
    assert decode.load(prefill.source()) != []
    assert "1 tensor-parallel workers, not 2" in warnings(caplog)


def test_the_rank_is_part_of_the_layout(sides, caplog):
    prefill, decode = sides(num_ranks=2), sides(num_ranks=2, rank=1)
    prefill.hold()
    source = PeerSource(REQUEST, "127.0.0.1", [prefill.address, prefill.address])
    assert decode.load(source) != []
    assert "rank 1, not 0" in warnings(caplog)


def test_another_worker_at_the_address_is_an_unknown_engine(sides, caplog):
    prefill, decode = sides(), sides()
    prefill.hold()
    address = PeerWorkerAddress("0" * 32, prefill.address.port)
    assert decode.load(PeerSource(REQUEST, "127.0.0.1", [address])) != []
    assert "unknown engine: another one" in warnings(caplog)


@pytest.mark.parametrize("name", ["tcp", "memory"])
def test_a_dead_producer_fails_the_load(sides, folder, caplog, name):
    settings = transport(name, folder)
    prefill, decode = sides(**settings), sides(**settings)
    prefill.hold()
    prefill.close()
    assert decode.load(prefill.source()) == list(range(5, 35))
    assert "no connection to the producer" in warnings(caplog)


class TestKeys:
    def key_file(self, folder: Path, text: str) -> str:
        path = folder / f"{text[:4]}.key"
        path.write_text(text)
        return str(path)

    def test_both_ends_need_the_same_key(self, sides, tmp_path, caplog):
        right, wrong = (self.key_file(tmp_path, each * 16) for each in ("right", "wrong"))
        prefill = sides(key_file=right)
        expected = filled(prefill)
        prefill.hold()
        assert sides(key_file=wrong).load(prefill.source()) != []
        assert "another key_file" in warnings(caplog)
        decode = sides(key_file=right)
        assert decode.load(prefill.source()) == []
        assert torch.equal(decode.rows[5:35], expected)

    def test_a_consumer_without_the_key_gets_no_byte(self, sides, tmp_path):
        """It leaves out the check of the producer's proof, and goes on."""
        prefill = sides(key_file=self.key_file(tmp_path, "k" * 16))
        prefill.hold()
        with socket.create_connection(("127.0.0.1", prefill.address.port)) as connection:
            channel = Channel(connection, time.monotonic() + 10)
            channel.send(Hello(1, b"n" * 16))
            welcome = channel.receive_answer(Welcome)
            channel.use_keys(b"", b"n" * 16 + welcome.nonce, is_producer=False)
            layout = prefill.worker._server._layout
            with pytest.raises(PeerError):
                channels.open_as_consumer(channel, layout)

    def test_a_short_key_and_none_are_refused(self, tmp_path):
        with pytest.raises(ConfigError, match="key_file needs 16 bytes, has 5"):
            Side(key_file=self.key_file(tmp_path, "short"))
        with pytest.raises(ConfigError, match="key_file is needed by tcp"):
            Side(key_file=None)


class TestLeases:
    def test_a_lease_ends_if_nothing_is_heard(self, sides):
        prefill = sides(lease_seconds=0.05)
        prefill.hold()
        assert prefill.await_sent() == 1

    def test_heartbeats_extend_a_lease(self, sides, monkeypatch):
        """They begin with the watch; the lease ends when the consumer has released it."""
        monkeypatch.setattr(consumer, "HEARTBEAT_SECONDS", 0.02)
        prefill, decode = sides(lease_seconds=0.3), sides()
        prefill.hold()
        prefill.hold(request="b" * 32, seq_id=2)
        decode.step(watches=[prefill.source()])
        assert prefill.await_sent() == 2, "the other one ends"
        leases = prefill.worker._leases
        assert leases.extend([REQUEST]) == [REQUEST]
        assert leases._leases[REQUEST].end > time.monotonic() + 15
        assert prefill.reports, "the engine sees that the consumer is heard"
        decode.step(releases=[(prefill.source(), "the request has ended")])
        assert prefill.await_sent() == 1

    def test_heartbeats_go_on_after_a_socket_could_not_be_made(self, sides, monkeypatch):
        monkeypatch.setattr(consumer, "HEARTBEAT_SECONDS", 0.02)
        prefill, decode = sides(), sides()
        failures = [OSError(errno.EMFILE, "Too many open files")] * 2

        def fail_twice(*args):
            if failures:
                raise failures.pop()
            return socket.socket(*args)

        module = SimpleNamespace(**{**vars(socket), "socket": fail_twice})
        monkeypatch.setattr(consumer, "socket", module)
        prefill.hold()
        decode.step(watches=[prefill.source()])
        prefill.read_report()
        assert prefill.reports, "a heartbeat has arrived"
        assert not failures

    def test_a_silent_address_costs_one_wait_a_round(self, sides, monkeypatch):
        """Forged sources with its address do not delay the heartbeats of others."""
        monkeypatch.setattr(consumer, "_SHORT_SECONDS", 0.3)
        prefill, decode = sides(), sides()
        prefill.hold()
        with SilentProducer() as silent:
            forged = [
                PeerSource(f"{number:032x}", "127.0.0.1", [silent.worker(number)])
                for number in range(1000)
            ]
            decode.step(watches=[*forged, prefill.source()])
            prefill.read_report()
            assert prefill.reports, "a heartbeat has arrived"
            assert silent.num_connections() == 1

    def test_an_extension_never_shortens_a_lease(self, sides):
        prefill = sides(lease_seconds=500.0)
        prefill.hold()
        before = prefill.worker._leases._leases[REQUEST].end
        prefill.worker._leases.extend([REQUEST])
        assert prefill.worker._leases._leases[REQUEST].end == before

    def test_heartbeats_do_not_keep_blocks_for_ever(self, sides, monkeypatch):
        monkeypatch.setattr(producer, "MAX_LEASE_SECONDS", 0.2)
        monkeypatch.setattr(consumer, "HEARTBEAT_SECONDS", 0.02)
        prefill, decode = sides(lease_seconds=0.1), sides()
        prefill.hold()
        decode.step(watches=[prefill.source()])
        assert prefill.await_sent() == 1

    def test_the_engine_can_drop_a_lease(self, sides, monkeypatch, caplog):
        """A request whose lease has ended is answered at once."""
        monkeypatch.setattr(producer, "_REGISTER_SECONDS", 1000.0)
        monkeypatch.setattr(producer, "_RELEASE_SECONDS", 1000.0)
        prefill, decode = sides(), sides(load_timeout=20.0)
        prefill.hold()
        prefill.step(drops=[1])
        assert prefill.await_sent() == 1
        assert decode.load(prefill.source(), KEYS[:1]) == [5]
        assert "its lease has ended" in warnings(caplog)
        prefill.worker._leases.release(REQUEST)

    def test_few_ended_leases_are_remembered(self, sides, monkeypatch):
        monkeypatch.setattr(producer, "_MAX_REMEMBERED", 3)
        prefill = sides()
        for number in range(9):
            prefill.hold(request=f"{number:032x}", seq_id=number)
            prefill.step(drops=[number])
        assert list(prefill.worker._leases._remembered) == [f"{each:032x}" for each in (6, 7, 8)]

    def test_a_release_waits_less_than_its_consumer(self):
        assert producer._RELEASE_SECONDS < consumer._SHORT_SECONDS


class SilentProducer:
    """Connections succeed, and are never answered."""

    def __enter__(self) -> "SilentProducer":
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=100)
        self._accepted: list[socket.socket] = []
        return self

    def __exit__(self, *error: object) -> None:
        self.num_connections()
        for each in (self._listener, *self._accepted):
            each.close()

    def worker(self, number: int = 0) -> PeerWorkerAddress:
        return PeerWorkerAddress(f"{number:032x}", self._listener.getsockname()[1])

    def num_connections(self) -> int:
        self._listener.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                self._accepted.append(self._listener.accept()[0])
        return len(self._accepted)


def test_a_silent_peer_fails_a_load_long_before_its_deadline(sides, monkeypatch, caplog):
    monkeypatch.setattr(consumer, "_SHORT_SECONDS", 0.05)
    decode = sides(load_timeout=1000.0)
    with SilentProducer() as silent:
        source = PeerSource(REQUEST, "127.0.0.1", [silent.worker()])
        assert decode.load(source, KEYS[:1]) == [5]
        assert "no answer in time" in warnings(caplog)
        assert silent.num_connections() >= 3


def test_a_load_has_its_whole_time_after_the_greeting(sides, monkeypatch):
    monkeypatch.setattr(consumer, "_SHORT_SECONDS", 1.0)
    prefill, decode = sides(), sides()
    expected = filled(prefill)
    copy_out = prefill.worker._leases.copy_out

    def copy_late(fetch, memory):
        time.sleep(1.2)
        copy_out(fetch, memory)

    prefill.worker._leases.copy_out = copy_late
    prefill.hold()
    assert decode.load(prefill.source()) == []
    assert torch.equal(decode.rows[5:35], expected)


class LyingProducer:
    """A producer whose answers to a Fetch are the test's."""

    def __init__(self, answers: list[Any]) -> None:
        self._answers = answers
        self._closed = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.num_connections = 0
        self.address = PeerWorkerAddress("c" * 32, self._listener.getsockname()[1])
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.num_connections += 1
            with connection:
                channel = Channel(connection, time.monotonic() + 10)
                try:
                    channels.greet_consumer(channel, SECRET, self.address.worker_id)
                    channel.receive_from_consumer()
                    channel.send(channels.Opened())
                    channel.receive_from_consumer()
                    for answer in self._answers:
                        if isinstance(answer, bytes):
                            connection.sendall(answer)
                        else:
                            channel.send(answer)
                    if self._answers and self._answers[-1] == b"":
                        self._closed.wait(20)
                except (PeerError, OSError):
                    continue

    def close(self) -> None:
        self._closed.set()
        self._listener.close()


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ([], "closed the connection"),
        ([b"\x00\x00"], "closed the connection"),
        ([b"\xff\xff\xff\xff"], "4294967295 bytes"),
        ([b"\x05\x00\x00\x00hello" + bytes(32)], "not from the other daemon"),
        ([Blocks([1, 2, 3])], "3 blocks in place of 1"),
        ([Blocks([])], "0 blocks in place of 1"),
        ([Blocks([1]), bytes(10)], "closed the connection"),
        ([Blocks([1]), bytes(4096)], "checksum"),
        ([Refusal("no such thing")], "no such thing"),
        ([Blocks([1]), b""], "in time"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_peer_that_lies_or_ends_harms_nothing(sides, caplog, answers, reason):
    decode = sides(load_timeout=1.0)
    peer = LyingProducer(answers)
    source = PeerSource(REQUEST, "127.0.0.1", [peer.address])
    assert decode.load(source, KEYS[:1]) == [5]
    assert reason in warnings(caplog)
    assert not decode.rows.any()
    peer.close()


def test_a_lost_connection_is_resumed_where_it_ended(sides, monkeypatch):
    monkeypatch.setattr(channels, "_BATCH_BYTES", 3000)
    prefill, decode = sides(), sides()
    expected = filled(prefill)
    prefill.hold()
    fetched: list[bytes] = []
    copy_out = prefill.worker._leases.copy_out

    def lose_one(fetch, memory):
        fetched.extend(fetch.keys)
        if len(fetched) == 10:
            raise ConnectionLostError("lost")
        copy_out(fetch, memory)

    def no_refusal(self, message, send=Channel.send):
        if isinstance(message, Refusal):
            raise ConnectionLostError("lost")
        send(self, message)

    prefill.worker._leases.copy_out = lose_one
    monkeypatch.setattr(Channel, "send", no_refusal)
    assert decode.load(prefill.source()) == []
    assert torch.equal(decode.rows[5:35], expected)
    assert len(KEYS) < len(fetched) < 2 * len(KEYS), "blocks that have arrived are not sent again"


@pytest.mark.parametrize(
    "first_bytes",
    [b"", b"\x01", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100, encode(Hello(1, b"n" * 16))],
)
def test_what_is_no_greeting_ends_its_connection_alone(sides, first_bytes):
    prefill, decode = sides(), sides()
    expected = filled(prefill)
    prefill.hold()
    with socket.create_connection(("127.0.0.1", prefill.address.port)) as connection:
        connection.sendall(first_bytes)
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(10)
        with suppress(ConnectionResetError):
            assert connection.recv(100) == b""
    assert decode.load(prefill.source()) == []
    assert torch.equal(decode.rows[5:35], expected)


def test_connections_without_a_greeting_end_soon(sides, monkeypatch):
    """A producer takes few connections at a time, and silent ones leave room for others soon."""
    monkeypatch.setattr(producer, "_GREETING_SECONDS", 0.05)
    monkeypatch.setattr(producer, "_MAX_CONNECTIONS", 2)
    prefill, decode = sides(), sides()
    prefill.hold()
    with ExitStack() as stack:
        address = ("127.0.0.1", prefill.address.port)
        for first_bytes in (b"", encode(Hello(1, b"n" * 16))):
            connection = stack.enter_context(socket.create_connection(address, 10))
            connection.sendall(len(first_bytes).to_bytes(4, "little") + first_bytes)
            while connection.recv(1000):
                pass
        monkeypatch.setattr(producer, "_GREETING_SECONDS", 5.0)
        assert decode.load(prefill.source()) == []


def test_another_version_is_named(sides):
    prefill = sides()
    with socket.create_connection(("127.0.0.1", prefill.address.port)) as connection:
        channel = Channel(connection, time.monotonic() + 10)
        channel.send(Hello(2, b"n" * 16))
        with pytest.raises(PeerError, match="version 1 of the protocol, not 2"):
            channel.receive_answer(Welcome)


def test_nothing_is_written_after_the_end_of_an_epoch(sides):
    """The load is under way when the worker's connector is closed."""
    decode = sides(load_timeout=20.0)
    peer = LyingProducer([Blocks([1]), b""])
    job = TransferJob(11, "peer", True, [DeviceBlocks(0, [5])], [], [KEYS[:1]])
    source = PeerSource(REQUEST, "127.0.0.1", [peer.address])
    decode.step(loads=[PeerLoad(source, TENANT, job)])
    decode.close()
    assert not decode.rows.any()
    peer.close()


@pytest.mark.parametrize("name", ["tcp", "memory"])
def test_sockets_are_private(sides, folder, name):
    side = sides(**transport(name, folder))
    if name == "tcp":
        assert side.worker._server._listener.getsockname()[0] == "127.0.0.1"
    else:
        (path,) = folder.iterdir()
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700


def test_a_start_removes_the_sockets_of_killed_workers(sides, folder):
    settings = transport("memory", folder)
    living = sides(**settings)
    (socket_of_living,) = folder.iterdir()
    dead = folder / "dead.kv"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as left_behind:
        left_behind.bind(str(dead))
    sides(**settings)
    assert not dead.exists()
    assert socket_of_living.exists()
    assert living.address.worker_id in socket_of_living.name


def test_ports_are_tried_from_the_first_one_on(sides):
    first = sides()
    second = sides(port=first.address.port)
    assert first.address.port < second.address.port < first.address.port + producer.MAX_PORTS
