"""Block hashes: the exact bytes, the chain, the salt."""

import struct
from hashlib import sha256

import pytest

from engine_core.kv_cache.hashing import (
    NO_EXTRA_KEYS,
    ROOT,
    BlockHasher,
    ExtraKeys,
    MediaItem,
    NoHashing,
)

FINGERPRINT = b"\x07" * 32


def hashes(tokens: list[int], salt: str | None = None, size: int = 4) -> list[bytes]:
    return keyed(tokens, ExtraKeys(salt), size)


def keyed(tokens: list[int], keys: ExtraKeys, size: int = 4) -> list[bytes]:
    chain: list[bytes] = []
    BlockHasher(size, FINGERPRINT).extend(chain, tokens, keys)
    return chain


def words(*numbers: int) -> bytes:
    return b"".join(struct.pack("<I", number) for number in numbers)


def test_the_chain_is_sha256_over_parent_and_little_endian_tokens():
    first = sha256(ROOT + FINGERPRINT + words(1, 2, 3, 70000)).digest()
    second = sha256(first + words(5, 6, 7, 2**32 - 1)).digest()
    assert hashes([1, 2, 3, 70000, 5, 6, 7, 2**32 - 1]) == [first, second]


def test_a_salt_enters_the_first_block_with_its_length_and_kind():
    key = b"cache_salt:\xc3\xa9"
    first = sha256(ROOT + FINGERPRINT + words(1, 2, 3, 4, len(key)) + key).digest()
    assert hashes([1, 2, 3, 4, 5, 6, 7, 8], salt="é") == [
        first,
        sha256(first + words(5, 6, 7, 8)).digest(),
    ]


def test_only_full_blocks_have_a_hash():
    assert hashes([1, 2, 3]) == []
    assert len(hashes(list(range(55)), size=16)) == 3


def test_extending_token_by_token_gives_the_same_chain():
    tokens = list(range(100, 121))
    hasher = BlockHasher(4, FINGERPRINT)
    chain: list[bytes] = []
    for end in range(len(tokens) + 1):
        hasher.extend(chain, tokens[:end], ExtraKeys("salt"))
        assert len(chain) == end // 4
    assert chain == hashes(tokens, "salt")


def test_what_comes_before_a_block_changes_its_hash():
    one, other = hashes([1, 2, 3, 4, 5, 6, 7, 8]), hashes([4, 3, 2, 1, 5, 6, 7, 8])
    assert one[0] != other[0]
    assert one[1] != other[1]


def test_different_salts_and_no_salt_share_nothing():
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    chains = [hashes(tokens, salt) for salt in (None, "", "a", "b")]
    assert len({block_hash for chain in chains for block_hash in chain}) == 8


@pytest.mark.parametrize("fingerprint", [b"", b"\x08" * 32])
def test_another_model_has_other_hashes(fingerprint):
    chain: list[bytes] = []
    BlockHasher(4, fingerprint).extend(chain, [1, 2, 3, 4])
    assert chain != hashes([1, 2, 3, 4])


def test_without_caching_nothing_is_hashed():
    chain: list[bytes] = []
    NoHashing().extend(chain, list(range(64)))
    assert chain == []


def test_an_adapter_separates_and_is_not_a_salt():
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    chains = [
        keyed(tokens, keys)
        for keys in (NO_EXTRA_KEYS, ExtraKeys(adapter="a"), ExtraKeys(adapter="b"), ExtraKeys("a"))
    ]
    assert len({block_hash for chain in chains for block_hash in chain}) == 8
    assert keyed(tokens, ExtraKeys(adapter="a")) == chains[1]


def media(*items: tuple[bytes, int, int], **keys: str) -> ExtraKeys:
    return ExtraKeys(media=tuple(MediaItem(*item) for item in items), **keys)


def test_media_enter_the_blocks_that_they_overlap():
    """BH-06: two pictures, at [0, 5) and [10, 15)."""
    keys = media((b"hash1", 0, 5), (b"hash2", 10, 15))

    def entered(start: int, end: int) -> list[bytes]:
        found = keys.of_block(start, end)
        return [name for name in (b"hash1", b"hash2") if name in found]

    assert entered(0, 5) == [b"hash1"]
    assert entered(3, 8) == [b"hash1"]
    assert entered(6, 10) == []
    assert entered(0, 15) == [b"hash1", b"hash2"]
    assert keys.of_block(6, 10) == b""


def test_a_picture_in_the_first_block_changes_all_hashes_after_it():
    tokens = list(range(12))
    one, other = keyed(tokens, media((b"a", 1, 3))), keyed(tokens, media((b"b", 1, 3)))
    assert all(left != right for left, right in zip(one, other, strict=True))
    assert keyed(tokens, media((b"a", 1, 3))) == one


def test_a_picture_leaves_the_blocks_before_it_alone():
    tokens = list(range(12))
    plain, one = keyed(tokens, NO_EXTRA_KEYS), keyed(tokens, media((b"a", 5, 7)))
    assert one[0] == plain[0]
    assert one[1] != plain[1]
    assert one[2] != plain[2]


def test_the_same_picture_elsewhere_in_a_block_is_another_key():
    """All placeholders are equal, so only the offset identifies the start."""
    tokens = [9] * 8
    assert keyed(tokens, media((b"a", 4, 8)))[1] != keyed(tokens, media((b"a", 3, 8)))[1]
    same_start_in_block = keyed(tokens, media((b"a", 4, 8))), keyed(tokens, media((b"a", 4, 9)))
    assert same_start_in_block[0] == same_start_in_block[1]


def test_a_salt_goes_with_media_in_the_first_block_only():
    keys = media((b"a", 0, 8), cache_salt="s")
    assert b"cache_salt:s" in keys.of_block(0, 4)
    assert b"media:" in keys.of_block(0, 4)
    assert b"cache_salt:s" not in keys.of_block(4, 8)
    assert b"media:" in keys.of_block(4, 8)


def test_decoded_blocks_know_their_media():
    """BH-13: pictures [11, 21), [30, 48), [48, 55); the fourth block fills while decoding."""
    keys = media((b"aaa", 11, 21), (b"bbb", 30, 48), (b"ccc", 48, 55))
    hasher = BlockHasher(16, FINGERPRINT)
    tokens = list(range(55))
    chain: list[bytes] = []
    hasher.extend(chain, tokens, keys)
    assert len(chain) == 3
    hasher.extend(chain, tokens + [8] * 9, keys)
    assert chain == keyed(tokens + [8] * 9, keys, 16)
    assert chain[:3] == keyed(tokens, media((b"aaa", 11, 21), (b"bbb", 30, 48)), 16)
    other = media((b"aaa", 11, 21), (b"bbb", 30, 48), (b"ddd", 48, 55))
    assert chain[3] != keyed(tokens + [8] * 9, other, 16)[3]
