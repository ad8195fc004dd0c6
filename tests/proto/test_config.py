"""Invalid settings raise an error that names the parameter."""

import re
from typing import Any

import msgspec
import pytest

from proto.errors import ConfigError
from proto.settings.config import (
    CacheConfig,
    DeviceConfig,
    MediaConfig,
    ModelConfig,
    ParallelConfig,
    ReliabilityConfig,
    SchedulerConfig,
    ServeConfig,
    flag_name,
)
from proto.settings.config_checks import validate
from tests.fakes.kv_events import events_config


def config(section: str, **changes) -> ServeConfig:
    part = msgspec.structs.replace(getattr(ServeConfig(), section), **changes)
    return ServeConfig(**{section: part})


def test_the_defaults_are_valid():
    validate(ServeConfig())


@pytest.mark.parametrize(
    ("section", "changes"),
    [
        ("cache", {"block_size": 1}),
        ("cache", {"block_size": 1024}),
        ("cache", {"num_gpu_blocks_override": 2}),
        ("cache", {"kv_events_config": events_config()}),
        ("cache", {"kv_events_config": events_config(endpoint="ipc:///tmp/events")}),
        ("cache", {"kv_events_config": events_config(endpoint="tcp://*:1", topic="kv")}),
        ("cache", {"kv_events_config": events_config(replay_endpoint="tcp://127.0.0.1:5558")}),
        ("cache", {"kv_events_config": '{"publisher": "null"}', "enable_prefix_caching": False}),
        ("cache", {"kv_cache_metrics_one_in": 100}),
        ("scheduler", {"max_num_batched_tokens": 16, "max_num_seqs": 256}),
        ("scheduler", {"max_num_batched_tokens": 16, "max_num_scheduled_tokens": 16}),
        ("scheduler", {"enable_chunked_prefill": False}),
        ("scheduler", {"scheduling_policy": "priority"}),
        ("scheduler", {"async_scheduling": True}),
        ("device", {"device": "cuda", "attention_backend": "flashinfer"}),
        ("cache", {"kv_cache_dtype": "fp8", "gpu_memory_utilization": 1.0}),
        ("scheduler", {"watermark": 0.5, "scheduler_reserve_full_isl": True}),
        ("scheduler", {"stop_admission_above": 0.9}),
        ("scheduler", {"resume_admission_below": 0.8, "stop_admission_above": 0.9}),
        (
            "scheduler",
            {
                "resume_admission_below": 0.5,
                "stop_admission_above": 0.5,
                "preempt_above": 0.5,
            },
        ),
        ("frontend", {"port": 0}),
        ("reliability", {"shutdown_timeout": 0.0}),
        ("reliability", {"reload_strategy": "side-by-side"}),
        ("model", {"seed": 0}),
        ("model", {"cpu_weights": "packed", "dtype": "float32"}),
        ("model", {"cpu_weights": "int8", "dtype": "bfloat16"}),
        ("model", {"cpu_weights": "packed+int8", "dtype": "bfloat16"}),
        ("model", {"cpu_weights": "bf16", "dtype": "bfloat16"}),
        ("model", {"cpu_weights": "f32"}),
        ("device", {"device": "cpu", "attention_backend": "cpu"}),
        ("media", {"allowed_media_domains": ("a.example", "*.b.example", "c.example:8080", "*")}),
        ("media", {"allowed_local_media_path": "/srv/images"}),
        ("media", {"limit_mm_per_prompt": '{"image": 0, "video": 0, "audio": 1}'}),
    ],
)
def test_unusual_settings_are_accepted(section, changes):
    validate(config(section, **changes))


