"""What the two halves of the connectors without copies of their own say to each other."""

import msgspec


class SharedStorageStep(msgspec.Struct, array_like=True, frozen=True):
    """Files to read before a step and to write after it, as parallel arrays.

    hashes: of the blocks, which name the files. blocks: of the device.
    """

    load_hashes: list[bytes] = []
    load_blocks: list[int] = []
    store_hashes: list[bytes] = []
    store_blocks: list[int] = []


class SharedStorageReport(msgspec.Struct, array_like=True, frozen=True):
    """Blocks that this rank has written; blocks that it could not read, or write."""

    stored: list[bytes] = []
    lost: list[bytes] = []


class MultiStep(msgspec.Struct, array_like=True, frozen=True):
    """What each child has for a step, in the order of the children."""

    parts: list[bytes]


class MultiReport(msgspec.Struct, array_like=True, frozen=True):
    """What each child of this rank reports, in the order of the children.

    sending: seq_ids whose blocks it does not read any more.
    """

    parts: list[bytes]
    sending: list[list[int]]
