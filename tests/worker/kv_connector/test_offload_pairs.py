"""The mapping from device blocks to parts of offloaded blocks."""

from proto.messages.kv_connector import DeviceBlocks, TransferJob
from worker.kv_connector.offload.base import BlockPair, block_pairs, device_blocks


def test_pairs_with_a_misaligned_first_block_and_a_short_last_one() -> None:
    job = TransferJob(1, "CPU", True, [DeviceBlocks(0, [7, 2, 8, 4, 1], skip=2)], [[9, 4]])
    assert list(block_pairs(job, 4)) == [
        BlockPair(7, 9, 2),
        BlockPair(2, 9, 3),
        BlockPair(8, 4, 0),
        BlockPair(4, 4, 1),
        BlockPair(1, 4, 2),
    ]
    assert device_blocks(job) == [7, 2, 8, 4, 1]


def test_pairs_are_grouped_by_kv_cache_group() -> None:
    device = [DeviceBlocks(0, [3, 5]), DeviceBlocks(2, [6])]
    job = TransferJob(1, "CPU", False, device, [[0, 1], [2]])
    assert list(block_pairs(job, 1)) == [BlockPair(3, 0, 0), BlockPair(5, 1, 0), BlockPair(6, 2, 0)]
