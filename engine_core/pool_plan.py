"""Computes the size of the KV pool, the length of the longest request, and the weights' memory.

Pure functions of the workers' reports and the settings.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from engine_core.kv_cache.coordinator import longest_request, max_blocks_of_request
from engine_core.scheduler.limits import ChunkRule
from proto.errors import ConfigError, ModelError
from proto.messages.lifecycle import WeightFormatMemory, WorkerReady
from proto.settings.config import ServeConfig, memory_size


@dataclass(frozen=True)
class PoolPlan:
    """The KV pool of an engine.

    num_blocks: including the null block 0, which holds nothing.
    max_model_len: most tokens, prompt and output together, of one request.
    notice: a line for the operator if the pool limits `max_model_len`, or "".
    num_state_slots: slots for recurrent states, with the null slot 0; 0 for a model without them.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    notice: str
    num_state_slots: int = 0

    @property
    def num_usable_blocks(self) -> int:
        return self.num_blocks - 1


def plan_pool(workers: list[WorkerReady], config: ServeConfig, max_position: int) -> PoolPlan:
    """Size the pool so that every rank can hold it.

    max_position: positions that the model supports.
    Raises ConfigError if the pool cannot hold a request of --max-model-len tokens, or not even one
    block of each KV group. The model's own maximum is lowered to what fits, with a notice.
    """
    block_size = config.cache.block_size
    groups = workers[0].geometry.groups
    num_blocks = _num_blocks(workers, config)
    wanted = min(max_position, config.model.max_model_len or max_position)
    chunk = ChunkRule.from_config(config.scheduler).longest_chunk
    usable = longest_request(groups, num_blocks - 1, block_size, chunk, wanted)
    notice = ""
    if usable < wanted and config.model.max_model_len is not None:
        needed = max_blocks_of_request(groups, wanted, block_size, chunk)
        raise _too_long(wanted, needed, usable, num_blocks - 1, workers, config)
    if usable < wanted:
        notice = (
            f"the KV pool of {num_blocks - 1} blocks holds {usable} tokens: "
            f"requests are limited to {usable} tokens instead of {wanted}"
        )
    num_state_slots = min(worker.num_state_slots for worker in workers)
    return PoolPlan(num_blocks, block_size, usable, notice, num_state_slots)


def check_ranks(workers: Sequence[WorkerReady]) -> None:
    """Raise ModelError unless all ranks have loaded the same model into the same kind of KV cache.

    So, too, for a draft model: each rank uses the drafts that it computes itself.
    Only the number of KV heads, and so the bytes of a token, may differ between ranks.
    """
    first = _facts_of_all_ranks(workers[0])
    for worker in workers[1:]:
        for name, value in _facts_of_all_ranks(worker).items():
            if value != first[name]:
                raise ModelError(
                    f"rank {workers[0].rank} and rank {worker.rank} do not fit together: "
                    f"{name} {first[name]} and {value}"
                )


def _facts_of_all_ranks(worker: WorkerReady) -> dict[str, object]:
    geometry = worker.geometry
    return {
        "vocabulary size": worker.vocab_size,
        "KV dtype": geometry.dtype,
        "head size": geometry.head_dim,
        "layers per KV group": geometry.num_slots,
        "windows of the KV groups": [group.sliding_window for group in geometry.groups],
        "kinds of the KV groups": [group.kind for group in geometry.groups],
        "fingerprint of model and weights": worker.model_fingerprint.hex()[:16],
        "fingerprint of the draft model": worker.draft_fingerprint.hex()[:16],
    }


def weight_memory(workers: Sequence[WorkerReady]) -> tuple[WeightFormatMemory, ...]:
    """Return the memory of the weights by format, summed over all workers."""
    total: Counter[tuple[str, bool]] = Counter()
    for worker in workers:
        for part in worker.weights:
            total[part.form, part.is_shared] += part.num_bytes
    return tuple(
        WeightFormatMemory(form, num_bytes, is_shared)
        for (form, is_shared), num_bytes in total.items()
    )


def _too_long(
    wanted: int,
    needed_blocks: int,
    usable: int,
    usable_blocks: int,
    workers: Sequence[WorkerReady],
    config: ServeConfig,
) -> ConfigError:
    """Return the error about a --max-model-len that the pool cannot hold, with the sizes."""
    block_size = config.cache.block_size
    block_bytes = block_size * sum(worker.geometry.bytes_per_token for worker in workers)

    def size(num_blocks: int) -> str:
        pool = memory_size(num_blocks * block_bytes)
        return f"{num_blocks} KV blocks of {block_size} tokens ({pool})"

    if config.cache.num_gpu_blocks_override is not None:
        way_out = f"raise --num-gpu-blocks-override to {needed_blocks + 1}"
    else:
        mib = -(-(needed_blocks + 1) * block_bytes // (1 << 20))
        way_out = f"raise --kv-cache-memory to {mib}M"
    return ConfigError(
        f"--max-model-len {wanted} needs {size(needed_blocks)}, and the KV pool has "
        f"{size(usable_blocks)}: {way_out} or lower --max-model-len to {usable}"
    )


def _num_blocks(workers: list[WorkerReady], config: ServeConfig) -> int:
    """Return the number of blocks in the pool, including the null block."""
    block_size, override = config.cache.block_size, config.cache.num_gpu_blocks_override
    fewest = 1 + workers[0].geometry.num_block_groups
    if not workers[0].geometry.is_cached:
        return fewest
    if override is not None:
        if override < fewest:
            raise ConfigError(
                f"--num-gpu-blocks-override must be at least {fewest} for this model: "
                f"block 0 is reserved, and each of its {fewest - 1} KV groups needs a block"
            )
        return override
    num_blocks = min(
        worker.kv_cache_bytes // (block_size * worker.geometry.bytes_per_token)
        for worker in workers
    )
    if num_blocks < fewest:
        needed = fewest * block_size * max(worker.geometry.bytes_per_token for worker in workers)
        granted = min(worker.kv_cache_bytes for worker in workers)
        raise ConfigError(
            f"the KV pool needs at least {needed} bytes for {fewest} blocks and has {granted}: "
            "raise --kv-cache-memory or lower --block-size",
            "kv_cache_memory",
        )
    return num_blocks