@pytest.mark.parametrize(
    ("section", "changes", "parameter"),
    [
        ("reliability", {"shutdown_timeout": -1.0}, "shutdown_timeout"),
        ("reliability", {"shutdown_timeout": float("inf")}, "shutdown_timeout"),
        ("reliability", {"shutdown_timeout": float("nan")}, "shutdown_timeout"),
        ("cache", {"block_size": 0}, "block_size"),
        ("cache", {"block_size": 24}, "block_size"),
        ("cache", {"block_size": 2048}, "block_size"),
        ("cache", {"num_gpu_blocks_override": 1}, "num_gpu_blocks_override"),
        (
            "cache",
            {"num_gpu_blocks_override": 10, "kv_cache_memory": 1 << 20},
            "num_gpu_blocks_override",
        ),
        ("cache", {"kv_cache_memory": 0}, "kv_cache_memory"),
        ("cache", {"kv_events_config": ""}, "kv_events_config"),
        ("cache", {"kv_events_config": "[]"}, "kv_events_config"),
        ("cache", {"kv_events_config": events_config(endpoint="inproc://x")}, "kv_events_config"),
        ("cache", {"kv_events_config": events_config(endpoint="tcp://h")}, "kv_events_config"),
        (
            "cache",
            {"kv_events_config": events_config(replay_endpoint="udp://h:1")},
            "kv_events_config",
        ),
        ("cache", {"kv_events_config": events_config(buffer_steps=0)}, "kv_events_config"),
        ("cache", {"kv_events_config": events_config(hwm="1")}, "kv_events_config"),
        ("cache", {"kv_events_config": events_config(publisher="kafka")}, "kv_events_config"),
        ("cache", {"kv_events_config": events_config(port=1)}, "kv_events_config"),
        ("cache", {"kv_events_config": events_config(topic="t" * 257)}, "kv_events_config"),
        (
            "cache",
            {"kv_events_config": events_config(), "enable_prefix_caching": False},
            "kv_events_config",
        ),
        ("cache", {"kv_cache_metrics_one_in": -1}, "kv_cache_metrics_one_in"),
        ("scheduler", {"max_num_seqs": 0}, "max_num_seqs"),
        ("scheduler", {"max_num_batched_tokens": 0}, "max_num_batched_tokens"),
        ("scheduler", {"max_num_scheduled_tokens": 0}, "max_num_scheduled_tokens"),
        ("scheduler", {"max_num_encoder_input_tokens": 0}, "max_num_encoder_input_tokens"),
        ("scheduler", {"encoder_cache_size": 0}, "encoder_cache_size"),
        (
            "scheduler",
            {"max_num_scheduled_tokens": 17, "max_num_batched_tokens": 16},
            "max_num_scheduled_tokens",
        ),
        ("scheduler", {"long_prefill_token_threshold": -1}, "long_prefill_token_threshold"),
        (
            "scheduler",
            {"long_prefill_token_threshold": 10, "enable_chunked_prefill": False},
            "long_prefill_token_threshold",
        ),
        ("scheduler", {"max_prefill_slowdown": 1.0}, "max_prefill_slowdown"),
        ("scheduler", {"max_prefill_slowdown": -0.5}, "max_prefill_slowdown"),
        ("scheduler", {"watermark": 1.0}, "watermark"),
        ("scheduler", {"watermark": -0.1}, "watermark"),
        ("scheduler", {"stop_admission_above": 0.0}, "stop_admission_above"),
        ("scheduler", {"preempt_above": 1.1}, "preempt_above"),
        ("scheduler", {"resume_admission_below": 0.0}, "resume_admission_below"),
        ("scheduler", {"resume_admission_below": 0.8}, "resume_admission_below"),
        (
            "scheduler",
            {"resume_admission_below": 0.9, "stop_admission_above": 0.8},
            "resume_admission_below",
        ),
        ("scheduler", {"preempt_above": 0.9}, "preempt_above"),
        ("scheduler", {"session_timeout": 0.0}, "session_timeout"),
        ("scheduler", {"session_timeout": float("nan")}, "session_timeout"),
        ("lora", {"lora_modules": ("a=/a",)}, "lora_modules"),
        ("lora", {"lora_dir": "/a"}, "lora_dir"),
        ("lora", {"enable_lora": True, "max_loras": 0}, "max_loras"),
        ("lora", {"enable_lora": True, "max_cpu_loras": 7}, "max_cpu_loras"),
        ("lora", {"enable_lora": True, "max_lora_rank": 0}, "max_lora_rank"),
        ("lora", {"enable_lora": True, "max_lora_wait_steps": 0}, "max_lora_wait_steps"),
        *(
            ("lora", {"enable_lora": True, "lora_modules": values}, "lora_modules")
            for values in (
                *[("a",), ("a=",), ("=/a",), ("a=/a", "a=/b"), ("{",), ('{"name": "a"}',)],
                *[('{"name": 1, "path": "/a"}',), ("a\n=/a",), ("a" * 257 + "=/a",)],
            )
        ),
        *(
            ("lora", {"enable_lora": True, "lora_access": (value,)}, "lora_access")
            for value in ("a", "a=", "=k", "a=k+", "a=k")
        ),
        ("reliability", {"step_timeout": -1.0}, "step_timeout"),
        ("reliability", {"start_timeout": float("nan")}, "start_timeout"),
        ("frontend", {"port": 65536}, "port"),
        ("frontend", {"api_key": " "}, "api_key"),
        ("frontend", {"api_key_file": ""}, "api_key_file"),
        ("model", {"served_model_name": " "}, "served_model_name"),
        ("model", {"tokenizer": ""}, "tokenizer"),
        ("model", {"max_model_len": 0}, "max_model_len"),
        ("model", {"seed": -1}, "seed"),
        ("model", {"cpu_weights": "packed", "dtype": "float16"}, "cpu_weights"),
        ("model", {"cpu_weights": "int8", "dtype": "float16"}, "cpu_weights"),
        ("model", {"cpu_weights": "bf16", "dtype": "float32"}, "cpu_weights"),
        ("model", {"cpu_weights": "f32", "dtype": "bfloat16"}, "cpu_weights"),
        ("device", {"cpu_threads": 0}, "cpu_threads"),
        ("parallel", {"tensor_parallel_size": 0}, "tensor_parallel_size"),
        ("parallel", {"tensor_parallel_size": 65}, "tensor_parallel_size"),
        ("device", {"cascade_attention_from": -1}, "cascade_attention_from"),
        ("device", {"device": "cpu", "attention_backend": "flashinfer"}, "attention_backend"),
        ("device", {"device": "cuda", "attention_backend": "cpu"}, "attention_backend"),
        ("cache", {"gpu_memory_utilization": 0.0}, "gpu_memory_utilization"),
        ("cache", {"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        ("media", {"allowed_media_domains": ("https://a.example",)}, "allowed_media_domains"),
        ("media", {"allowed_media_domains": ("a.example/b",)}, "allowed_media_domains"),
        ("media", {"allowed_media_domains": ("a.example:0",)}, "allowed_media_domains"),
        ("media", {"allowed_media_domains": ("a.example:x",)}, "allowed_media_domains"),
        ("media", {"allowed_local_media_path": "images"}, "allowed_local_media_path"),
        ("media", {"allowed_local_media_path": ""}, "allowed_local_media_path"),
        ("media", {"limit_mm_per_prompt": "image=4"}, "limit_mm_per_prompt"),
        ("media", {"limit_mm_per_prompt": '{"image": -1}'}, "limit_mm_per_prompt"),
        ("media", {"limit_mm_per_prompt": '{"image": true}'}, "limit_mm_per_prompt"),
        ("media", {"limit_mm_per_prompt": '{"pictures": 1}'}, "limit_mm_per_prompt"),
        ("media", {"max_image_pixels": 0}, "max_image_pixels"),
        ("media", {"max_image_bytes": 0}, "max_image_bytes"),
        ("media", {"media_memory": 0}, "media_memory"),
        ("media", {"media_timeout": 0.0}, "media_timeout"),
    ],
)
def test_invalid_settings_name_the_parameter(section, changes, parameter):
    with pytest.raises(ConfigError) as caught:
        validate(config(section, **changes))
    assert caught.value.param == parameter
    assert flag_name(parameter) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "most"),
    [
        (None, 64),
        ("{}", 64),
        ('{"image": 3}', 3),
        ('{"image": 0}', 0),
        ('{"video": 0}', 64),
        ('{"image": {"count": 5, "width": 512, "height": 512}}', 5),
        ('{"image": {"width": 512}}', 64),
    ],
)
def test_the_most_images_of_a_prompt(text, most):
    assert MediaConfig(limit_mm_per_prompt=text).max_images == most


