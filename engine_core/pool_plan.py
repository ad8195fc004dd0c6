"""How large the KV pool is, and what that means for the longest request.

A pure function of what the workers report and what the operator asked for.
"""

from dataclasses import dataclass

from proto.config import ServeConfig
from proto.errors import ConfigError
from proto.lifecycle import WorkerReady


@dataclass(frozen=True)
class PoolPlan:
    """num_blocks counts the null block 0, which holds nothing.

    max_model_len: most tokens, prompt and output together, of one request.
    notice: a line for the operator where the pool is what limits that, or "".
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    notice: str

    @property
    def num_usable_blocks(self) -> int:
        return self.num_blocks - 1


def plan_pool(workers: list[WorkerReady], config: ServeConfig, max_position: int) -> PoolPlan:
    """Size the pool so that every rank can hold it.

    max_position: most positions that the model was made for.
    Raises ConfigError when not even one block fits.
    """
    block_size = config.cache.block_size
    num_blocks = config.cache.num_gpu_blocks_override or min(
        worker.kv_cache_bytes // (block_size * worker.geometry.bytes_per_token)
        for worker in workers
    )
    if num_blocks < 2:
        needed = 2 * block_size * max(worker.geometry.bytes_per_token for worker in workers)
        granted = min(worker.kv_cache_bytes for worker in workers)
        raise ConfigError(
            f"the KV pool needs at least {needed} bytes for two blocks and has {granted}: "
            "raise --kv-cache-memory or lower --block-size",
            "kv_cache_memory",
        )
    wanted = min(max_position, config.model.max_model_len or max_position)
    capacity = (num_blocks - 1) * block_size
    notice = ""
    if capacity < wanted:
        notice = (
            f"the KV pool of {num_blocks - 1} blocks holds {capacity} tokens: "
            f"requests are limited to {capacity} tokens instead of {wanted}"
        )
    return PoolPlan(num_blocks, block_size, min(wanted, capacity), notice)
