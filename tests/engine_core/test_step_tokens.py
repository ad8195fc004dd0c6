"""The token budget of a step: the setting, or what fits the workers."""

import msgspec
import pytest

from engine_core.core import encoder_limits, with_step_tokens
from engine_core.scheduler.limits import ChunkRule
from proto.errors import ConfigError
from proto.messages.lifecycle import KVCacheGeometry, WorkerReady
from proto.messages.multimodal import EncoderLimits
from proto.messages.prepared_model import VisionFacts
from proto.settings.config import MIN_ENCODER_CACHE_ROWS, SchedulerConfig, ServeConfig


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


def limits_of(
    scheduler: SchedulerConfig, *, is_bidirectional: bool = False, on_gpu: bool = False
) -> EncoderLimits:
    vision = VisionFacts(
        architecture="A", image_token_id=1, max_embeds=256, is_bidirectional=is_bidirectional
    )
    config = with_step_tokens(ServeConfig(scheduler=scheduler), [ready(0, 512)])
    worker = msgspec.structs.replace(ready(0, 512), computes_ahead=on_gpu)
    return encoder_limits(config, worker, vision)


def test_images_are_encoded_in_slices_on_a_cpu_and_whole_on_a_gpu() -> None:
    limits = limits_of(SchedulerConfig())
    assert (limits.splits, limits.max_input_tokens) == (True, None)
    assert limits.cache_size == MIN_ENCODER_CACHE_ROWS
    rows = SchedulerConfig().encoder_cache_rows
    assert [rows(each) for each in (2000, 4096, 5000, 20_000)] == [8000, 16384, 16384, 20_000]
    set_rows = SchedulerConfig(max_num_encoder_input_tokens=7, encoder_cache_size=300)
    limits = limits_of(set_rows)
    assert (limits.splits, limits.max_input_tokens, limits.cache_size) == (True, 7, 300)
    limits = limits_of(set_rows, on_gpu=True)
    assert (limits.splits, limits.max_input_tokens) == (False, 256), "room for an image"
    assert limits_of(SchedulerConfig(), on_gpu=True).max_input_tokens == 512


@pytest.mark.parametrize(
    ("settings", "is_bidirectional", "words"),
    [
        ({"encoder_cache_size": 255}, False, "--encoder-cache-size 255 is less than the 256"),
        ({"max_num_batched_tokens": 255}, True, "--max-num-batched-tokens is 255"),
        ({"max_num_scheduled_tokens": 255}, True, "--max-num-scheduled-tokens is 255"),
        ({"long_prefill_token_threshold": 255}, True, "--long-prefill-token-threshold is 255"),
    ],
)
def test_limits_with_which_an_image_could_never_be_computed_are_refused(
    settings: dict[str, int], is_bidirectional: bool, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        limits_of(SchedulerConfig(**settings), is_bidirectional=is_bidirectional)
    if is_bidirectional:
        assert limits_of(SchedulerConfig(**settings)).vision.max_embeds == 256
    enough = dict.fromkeys(settings, 256)
    assert limits_of(SchedulerConfig(**enough), is_bidirectional=is_bidirectional)


@pytest.mark.parametrize(
    ("budget_of_step", "is_bidirectional", "num_running"),
    [(256, True, 1), (260, True, 5), (263, True, None), (256, False, None)],
)
def test_a_log_line_says_how_many_requests_an_image_lets_run(
    budget_of_step: int,
    is_bidirectional: bool,
    num_running: int | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The tokens of an image that is computed in one step are kept free for it."""
    settings = SchedulerConfig(max_num_batched_tokens=budget_of_step, max_num_seqs=8)
    limits_of(settings, is_bidirectional=is_bidirectional)
    if num_running is None:
        assert caplog.messages == []
    else:
        (line,) = caplog.messages
        assert f"at most {num_running} of --max-num-seqs 8 requests run" in line
        assert f"{budget_of_step} tokens (--max-num-batched-tokens)" in line