def test_fp8_without_scales_is_refused_on_a_cpu():
    with pytest.raises(ConfigError, match="--kv-cache-dtype fp8 needs --device cuda") as caught:
        validate(
            ServeConfig(cache=CacheConfig(kv_cache_dtype="fp8"), device=DeviceConfig(device="cpu"))
        )
    assert caught.value.param == "kv_cache_dtype"


def test_pins_without_prefix_cache_name_both_flags():
    config = ServeConfig(
        cache=CacheConfig(enable_prefix_caching=False),
        scheduler=SchedulerConfig(scheduling_policy="continuum"),
    )
    with pytest.raises(ConfigError, match=r"--scheduling-policy .*--no-enable-prefix-caching"):
        validate(config)
    scheduler = SchedulerConfig(scheduling_policy="continuum", pin_policy="none")
    validate(msgspec.structs.replace(config, scheduler=scheduler))
    with pytest.raises(ConfigError, match="--max-pinned-share must be in"):
        validate(ServeConfig(scheduler=SchedulerConfig(max_pinned_share=1.5)))


def test_field_names_are_unique_across_sections():
    """Each becomes a flag."""
    names = [
        field
        for section in ServeConfig.__struct_fields__
        for field in getattr(ServeConfig(), section).__struct_fields__
    ]
    assert len(names) == len(set(names))


