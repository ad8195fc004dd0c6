"""The Redis client with a real server, and with scripted servers that reply late or invalidly."""

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from proto.errors import ConfigError
from proto.runtime.redis_client import (
    MISSING,
    RedisConnection,
    RemoteRefusalError,
    RemoteStoreError,
)
from proto.settings.kv_transfer_config import remote_address, remote_settings
from tests.fakes.kv_media import needs_redis, redis_server

SHORT = 0.3


def address(url: str):
    return remote_address(remote_settings({"remote_url": url}))


class ScriptedServer:
    """Replies to each connection's first bytes with `answer`, then stays silent or closes it."""

    def __init__(self, answer: bytes, hang_up: bool = False) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._answer = answer
        self._hang_up = hang_up
        self._open: list[socket.socket] = []
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            client.recv(1 << 16)
            client.sendall(self._answer)
            if self._hang_up:
                client.close()
            self._open.append(client)

    def close(self) -> None:
        self._listener.close()
        for each in self._open:
            each.close()


@pytest.fixture
def scripted() -> Iterator[Callable[..., ScriptedServer]]:
    servers: list[ScriptedServer] = []

    def make(answer: bytes, hang_up: bool = False) -> ScriptedServer:
        servers.append(ScriptedServer(answer, hang_up))
        return servers[-1]

    yield make
    for each in servers:
        each.close()


