"""Blocks in a real redis-server: shared, verified, and bounded delay if unreachable."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from proto.runtime.redis_client import RedisConnection
from proto.settings.kv_media import media_folder, remote_name
from proto.settings.kv_transfer_config import remote_address, remote_settings
from tests.fakes.kv_media import FINGERPRINT, Rank, RedisServer, key, needs_redis, redis_server
from worker.kv_connector.offload.remote_medium import make_handlers

pytestmark = needs_redis


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path) as running:
        yield running


@pytest.fixture
def make_rank(server: RedisServer) -> Iterator[Callable[..., Rank]]:
    ranks: list[Rank] = []

    def make(factor: int = 1, rank: int = 0, num_ranks: int = 1, **extra: object) -> Rank:
        extra = {"remote_url": server.url} | extra
        ranks.append(Rank(make_handlers, extra, "remote", factor, rank, num_ranks))
        return ranks[-1]

    yield make
    for each in ranks:
        each.close()


def connect(server: RedisServer) -> RedisConnection:
    return RedisConnection(remote_address(remote_settings({"remote_url": server.url})), 5.0)


def name_of(rank: Rank, number: int, index: int = 0, num_ranks: int = 1) -> bytes:
    folder = media_folder(FINGERPRINT, num_ranks, 1)
    return remote_name(folder, key(number), index)


@pytest.mark.parametrize("factor", [1, 4])
def test_another_daemon_loads_the_stored_blocks(
    make_rank: Callable[..., Rank], factor: int
) -> None:
    first, second = make_rank(factor), make_rank(factor)
    stored = list(range(1, 1 + 2 * factor))
    assert first.stored(stored, [key(1), key(2)])
    into = [11, 10, 13, 12, 15, 14, 17, 16][: 2 * factor]
    second.cache.buffer.zero_()
    assert second.loaded(into, [key(1), key(2)]) == []
    assert [second.bytes_of(each) for each in into] == [first.bytes_of(each) for each in stored]


def test_blocks_beyond_one_batch_of_requests_are_loaded(make_rank: Callable[..., Rank]) -> None:
    rank = make_rank()
    keys = [key(each) for each in range(1, 20)]
    assert rank.stored(list(range(1, 20)), keys)
    before = [rank.bytes_of(each) for each in range(1, 20)]
    rank.cache.buffer.zero_()
    assert rank.loaded(list(range(1, 20)), keys) == []
    assert [rank.bytes_of(each) for each in range(1, 20)] == before


def test_every_rank_has_its_own_values(make_rank: Callable[..., Rank]) -> None:
    ranks = [make_rank(rank=each, num_ranks=2) for each in (0, 1)]
    assert ranks[0].stored([1], [key(1)])
    assert ranks[1].loaded([5], [key(1)]) == [5]
    assert ranks[1].stored([2], [key(1)])
    assert ranks[1].loaded([5], [key(1)]) == []
    assert ranks[1].bytes_of(5) == ranks[1].bytes_of(2)


@pytest.mark.parametrize("kind", ["another's", "bit flip", "short", "long"])
def test_wrong_content_fails_its_block_and_is_removed(
    make_rank: Callable[..., Rank], server: RedisServer, kind: str
) -> None:
    rank = make_rank()
    assert rank.stored([1, 2, 3], [key(1), key(2), key(3)])
    name = name_of(rank, 2)
    connection = connect(server)
    value = connection.call(5.0, b"GET", name)
    assert isinstance(value, bytes)
    content = bytearray(value)
    match kind:
        case "another's":
            other = connection.call(5.0, b"GET", name_of(rank, 1))
            assert isinstance(other, bytes)
            content = bytearray(other)
        case "bit flip":
            content[-1] ^= 1
        case "short":
            del content[-1]
        case "long":
            content += b"1"
    connection.call(5.0, b"SET", name, bytes(content))
    assert rank.loaded([8, 9, 10], [key(1), key(2), key(3)]) == [9]
    assert rank.loaded([8], [key(1)]) == []
    assert connection.call(5.0, b"EXISTS", name) == 0


def test_an_evicted_value_fails_its_block(
    make_rank: Callable[..., Rank], server: RedisServer
) -> None:
    rank = make_rank()
    assert rank.stored([1, 2], [key(1), key(2)])
    connect(server).call(5.0, b"DEL", name_of(rank, 1))
    assert rank.loaded([8, 9], [key(1), key(2)]) == [8]


def test_stores_are_skipped_when_the_store_is_full(tmp_path: Path) -> None:
    with redis_server(tmp_path, "--maxmemory", "1", "--maxmemory-policy", "noeviction") as server:
        rank = Rank(make_handlers, {"remote_url": server.url}, "remote")
        assert not rank.stored([1], [key(1)])
        rank.close()


def test_an_unreachable_server_costs_no_time_until_it_returns(
    make_rank: Callable[..., Rank], server: RedisServer
) -> None:
    rank = make_rank(remote_retry_seconds=0.2)
    assert rank.stored([1], [key(1)])
    server.kill()
    assert rank.loaded([5], [key(1)]) == [5]
    started = time.monotonic()
    assert not rank.stored([1], [key(1)])
    assert time.monotonic() - started < 5.0
    server.start()
    while not rank.stored([1], [key(1)]):
        assert time.monotonic() - started < 20.0, "no reconnection"
    while rank.loaded([5], [key(1)]):
        assert time.monotonic() - started < 20.0, "no reconnection"
    assert rank.bytes_of(5) == rank.bytes_of(1)


def test_a_stopped_server_costs_one_timeout(
    make_rank: Callable[..., Rank], server: RedisServer
) -> None:
    rank = make_rank(remote_timeout=0.3, remote_retry_seconds=60.0)
    assert rank.stored([1], [key(1)])
    assert rank.loaded([5], [key(1)]) == []
    server.stop()
    for number in range(20):
        assert rank.loaded([5], [key(1)]) == [5]
        assert not rank.stored([1], [key(number)])
    # only the first call waits for the timeout; 40 calls would exceed the limit of the test
    server.go_on()


def test_replies_after_the_timeout_are_discarded(
    make_rank: Callable[..., Rank], server: RedisServer
) -> None:
    rank = make_rank(remote_timeout=0.3, remote_retry_seconds=0.1)
    assert rank.stored([1, 2], [key(1), key(2)])
    assert rank.loaded([5], [key(1)]) == []
    server.stop()
    assert rank.loaded([5], [key(1)]) == [5]
    server.go_on()
    started = time.monotonic()
    while rank.loaded([6], [key(2)]):
        assert time.monotonic() - started < 20.0, "no reconnection"
    assert rank.bytes_of(6) == rank.bytes_of(2)
