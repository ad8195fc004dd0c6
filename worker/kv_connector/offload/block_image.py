"""How an offloaded block is written down outside the daemon: a header, then its bytes.

    magic version rank ranks group | key length, bytes | length crc | fingerprint key | crc of these

Little-endian, filled up to HEADER_BYTES; the content follows as it lies in the cache. The
checksum is CRC-32 as zlib has it: 5 GB/s on one core here, where BLAKE2b makes 1, and a plain sum
of words does not see two that are exchanged. It is for accidents, not for attackers: who can
write to the folder or the server can write whatever KV they like.
"""

import struct
import zlib
from dataclasses import dataclass
from typing import Final

from proto.kv_media import FORMAT_VERSION, HEADER_BYTES, MAX_KEY_BYTES

MAGIC: Final = b"tokendKV"
_FORM: Final = struct.Struct(f"<8sHHHHHxxQI32s{MAX_KEY_BYTES}s")
_CHECK: Final = struct.Struct("<I")
assert _FORM.size + _CHECK.size <= HEADER_BYTES


@dataclass(frozen=True, slots=True)
class BlockLabel:
    """What a block is, as far as its header tells. fingerprint: 32 bytes. group: KV cache group."""

    fingerprint: bytes
    key: bytes
    group: int
    rank: int
    num_ranks: int


def seal(image: memoryview, label: BlockLabel) -> None:
    """Write the header before the content, which is in its place. image: [HEADER_BYTES + length]"""
    content = image[HEADER_BYTES:]
    _FORM.pack_into(
        image,
        0,
        MAGIC,
        FORMAT_VERSION,
        label.rank,
        label.num_ranks,
        label.group,
        len(label.key),
        len(content),
        zlib.crc32(content),
        label.fingerprint,
        label.key,
    )
    _CHECK.pack_into(image, _FORM.size, zlib.crc32(image[: _FORM.size]))


def is_storable(image: memoryview, label: BlockLabel) -> bool:
    """Whether this is the block that is meant, every byte of it. image: [HEADER_BYTES + length]"""
    if len(image) < HEADER_BYTES:
        return False
    (check,) = _CHECK.unpack_from(image, _FORM.size)
    if check != zlib.crc32(image[: _FORM.size]):
        return False
    magic, version, rank, ranks, group, key_length, length, crc, fingerprint, key = (
        _FORM.unpack_from(image)
    )
    content = image[HEADER_BYTES:]
    found = BlockLabel(fingerprint, key[:key_length], group, rank, ranks)
    return (
        (magic, version, length) == (MAGIC, FORMAT_VERSION, len(content))
        and found == label
        and crc == zlib.crc32(content)
    )