@needs_redis
def test_values_of_any_length_round_trip(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        connection = RedisConnection(address(server.url), 5.0)
        for length in (0, 1, 1 << 10, (64 << 10) + 1, 3 << 20):
            value = memoryview(bytes(index % 253 for index in range(257)) * (length // 257 + 1))
            value = value[:length]
            assert connection.call(5.0, b"SET", b"a", value) == "OK"
            memory = bytearray(length)
            connection.set_deadline(5.0)
            connection.send([[b"GET", b"a"], [b"GET", b"none"], [b"EXISTS", b"a", b"b"]])
            assert connection.reply_into(memoryview(memory)) == length
            assert memory == value
            assert connection.reply_into(memoryview(memory)) == MISSING
            assert connection.reply() == 1
        connection.close()


@needs_redis
def test_a_value_of_another_length_is_discarded(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        connection = RedisConnection(address(server.url), 5.0)
        connection.call(5.0, b"SET", b"a", b"12345")
        memory = bytearray(4)
        connection.send([[b"GET", b"a"], [b"PING"]])
        assert connection.reply_into(memoryview(memory)) == 5
        assert memory == bytes(4)
        assert connection.reply() == "PONG"


@needs_redis
def test_an_error_reply_leaves_the_connection_usable(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        connection = RedisConnection(address(server.url), 5.0)
        with pytest.raises(RemoteRefusalError, match="ERR"):
            connection.call(5.0, b"NOSUCH")
        assert connection.call(5.0, b"PING") == "PONG"


@needs_redis
def test_password_and_database(tmp_path: Path) -> None:
    with redis_server(tmp_path, "--requirepass", "s3cret") as server:
        secret = tmp_path / "url"
        secret.write_text(server.url.replace("redis://", "redis://:s3cret@").replace("/0", "/3"))
        where = remote_address(remote_settings({"remote_url_file": str(secret)}))
        assert "s3cret" not in repr(where)
        connection = RedisConnection(where, 5.0)
        connection.call(5.0, b"SET", b"a", b"1")
        connection.call(5.0, b"SELECT", b"0")
        assert connection.call(5.0, b"GET", b"a") is None
        connection.call(5.0, b"SELECT", b"3")
        assert connection.call(5.0, b"GET", b"a") == b"1"
        with pytest.raises(RemoteStoreError) as raised:
            RedisConnection(address(server.url), 5.0)
        assert "s3cret" not in str(raised.value)


@needs_redis
def test_a_unix_socket(tmp_path: Path) -> None:
    with redis_server(tmp_path, "--unixsocket", str(tmp_path / "s")):
        connection = RedisConnection(address(f"unix://{tmp_path}/s"), 5.0)
        assert connection.call(5.0, b"PING") == "PONG"


@needs_redis
def test_an_unresponsive_server_times_out(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        connection = RedisConnection(address(server.url), 5.0)
        server.stop()
        with pytest.raises(RemoteStoreError, match="timed out"):
            connection.call(SHORT, b"PING")
        with pytest.raises(RemoteStoreError, match="timed out"):
            RedisConnection(address(server.url), SHORT)


def test_connection_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(RemoteStoreError, match=f"127.0.0.1:{port}: .*refused"):
        RedisConnection(address(f"redis://127.0.0.1:{port}"), SHORT)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"$5\r\nhel",
        b"$5\r\nhelloXX",
        b"$99999999999\r\n",
        b"$-7\r\n",
        b"*2\r\n:1\r\n",
        b"*-5\r\n",
        b":12x\r\n",
        b"-ERR no\r\n",
        b"x" * (80 << 10),
    ],
)
@pytest.mark.parametrize("hang_up", [False, True])
def test_invalid_handshakes_raise_before_the_timeout(
    scripted: Callable[..., ScriptedServer], answer: bytes, hang_up: bool
) -> None:
    with pytest.raises(RemoteStoreError):
        RedisConnection(address(scripted(answer, hang_up).url), SHORT)


@pytest.mark.parametrize(
    "answer", [b"$5\r\nhel", b"$5\r\nhelloXX", b":5\r\n", b"+OK\r\n", b"$x\r\n"]
)
def test_invalid_values_raise(scripted: Callable[..., ScriptedServer], answer: bytes) -> None:
    connection = RedisConnection(address(scripted(b"+PONG\r\n" + answer).url), SHORT)
    connection.set_deadline(SHORT)
    with pytest.raises(RemoteStoreError):
        connection.reply_into(memoryview(bytearray(5)))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({}, "kv_connector_extra_config.remote_url or remote_url_file is needed"),
        ({"remote_url": "redis://a", "remote_url_file": "b"}, "and not both"),
        ({"remote_url": "redis://:hidden@host"}, "must not have a password"),
        ({"remote_url": "http://host"}, "must be redis://"),
        ({"remote_url": "redis://host:port"}, "is not a URL"),
        ({"remote_url": "redis://host/x"}, "names a database that is no number"),
        ({"remote_url": "redis://host", "remote_timeout": -1}, "remote_timeout .* more than 0"),
        ({"remote_url": "redis://host", "load_timeout": "2"}, "Expected `float`, got `str`"),
    ],
)
def test_invalid_settings_are_refused(extra: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        remote_settings(extra)
    assert "hidden" not in str(raised.value)


def test_a_missing_url_file_is_named(tmp_path: Path) -> None:
    settings = remote_settings({"remote_url_file": str(tmp_path / "none")})
    with pytest.raises(ConfigError, match="none: No such file"):
        remote_address(settings)


def test_errors_hide_the_content_of_the_url_file(tmp_path: Path) -> None:
    (tmp_path / "url").write_text("hidden")
    settings = remote_settings({"remote_url_file": str(tmp_path / "url")})
    with pytest.raises(ConfigError, match="must be redis://") as raised:
        remote_address(settings)
    assert "hidden" not in str(raised.value)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"*1\r\n" * 5000, "too many nested arrays"),
        (b"*16000000\r\n", "an array of 16000000 elements"),
        (b"*2\r\n*60000\r\n" + b":1\r\n" * 60000 + b"*60000\r\n", "an array of 60000 elements"),
    ],
    ids=["deep", "long", "long in all"],
)
def test_oversized_array_replies_raise(
    scripted: Callable[..., ScriptedServer], answer: bytes, message: str
) -> None:
    connection = RedisConnection(address(scripted(b"+PONG\r\n" + answer).url), 5.0)
    with pytest.raises(RemoteStoreError, match=message):
        connection.reply()
    connection.close()
