"""The prefix index: duplicates, prefixes, forgetting."""

import pytest

from engine_core.kv_cache.prefix_index import PrefixIndex


def index_of(*entries: tuple[bytes, int]) -> PrefixIndex:
    index = PrefixIndex()
    for block_hash, block in entries:
        index.insert(block_hash, block)
    return index


def test_an_unknown_hash_has_no_block():
    assert PrefixIndex().get(b"a") is None


def test_the_block_inserted_first_is_returned_then_the_next():
    index = index_of((b"a", 7), (b"a", 3), (b"a", 5))
    assert len(index) == 1
    found = []
    for _ in range(3):
        block = index.get(b"a")
        found.append(block)
        index.remove(b"a", block)
    assert found == [7, 3, 5]
    assert index.get(b"a") is None
    assert len(index) == 0


@pytest.mark.parametrize("removed", [3, 5])
def test_removing_a_later_duplicate_keeps_the_first(removed):
    index = index_of((b"a", 7), (b"a", 3), (b"a", 5))
    index.remove(b"a", removed)
    assert index.get(b"a") == 7
    assert sorted(index.items()) == sorted({(b"a", 7), (b"a", 3), (b"a", 5)} - {(b"a", removed)})


def test_the_longest_prefix_ends_at_the_first_miss():
    index = index_of((b"a", 1), (b"b", 2), (b"d", 4))
    assert index.longest_prefix([b"a", b"b", b"c", b"d"]) == [1, 2]
    assert index.longest_prefix([b"c", b"a"]) == []


def test_removing_an_unknown_block_is_an_error():
    index = index_of((b"a", 1), (b"b", 2), (b"b", 3))
    for block_hash, block in ((b"x", 1), (b"a", 2), (b"b", 1)):
        with pytest.raises(KeyError):
            index.remove(block_hash, block)
    assert sorted(index.items()) == [(b"a", 1), (b"b", 2), (b"b", 3)]


def test_clear_forgets_duplicates_too():
    index = index_of((b"a", 1), (b"a", 2))
    index.clear()
    assert list(index.items()) == []
    assert len(index) == 0
