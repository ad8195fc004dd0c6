"""What a scheduler is measured with, row by row.

Settings have their defaults, except for what a row is about: more sequences than run
by default need more seats and more tokens a step.
"""

import random
from collections.abc import Sequence
from typing import Any, Final

from proto.benchmark import RequestRecipe, SchedulerWorkload
from proto.codec import changed
from proto.config import CacheConfig, SchedulerConfig
from proto.errors import ConfigError

MAX_MODEL_LEN: Final = 65_536
_DEFAULTS: Final = SchedulerConfig()
_BLOCK_SIZE: Final = CacheConfig().block_size
_FOREVER: Final = 10_000
"""More output tokens than a row has steps."""
_LONG: Final = 32_768


def all_workloads() -> list[SchedulerWorkload]:
    """Every row, in the order of the table."""
    rows = [_decode(256), _decode(1024), _mixed(), _preempting(), _tenants()]
    rows += [_priority(), _long_prefix(), _hashing()]
    rows += [_decode(number) for number in (16, 64)]
    rows += [_traced(_decode(64)), _traced(_decode(256)), _traced(_mixed())]
    rows += [_full(), _watched(_full())]
    rows += [_waiting(number) for number in (0, 100, 1_000, 10_000)]
    rows += [_blocks(number) for number in (10_000, 100_000, 1_000_000)]
    return rows


def select(names: Sequence[str]) -> list[SchedulerWorkload]:
    """The rows of these names, all for none; raises ConfigError for a name that is none."""
    workloads = {each.name: each for each in all_workloads()}
    for name in names:
        if name not in workloads:
            raise ConfigError(f"there is no workload {name!r}; there are: {', '.join(workloads)}")
    return [each for each in workloads.values() if not names or each.name in names]


def _workload(name: str, requests: Sequence[RequestRecipe], **given: Any) -> SchedulerWorkload:
    settings = {
        "num_blocks": 1 << 16,
        "block_size": _BLOCK_SIZE,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": _DEFAULTS.max_num_seqs,
        "max_num_batched_tokens": _DEFAULTS.step_tokens,
        "warm_up_steps": 200,
        "measured_steps": 300,
    }
    return SchedulerWorkload(name=name, requests=tuple(requests), **(settings | given))


def _decode(number: int) -> SchedulerWorkload:
    """So many requests that all decode and never end."""
    return _workload(
        f"decode{number}",
        [RequestRecipe(((seed, 64),), _FOREVER) for seed in range(number)],
        concurrency=number,
        max_num_seqs=max(number, _DEFAULTS.max_num_seqs),
        max_num_batched_tokens=max(2 * number, _DEFAULTS.step_tokens),
    )


def _traced(workload: SchedulerWorkload) -> SchedulerWorkload:
    """The same, with a trace of it written."""
    return changed(workload, name=f"{workload.name}-traced", traced=True)


def _watched(workload: SchedulerWorkload) -> SchedulerWorkload:
    """The same, with somebody who watches the live view."""
    return changed(workload, name=f"{workload.name}-watched", watched=True)


def _full() -> SchedulerWorkload:
    """64 requests that all decode and hold nearly all blocks of a small pool."""
    return _workload(
        "full64",
        [RequestRecipe(((seed, 2_200),), _FOREVER) for seed in range(64)],
        concurrency=64,
        max_num_batched_tokens=4096,
        num_blocks=11_650,
        warm_up_steps=100,
        measured_steps=480,
    )


def _mixed() -> SchedulerWorkload:
    """Prompts of 64 to 8,192 tokens, most of each the beginning of one of eight documents."""
    rng = random.Random("mixed")
    requests = []
    for seed in range(1_000):
        length = round(64 * 2 ** rng.uniform(0, 7))
        shared = round(length * rng.uniform(0.6, 0.95))
        segments = ((1_000_000 + rng.randrange(8), shared), (seed, length - shared))
        requests.append(RequestRecipe(segments, rng.randint(64, 192)))
    return _workload(
        "mixed", requests, concurrency=48, num_blocks=16_384, warm_up_steps=600, measured_steps=600
    )


def _preempting() -> SchedulerWorkload:
    """A pool that is always full: whoever needs a block takes those of somebody else."""
    return _workload(
        "preempt",
        _small_requests("preempt", 1),
        concurrency=64,
        num_blocks=100,
        measured_steps=2_000,
        measure="preempting steps",
    )


def _tenants() -> SchedulerWorkload:
    """The same pressure, with two tenants who take the blocks from each other."""
    return _workload(
        "tenants",
        _small_requests("preempt", 1, num_tenants=2),
        concurrency=64,
        num_blocks=100,
        measured_steps=2_000,
        measure="preempting steps",
    )


def _priority() -> SchedulerWorkload:
    """The same pressure under the policy that chooses by priority, of which there are ten."""
    return _workload(
        "priority",
        _small_requests("priority", 10),
        concurrency=64,
        num_blocks=100,
        measured_steps=2_000,
        scheduling_policy="priority",
    )


def _small_requests(name: str, num_priorities: int, num_tenants: int = 1) -> list[RequestRecipe]:
    rng = random.Random(name)
    return [
        RequestRecipe(
            ((seed, rng.randint(4, 15)),),
            rng.randint(64, 256),
            rng.randrange(num_priorities),
            seed % num_tenants,
        )
        for seed in range(1_000)
    ]


def _long_prefix() -> SchedulerWorkload:
    """A prompt of 32k tokens that the cache holds but for its last block."""
    return _workload(
        "prefix32k", [RequestRecipe(((0, _LONG),), 1)], concurrency=1, measured_steps=100
    )


def _hashing() -> SchedulerWorkload:
    return _workload("hash1k", [RequestRecipe(((0, 1024),), 1)], concurrency=1, measure="hashing")


def _waiting(number: int) -> SchedulerWorkload:
    """All seats taken by requests that come and go, and so many behind them."""
    return _workload(f"waiting{number}", _passing(), concurrency=_DEFAULTS.max_num_seqs + number)


def _blocks(number: int) -> SchedulerWorkload:
    """Requests that come and go, over a pool of so many blocks."""
    return _workload(
        f"blocks{number}", _passing(), concurrency=_DEFAULTS.max_num_seqs, num_blocks=number
    )


def _passing() -> list[RequestRecipe]:
    rng = random.Random("passing")
    return [RequestRecipe(((seed, 64),), rng.randint(64, 192)) for seed in range(12_000)]
