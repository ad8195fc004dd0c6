"""Block hashes: the exact bytes, the chain, the salt."""

import struct
from hashlib import sha256

import pytest

from engine_core.block_hashing import ROOT, BlockHasher, ExtraKeys
from tests.fakes.images import picture, with_pictures
from tests.fakes.lora import lora_request

FINGERPRINT = b"\x07" * 32


def hashes(tokens: list[int], salt: str | None = None, size: int = 4) -> list[bytes]:
    chain: list[bytes] = []
    BlockHasher(size, FINGERPRINT).extend(chain, tokens, ExtraKeys(salt))
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


def test_a_block_has_the_digest_of_the_embeddings_in_it():
    """Also the block that a prompt ends in: its other tokens are outputs."""
    tokens, rows = [0, 0, 0, 0, 0, 7, 8, 9, 1, 2, 3, 4], bytes(range(40))
    keys = ExtraKeys("s", prompt_embeds=rows, num_prompt_tokens=5)
    assert keys.of_block(0, 4) == [
        ("cache_salt", b"s"),
        ("prompt_embeds", sha256(rows[:32]).digest()),
    ]
    assert keys.of_block(4, 8) == [("prompt_embeds", sha256(rows[32:]).digest())]
    assert keys.of_block(8, 12) == []
    chain: list[bytes] = []
    hasher = BlockHasher(4, FINGERPRINT)
    for end in (5, 6, 12):
        hasher.extend(chain, tokens[:end], keys)
    other: list[bytes] = []
    hasher.extend(other, tokens, ExtraKeys("s", rows[:-1] + b"!", 5))
    assert chain[0] == other[0]
    assert not set(chain[1:]) & set(other[1:])
    key = b"prompt_embeds:" + sha256(rows[32:]).digest()
    assert chain[1] == sha256(chain[0] + words(0, 7, 8, 9, len(key)) + key).digest()
    assert chain[2] == sha256(chain[1] + words(1, 2, 3, 4)).digest()


def image_hashes(*parts, salt=None):
    """Hashes of a prompt with pictures (number, rows), in blocks of 4."""
    tokens, features = with_pictures(parts)
    chain: list[bytes] = []
    BlockHasher(4, FINGERPRINT).extend(chain, tokens, ExtraKeys(salt, mm_features=features))
    return chain


def image_key(number, place):
    return ("image", picture(number, 1).mm_hash + struct.pack("<i", place))


def test_a_block_names_each_image_in_it_and_where_that_begins():
    tokens, features = with_pictures([[1, 2, 3], (1, 3), (2, 1), [4, 5, 6, 7]])
    keys = ExtraKeys("s", mm_features=features)
    assert keys.end == 3 + 5 + 3
    assert keys.of_block(0, 4) == [("cache_salt", b"s"), image_key(1, 3)]
    assert keys.of_block(4, 8) == [image_key(1, -1)]
    assert keys.of_block(8, 12) == [image_key(2, 0)]
    assert keys.of_block(12, 16) == []
    assert ExtraKeys(mm_features=features).of_block(0, 3) == []
    assert keys.kinds == ["cache_salt", "image"]
    chain: list[bytes] = []
    hasher = BlockHasher(4, FINGERPRINT)
    for end in (3, 4, 9, len(tokens)):
        hasher.extend(chain, tokens[:end], keys)
    assert chain == image_hashes([1, 2, 3], (1, 3), (2, 1), [4, 5, 6, 7], salt="s")


def test_text_before_an_image_has_the_hashes_of_text_alone():
    text, plain = list(range(9)), hashes(list(range(9)))
    assert image_hashes(text, (1, 6))[:2] == plain
    assert image_hashes(text, (1, 6))[:2] == image_hashes(text, (2, 6))[:2]


def test_other_images_and_other_places_share_nothing_from_there_on():
    """Also the blocks behind an image, of text alone."""
    same = image_hashes([1, 2], (1, 6), [3] * 8)
    assert same == image_hashes([1, 2], (1, 6), [3] * 8)
    others = [
        image_hashes([1, 2], (2, 6), [3] * 8),
        hashes(with_pictures([[1, 2], (1, 6), [3] * 8])[0]),
        image_hashes([1, 2], (1, 6), [3] * 8, salt="a"),
    ]
    for other in others:
        assert not set(same) & set(other)
    swapped = [image_hashes((one, 2), (two, 2), [5] * 4) for one, two in ((1, 2), (2, 1), (1, 1))]
    assert len({chain[-1] for chain in swapped}) == 3
    tokens, (feature, _) = with_pictures([(1, 2), (2, 2)])
    moved = [*tokens[:4], *tokens[4:]]
    keys = [
        ExtraKeys(mm_features=[feature]),
        ExtraKeys(mm_features=[picture(1, 2, offset=4)]),
    ]
    chains: list[list[bytes]] = [[], []]
    for chain, each in zip(chains, keys, strict=True):
        BlockHasher(4, FINGERPRINT).extend(chain, moved, each)
    assert not set(chains[0]) & set(chains[1]), "the same tokens, another of them is the image"
    assert keys[0].digest != keys[1].digest != b""


def test_an_adapter_is_named_by_its_content_and_scale():
    """Not by its name, id or path; in the first block, from which the chain goes on."""
    lora = lora_request(1)
    assert ExtraKeys(lora_request=lora).of_block(0, 4) == [("lora", lora.digest)]
    assert ExtraKeys(lora_request=lora).of_block(4, 8) == []
    halved = lora_request(1, scale=0.5)
    assert ExtraKeys("s", lora_request=halved).of_block(0, 4) == [
        ("lora", lora.digest + struct.pack("<d", 0.5)),
        ("cache_salt", b"s"),
    ]
    same = lora_request(1, lora_int_id=9, lora_name="b", path="/b")
    digests = [
        ExtraKeys(lora_request=each).digest for each in (lora, same, halved, lora_request(2))
    ]
    assert digests[0] == digests[1]
    assert len({*digests, b""}) == 4
    assert ExtraKeys("s", lora_request=lora).kinds == ["lora", "cache_salt"]
