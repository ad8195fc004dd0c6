"""The manager of a Redis server against a real redis-server, and against an unreachable one."""

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_core.kv_connector.offload import remote_lookups, remote_manager
from engine_core.kv_connector.offload.base import ManagerContext, OffloadingEvent
from engine_core.kv_connector.offload.remote_lookups import RemoteLookups
from engine_core.kv_connector.offload.remote_manager import RemoteOffloadingManager, make_manager
from proto.runtime.redis_client import RedisConnection
from proto.settings.kv_media import media_folder, remote_name
from proto.settings.kv_transfer_config import remote_address, remote_settings
from tests.fakes.kv_media import (
    FINGERPRINT,
    RedisServer,
    eventually,
    key,
    needs_redis,
    redis_server,
)

BLOCK_BYTES = 100
FOLDER = media_folder(FINGERPRINT, 2, 1)


class Store:
    """Managers of two-rank daemons that share one server, and stand-ins for their workers."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.rings = threading.Semaphore(0)
        self._open: list[RemoteOffloadingManager] = []

    def manager(self, connected: bool = True, **extra: object) -> RemoteOffloadingManager:
        context = ManagerContext(FINGERPRINT, 2, BLOCK_BYTES, self.rings.release)
        made = make_manager({"remote_url": self.url} | extra, context)
        self._open.append(made)
        if connected:
            eventually(lambda: made._lookups.connected)
        return made

    def asked(self, manager: RemoteOffloadingManager, *numbers: int) -> int:
        """Look keys up like a request: query, wait for the notification, query again."""
        keys = [key(each) for each in numbers]
        while (found := manager.lookup(keys)) is None:
            assert self.rings.acquire(timeout=20.0), "no notification"
        return found

    def write(self, *numbers: int, ranks: tuple[int, ...] = (0, 1)) -> None:
        connection = self.connect()
        for number in numbers:
            for rank in ranks:
                connection.call(5.0, b"SET", remote_name(FOLDER, key(number), rank), b"a block")

    def connect(self) -> RedisConnection:
        return RedisConnection(remote_address(remote_settings({"remote_url": self.url})), 5.0)

    def close(self) -> None:
        for each in self._open:
            each.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path) as running:
        yield running


@pytest.fixture
def store(server: RedisServer) -> Iterator[Store]:
    made = Store(server.url)
    yield made
    made.close()


@needs_redis
def test_lookup_queries_then_notifies_then_answers(store: Store) -> None:
    store.write(1, 2, 4)
    manager = store.manager()
    keys = [key(each) for each in (1, 2, 3, 4)]
    assert manager.lookup(keys) is None
    assert store.rings.acquire(timeout=20.0)
    assert manager.lookup(keys) == 2
    assert manager.contains(keys) == [True, True, False, True], "one query for all blocks"


@needs_redis
def test_a_block_is_present_only_when_stored_by_all_ranks(store: Store) -> None:
    store.write(1, ranks=(0,))
    assert store.asked(store.manager(), 1) == 0


@needs_redis
def test_a_pending_query_is_not_repeated(store: Store) -> None:
    manager = store.manager()
    asked: list[bytes] = []
    ask = manager._lookups.request
    manager._lookups.request = lambda keys: (asked.extend(keys), ask(keys))[1]  # type: ignore
    for _ in range(5):
        manager.lookup([key(1), key(2)])
    assert store.asked(manager, 1, 2) == 0
    assert sorted(asked) == [key(1), key(2)]


@needs_redis
def test_absence_is_cached_for_a_while(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_manager, "ABSENT_SECONDS", 0.2)
    manager = store.manager()
    assert store.asked(manager, 1) == 0
    store.write(1)
    assert manager.lookup([key(1)]) in (0, None)
    eventually(lambda: store.asked(manager, 1) == 1)


@needs_redis
def test_presence_is_cached_for_a_while(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_manager, "PRESENT_SECONDS", 0.2)
    store.write(1)
    manager = store.manager()
    assert store.asked(manager, 1) == 1
    store.connect().call(5.0, b"FLUSHALL")
    eventually(lambda: store.asked(manager, 1) == 0)


@needs_redis
def test_a_long_prompt_is_queried_in_parts(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_manager, "MAX_LOOKUP_KEYS", 3)
    store.write(*range(1, 9))
    assert store.asked(store.manager(), *range(1, 10)) == 8


@needs_redis
def test_the_presence_cache_is_bounded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_manager, "MAX_CACHED", 4)
    manager = store.manager()
    for number in range(20):
        store.asked(manager, number)
    assert len(manager._cache) == 4


@needs_redis
def test_prepare_store_and_complete_store(store: Store) -> None:
    store.write(1)
    manager = store.manager()
    assert store.asked(manager, 1, 2) == 1
    output = manager.prepare_store([key(1), key(2), key(3), key(3)])
    assert output is not None
    assert (output.keys, output.slots, output.evicted) == ([key(2), key(3)], [], [])
    again = manager.prepare_store([key(2)])
    assert again is not None
    assert again.keys == [], "the block is being stored"
    manager.complete_store([key(2), key(3)])
    assert manager.lookup([key(1), key(2), key(3)]) == 3
    assert list(manager.take_events()) == [OffloadingEvent([key(2), key(3)], False, "remote")]


@needs_redis
def test_a_failed_load_marks_the_block_absent(store: Store) -> None:
    store.write(1)
    manager = store.manager()
    assert store.asked(manager, 1) == 1
    assert manager.prepare_load([key(1)]) == []
    manager.complete_load([key(1)], success=False)
    assert manager.lookup([key(1)]) == 0


@needs_redis
def test_consecutive_load_failures_pause_the_store(store: Store) -> None:
    store.write(1, 2, 3)
    manager = store.manager(remote_retry_seconds=60)
    for number in (1, 2):
        assert store.asked(manager, number) == 1
        manager.prepare_load([key(number)])
        manager.complete_load([key(number)], success=False)
    assert manager.lookup([key(3)]) == 0, "the result is not NOT_KNOWN_YET"


@needs_redis
def test_nothing_is_added_to_a_long_queue_of_stores(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_manager, "MAX_BYTES_IN_FLIGHT", 500)
    manager = store.manager()
    assert manager.prepare_store([key(1), key(2)]) is not None
    assert manager.prepare_store([key(3)]) is None
    manager.on_worker_restart()
    assert manager.prepare_store([key(3)]) is not None


@needs_redis
def test_consecutive_store_failures_pause_stores(store: Store) -> None:
    manager = store.manager(remote_retry_seconds=60)
    for number in (1, 2):
        assert manager.prepare_store([key(number)]) is not None
        manager.complete_store([key(number)], success=False)
    assert manager.prepare_store([key(3)]) is None


@needs_redis
def test_reset_empties_the_store_of_this_model_only(store: Store) -> None:
    store.write(*range(1, 3000))
    connection = store.connect()
    connection.call(5.0, b"SET", b"another:1", b"x")
    manager = store.manager()
    manager.prepare_load([key(1)])
    assert not manager.reset_cache()
    manager.complete_load([key(1)])
    assert manager.reset_cache()
    eventually(lambda: connection.call(5.0, b"DBSIZE") == 1)
    assert store.asked(manager, 1) == 0


@needs_redis
def test_a_reset_that_the_server_refuses_is_tried_again(store: Store) -> None:
    store.write(1, 2)
    connection = store.connect()
    connection.call(5.0, b"ACL", b"SETUSER", b"default", b"-scan")
    manager = store.manager(remote_retry_seconds=0.05)
    assert manager.reset_cache()
    eventually(lambda: manager._lookups._failure_logged)
    connection.call(5.0, b"ACL", b"SETUSER", b"default", b"+scan")
    eventually(lambda: connection.call(5.0, b"DBSIZE") == 0)
    eventually(lambda: manager._lookups.connected)
    assert store.asked(manager, 1) == 0


@needs_redis
def test_a_stopped_server_costs_one_timeout(store: Store, server: RedisServer) -> None:
    store.write(1)
    manager = store.manager(remote_timeout=0.2, remote_retry_seconds=0.2)
    assert store.asked(manager, 1) == 1
    server.stop()
    assert store.asked(manager, 2) == 0
    assert manager.prepare_store([key(9)]) is None
    for number in range(100):
        assert manager.lookup([key(1000 + number)]) == 0, "no request waits"
    server.go_on()
    eventually(lambda: manager._lookups.connected)
    store.write(3)
    assert store.asked(manager, 3) == 1


@needs_redis
def test_the_manager_reconnects_to_a_restarted_server(store: Store, server: RedisServer) -> None:
    store.write(1)
    manager = store.manager(remote_retry_seconds=0.1)
    assert store.asked(manager, 1) == 1
    server.kill()
    assert store.asked(manager, 2) == 0
    server.start()
    eventually(lambda: manager._lookups.connected)
    store.write(3)
    assert store.asked(manager, 3) == 1


def test_an_unreachable_server_has_no_blocks_and_gets_none() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    store = Store(f"redis://127.0.0.1:{port}")
    manager = store.manager(connected=False)
    assert manager.lookup([key(1)]) == 0
    assert manager.contains([key(1)]) == [False]
    assert manager.prepare_store([key(1)]) is None
    store.close()


def test_shutdown_does_not_wait_for_name_resolution(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, never = threading.Event(), threading.Event()

    def resolve(*words: object, **names: object) -> list[object]:
        asked.set()
        never.wait()
        raise OSError("no such host")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    store = Store("redis://some.host")
    manager = store.manager(connected=False)
    assert asked.wait(20.0)
    begun = time.monotonic()
    assert manager.lookup([key(1)]) == 0
    store.close()
    assert time.monotonic() - begun < 10.0
    never.set()


def test_a_query_after_shutdown_is_answered_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    store = Store(f"redis://127.0.0.1:{port}")
    manager = store.manager(connected=False)
    manager._lookups.request([key(1)])  # it was connected at the check
    assert store.rings.acquire(timeout=20.0)
    assert manager.lookup([key(1)]) == 0
    store.close()


@needs_redis
def test_discard_removes_the_values_and_is_no_failure(store: Store) -> None:
    store.write(1, 2, 3, 5)
    manager = store.manager(remote_retry_seconds=60)
    assert store.asked(manager, 1, 2, 3) == 3
    assert manager.prepare_store([key(4)]) is not None
    for _ in range(3):
        manager.discard([key(1), key(2), key(4), key(5)])
    connection = store.connect()
    store.write(4)  # a worker is copying
    eventually(lambda: not manager._lookups.is_being_removed(key(4)))
    manager.complete_store([key(4)])
    eventually(lambda: connection.call(5.0, b"DBSIZE") in (2, 4))
    eventually(lambda: not manager._lookups.is_being_removed(key(4)))
    assert connection.call(5.0, b"DBSIZE") == 2, "3, on both ranks"
    manager._cache.clear()
    assert [store.asked(manager, each) for each in range(1, 6)] == [0, 0, 1, 0, 0]
    output = manager.prepare_store([key(1)])
    assert output is not None
    assert output.keys == [key(1)]
    removed = [each.keys for each in manager.take_events() if each.removed]
    assert removed == [[key(1), key(2)]]


@needs_redis
def test_blocks_discarded_while_disconnected_are_removed_on_reconnect(
    store: Store, server: RedisServer
) -> None:
    store.write(1, 2)
    manager = store.manager(remote_timeout=0.2, remote_retry_seconds=0.1)
    server.stop()
    manager.discard([key(1)])
    assert store.asked(manager, 2) == 0
    server.go_on()
    eventually(lambda: not manager._lookups.is_being_removed(key(1)))
    assert store.connect().call(5.0, b"DBSIZE") == 2


@needs_redis
def test_too_many_discarded_blocks_empty_the_store_of_this_model(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_lookups, "MAX_DISCARDED", 2)
    store.write(1, 2, 3, 4)
    store.manager().discard([key(1), key(2), key(3)])
    connection = store.connect()
    eventually(lambda: connection.call(5.0, b"DBSIZE") == 0)


@needs_redis
def test_an_unexpected_error_answers_all_queries_and_the_thread_survives(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write(1)
    manager = store.manager(remote_retry_seconds=0.1)
    assert store.asked(manager, 1) == 1
    with monkeypatch.context() as patch:
        patch.setattr(RemoteLookups, "_query", lambda *words: [][0])
        assert store.asked(manager, 2) == 0
        eventually(lambda: store.asked(manager, 3) == 0)
    store.write(4)
    eventually(lambda: manager._lookups.connected)
    assert store.asked(manager, 4) == 1


@needs_redis
def test_present_blocks_are_not_loaded_while_loads_fail(store: Store) -> None:
    store.write(1, 2, 3)
    manager = store.manager(remote_retry_seconds=60)
    assert store.asked(manager, 1, 2, 3) == 3
    for number in (1, 2):
        manager.prepare_load([key(number)])
        manager.complete_load([key(number)], success=False)
    assert manager.lookup([key(3)]) == 0
    assert manager.contains([key(3)]) == [False]
    output = manager.prepare_store([key(3)])
    assert output is not None
    assert output.keys == [], "the cached result still says present"


@needs_redis
def test_cancelled_stores_do_not_count_as_failures(store: Store) -> None:
    manager = store.manager(remote_retry_seconds=60)
    for number in range(10):
        assert manager.prepare_store([key(number)]) is not None
        manager.complete_store([key(number)], success=False, cancelled=True)
    assert store.asked(manager, 1) == 0


@pytest.mark.parametrize(("mode", "is_told"), [(0o600, False), (0o640, True), (0o604, True)])
def test_a_world_readable_secret_is_warned_about_and_not_printed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, is_told: bool
) -> None:
    secret = tmp_path / "url"
    secret.write_text("redis://:hidden@127.0.0.1:1")
    secret.chmod(mode)
    context = ManagerContext(FINGERPRINT, 1, BLOCK_BYTES, lambda: None)
    with caplog.at_level("WARNING", logger="tokend.kv_media"):
        make_manager({"remote_url_file": str(secret)}, context).close()
    assert (f"remote_url_file {secret} may be read by others" in caplog.text) == is_told
    assert "hidden" not in caplog.text
