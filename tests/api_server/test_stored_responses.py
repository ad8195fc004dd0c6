"""Limits of stored responses."""

import random
import tracemalloc

import pytest

from api_server.generation.encoders.responses import stored as stored_responses
from api_server.generation.encoders.responses.stored import History, StoredResponses, json_size
from tests.fakes.clock import FakeClock

ANN, BEN = (0, "ann"), (0, "ben")
NO_ITEMS = History([], 2)


def response(name: str, size: int = 10) -> dict:
    return {"id": name, "text": "x" * size, "output": []}


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def test_the_oldest_response_of_a_client_over_its_limit_is_evicted(clock):
    stored = StoredResponses(4000, 60, clock)
    stored.store_response(BEN, response("b", 500), NO_ITEMS)
    for number in range(10):
        stored.store_response(ANN, response(str(number), 280), NO_ITEMS)
    assert [stored.find_stored(ANN, str(number)) is not None for number in range(10)] == (
        [False] * 7 + [True] * 3
    )
    assert stored.find_stored(BEN, "b")


def test_the_oldest_response_is_evicted_above_the_total_limit(clock):
    stored = StoredResponses(4000, 60, clock)
    owners = [(number, "") for number in range(8)]
    for owner in owners:
        stored.store_response(owner, response("r", 900), NO_ITEMS)
    assert [stored.find_stored(owner, "r") is not None for owner in owners] == [False] * 4 + [
        True
    ] * 4
    assert stored.num_bytes <= 4000


def test_the_number_of_responses_is_limited(clock, monkeypatch):
    monkeypatch.setattr(stored_responses, "MAX_STORED_PER_OWNER", 3)
    monkeypatch.setattr(stored_responses, "MAX_STORED", 5)
    stored = StoredResponses(1 << 20, 60, clock)
    for number in range(4):
        stored.store_response(ANN, response(str(number)), NO_ITEMS)
    assert len(stored) == 3
    for number in range(3):
        stored.store_response(BEN, response(str(number)), NO_ITEMS)
    assert len(stored) == 5
    assert stored.find_stored(ANN, "1") is None


def test_responses_expire(clock):
    stored = StoredResponses(1 << 20, 60, clock)
    stored.store_response(ANN, response("a"), NO_ITEMS)
    clock.now += 59
    stored.store_response(ANN, response("b"), NO_ITEMS)
    assert stored.find_stored(ANN, "a")
    clock.now += 1
    assert stored.find_stored(ANN, "a") is None
    assert stored.find_stored(ANN, "b")
    clock.now += 59
    assert not stored.delete_stored(ANN, "b")
    assert stored.num_bytes == len(stored) == 0


def test_oversized_responses_are_not_stored(clock):
    stored = StoredResponses(4000, 60, clock)
    stored.store_response(
        ANN, response("a", 900), History([{"id": "msg_1", "content": "x" * 200}], 230)
    )
    assert stored.find_stored(ANN, "a") is None
    stored.store_response(ANN, response("a", 900), NO_ITEMS)
    assert stored.find_stored(ANN, "a")


def test_the_byte_count_equals_the_stored_responses(clock):
    rng = random.Random(3)
    stored = StoredResponses(8000, 50, clock)
    for _ in range(2000):
        owner, name = rng.choice([ANN, BEN, (1, "")]), str(rng.randrange(20))
        clock.now += rng.random() * 5
        if rng.random() < 0.2:
            stored.delete_stored(owner, name)
        else:
            stored.store_response(owner, response(name, rng.randrange(2500)), NO_ITEMS)
        kept = [
            found
            for each in (ANN, BEN, (1, ""))
            for number in range(20)
            if (found := stored.find_stored(each, str(number)))
        ]
        assert stored.num_bytes == sum(each.num_bytes for each in kept) <= 8000
        assert all(each.num_bytes >= json_size(each.response) + 2 for each in kept)
        assert len(stored) == len(kept)


def test_an_item_is_that_of_the_newest_response_there_is(clock):
    """What a deleted response said of an item neither comes back nor stays in memory."""
    stored = StoredResponses(64 << 20, 60, clock)

    def store(name: str, item_id: str, text: str) -> None:
        items = [{"id": item_id, "content": text}]
        stored.store_response(ANN, response(name), History(items, json_size(items)))

    for number in range(20):
        store(f"a{number}", f"m{number}", "small")
    tracemalloc.start()
    for number in range(20):
        store("b", f"m{number}", chr(97 + number) * (1 << 20))
        (found,) = stored.find_items(ANN, [f"m{number}"]).values()
        assert len(found["content"]) == 1 << 20
        assert stored.delete_stored(ANN, "b")
    del found
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held < 1 << 20
    names = [f"m{number}" for number in range(20)]
    found = stored.find_items(ANN, [*names, "other"])
    assert {name: item["content"] for name, item in found.items()} == dict.fromkeys(names, "small")
    assert stored.find_items(BEN, names) == {}
    clock.now += 60
    assert stored.find_items(ANN, names) == {}
