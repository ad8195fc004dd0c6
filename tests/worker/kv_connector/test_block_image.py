"""Headers of stored blocks: every deviation makes a block invalid."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proto.settings.kv_media import HEADER_BYTES, MAX_KEY_BYTES
from worker.kv_connector.offload.block_image import BlockLabel, is_valid, seal

LABEL = BlockLabel(bytes(range(32)), b"a key of some length", 1, 2, 4)
CONTENT = bytes(range(256)) * 5


def image(content: bytes = CONTENT) -> bytearray:
    made = bytearray(HEADER_BYTES) + content
    seal(memoryview(made), LABEL)
    return made


def test_a_sealed_image_is_valid() -> None:
    made = image()
    assert is_valid(memoryview(made), LABEL)
    assert made[HEADER_BYTES:] == CONTENT


@pytest.mark.parametrize(
    "other",
    [
        {"fingerprint": bytes(32)},
        {"key": b"a key of some lengti"},
        {"group": 0},
        {"rank": 3},
        {"num_ranks": 8},
    ],
    ids=lambda each: next(iter(each)),
)
def test_an_image_is_valid_for_its_own_block_only(other: dict[str, object]) -> None:
    assert not is_valid(memoryview(image()), replace(LABEL, **other))


@given(st.integers(0, (HEADER_BYTES + len(CONTENT)) * 8 - 1))
def test_every_flipped_bit_of_header_and_content_is_detected(bit: int) -> None:
    made = image()
    made[bit // 8] ^= 1 << bit % 8
    counts = bit // 8 < 48 + MAX_KEY_BYTES or bit // 8 >= HEADER_BYTES
    if counts:
        assert not is_valid(memoryview(made), LABEL)


@given(st.integers(0, HEADER_BYTES + len(CONTENT) - 1))
def test_a_truncated_image_is_invalid(length: int) -> None:
    assert not is_valid(memoryview(image())[:length], LABEL)
    assert not is_valid(memoryview(image()[:length] + bytes(len(CONTENT))), LABEL)


def test_the_longest_key_fits_into_the_header() -> None:
    label = replace(LABEL, key=bytes(range(MAX_KEY_BYTES)))
    made = bytearray(HEADER_BYTES + 8)
    seal(memoryview(made), label)
    assert is_valid(memoryview(made), label)
