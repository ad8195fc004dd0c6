"""Block hashes: the exact bytes, the chain, the salt."""

import struct
from hashlib import sha256

import pytest

from engine_core.kv_cache.hashing import (
    ROOT,
    BlockHasher,
)

FINGERPRINT = b"\x07" * 32


def hashes(tokens: list[int], salt: str | None = None, size: int = 4) -> list[bytes]:
    chain: list[bytes] = []
    BlockHasher(size, FINGERPRINT).extend(chain, tokens, salt)
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
        hasher.extend(chain, tokens[:end], "salt")
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
