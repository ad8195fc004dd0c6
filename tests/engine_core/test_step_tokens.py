"""The token budget of a step: the setting, or what fits the workers."""

import pytest

from engine_core.core import with_step_tokens
from engine_core.scheduler.limits import ChunkRule
from proto.errors import ConfigError
from proto.messages.lifecycle import KVCacheGeometry, WorkerReady
from proto.settings.config import SchedulerConfig, ServeConfig


def ready(rank: int, step_tokens: int) -> WorkerReady:
    geometry = KVCacheGeometry(1, 1, 64, "bfloat16", 256)
    return WorkerReady(1, 1, rank, geometry, 1 << 20, 96, b"", "GPU", step_tokens=step_tokens)


def budget(config: ServeConfig, *workers: WorkerReady) -> int:
    return ChunkRule.from_config(with_step_tokens(config, workers).scheduler).token_budget


def test_the_least_of_the_workers_counts_where_nothing_is_set() -> None:
    assert budget(ServeConfig(), ready(0, 8192), ready(1, 4096)) == 4096


def test_a_setting_counts_whatever_they_have_room_for() -> None:
    config = ServeConfig(scheduler=SchedulerConfig(max_num_batched_tokens=32))
    assert budget(config, ready(0, 8192)) == 32


def test_the_scheduler_may_use_less_than_the_largest_step() -> None:
    config = ServeConfig(scheduler=SchedulerConfig(max_num_scheduled_tokens=100))
    scheduler = with_step_tokens(config, [ready(0, 256)]).scheduler
    assert (scheduler.step_tokens, scheduler.token_budget) == (256, 100)
    assert budget(config, ready(0, 256)) == 100
    with pytest.raises(ConfigError, match=r"--max-num-scheduled-tokens 100 .* 64"):
        with_step_tokens(config, [ready(0, 256), ready(1, 64)])