def test_configuration_is_frozen():
    with pytest.raises(AttributeError):
        ServeConfig().model.model = "other"


def test_parallel_engines_need_separate_kv_event_endpoints():
    both = ServeConfig(
        cache=CacheConfig(kv_events_config=events_config(endpoint="tcp://127.0.0.1:5557")),
        reliability=ReliabilityConfig(reload_strategy="side-by-side"),
    )
    with pytest.raises(ConfigError) as error:
        validate(both)
    assert error.value.param == "reload_strategy"
    for endpoint in ("ipc", "tcp://*:0"):
        cache = CacheConfig(kv_events_config=events_config(endpoint=endpoint))
        validate(msgspec.structs.replace(both, cache=cache))
    validate(msgspec.structs.replace(both, reliability=ReliabilityConfig()))


def test_cpu_weight_formats_do_not_apply_to_a_gpu():
    on_gpu = ServeConfig(
        model=ModelConfig(cpu_weights="packed"), device=DeviceConfig(device="cuda")
    )
    with pytest.raises(ConfigError, match="--cpu-weights packed needs --device cpu"):
        validate(on_gpu)


def with_engines(number: int, **events: object) -> ServeConfig:
    return ServeConfig(
        parallel=ParallelConfig(data_parallel_size=number),
        cache=CacheConfig(kv_events_config=events_config(**events)),
    )


@pytest.mark.parametrize(
    ("endpoint", "of_second"),
    [
        ("tcp://*:5557", "tcp://*:5559"),
        ("tcp://[::1]:80", "tcp://[::1]:82"),
        ("tcp://*:0", "tcp://*:0"),
        ("ipc", "ipc"),
        ("ipc:///run/kv:1", "ipc:///run/kv:1_dp2"),
    ],
)
def test_each_engine_publishes_kv_events_at_endpoints_of_its_own(
    endpoint: str, of_second: str
) -> None:
    config = with_engines(3, endpoint=endpoint, replay_endpoint="tcp://*:7000")
    validate(config)
    events = config.cache.parsed_kv_events()
    assert events.of_engine(0) == events
    assert events.of_engine(2).endpoints == [
        ("endpoint", of_second),
        ("replay_endpoint", "tcp://*:7002"),
    ]


@pytest.mark.parametrize(
    ("events", "message"),
    [
        (
            {"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5559"},
            "overlap: 5557 to 5559 of endpoint, 5559 to 5561 of replay_endpoint",
        ),
        ({"endpoint": "tcp://*:65534"}, "go beyond 65535"),
    ],
)
def test_ports_of_kv_events_that_engines_cannot_have_are_refused(
    events: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"of 3 engines .*{message}") as error:
        validate(with_engines(3, **events))
    assert error.value.param == "kv_events_config"
    validate(with_engines(1, **events))


@pytest.mark.parametrize(
    ("settings", "field", "message"),
    [
        (
            {"device": DeviceConfig(device="cuda")},
            "standby_workers",
            "--standby-workers needs --device cpu: workers on GPUs do not share their weights",
        ),
        (
            {"parallel": ParallelConfig(tensor_parallel_size=2)},
            "standby_workers",
            "--standby-workers replaces one worker, and all ranks of a model are restarted "
            "together: --tensor-parallel-size 1 is needed, got 2",
        ),
        ({"max_restarts": 0}, "standby_workers", "needs restarts, and --max-restarts 0 forbids"),
        ({"max_restarts": 0}, "standby_engines", "needs restarts, and --max-restarts 0 forbids"),
        ({"number": -1}, "standby_engines", "--standby-engines must be 0 or more"),
        ({"number": 17}, "standby_workers", "--standby-workers must be at most 16"),
    ],
)
def test_standby_processes_that_could_replace_none_are_refused(
    settings: dict[str, Any], field: str, message: str
) -> None:
    rest = dict(settings)
    numbers = {field: rest.pop("number", 1), "max_restarts": rest.pop("max_restarts", 8)}
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        validate(ServeConfig(reliability=ReliabilityConfig(**numbers), **rest))
    assert caught.value.param == field


def test_standby_engines_go_with_every_device_and_number_of_ranks() -> None:
    reliability = ReliabilityConfig(standby_engines=2)
    parallel, device = ParallelConfig(tensor_parallel_size=2), DeviceConfig(device="cuda")
    validate(ServeConfig(reliability=reliability, parallel=parallel, device=device))
    assert reliability.standby == "2 engines"
    assert ReliabilityConfig(standby_engines=1, standby_workers=3).standby == "1 engine, 3 workers"
    assert ReliabilityConfig().standby == ""
