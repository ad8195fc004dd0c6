"""Validation of settings: values out of range and conflicts, reported by flag name.

The bounds of single numbers are in tables; what else has to be checked in a section is a function.
Nothing here depends on the machine: what the device, the model or the memory cannot do is reported
by the process that finds out.
"""

import ipaddress
import math
import os
import re
from typing import Final

from proto.errors import ConfigError, shown
from proto.messages.engine_io import MAX_FRONT_ENDS
from proto.messages.lifecycle import LEAST_STATE_SLOTS
from proto.messages.prepared_model import VisionFacts
from proto.settings.config import (
    MAX_DATA_PARALLEL_SIZE,
    MAX_STANDBY_PROCESSES,
    MAX_TENSOR_PARALLEL_SIZE,
    SECRET_FIELDS,
    CacheConfig,
    CpuWeights,
    DType,
    FrontEndConfig,
    MediaConfig,
    ModelConfig,
    ReliabilityConfig,
    SchedulerConfig,
    ServeConfig,
    flag_name,
)
from proto.settings.generation_config import parse_overrides
from proto.settings.kv_media_checks import check_media, check_preemption
from proto.settings.kv_transfer_config import kv_transfer_config
from proto.settings.lora_modules import LoRAAccess, parse_lora_modules
from proto.settings.pooler_config import parse_pooler_config

_DTYPES_OF_WEIGHTS: Final[dict[CpuWeights, tuple[DType, ...]]] = {
    "auto": ("auto", "float32", "bfloat16", "float16"),
    "packed": ("auto", "float32", "bfloat16"),
    "int8": ("auto", "float32", "bfloat16"),
    "packed+int8": ("auto", "float32", "bfloat16"),
    "bf16": ("auto", "bfloat16"),
    "f32": ("auto", "float32"),
}
"""Data types of activations supported by each weight format."""

_POSITIVE: Final = frozenset(
    {
        *("max_model_len", "block_size", "kv_cache_memory", "max_num_seqs"),
        *("max_num_batched_tokens", "max_num_scheduled_tokens", "max_num_encoder_input_tokens"),
        *("encoder_cache_size", "crashes_until_isolated", "tensor_parallel_size", "cpu_threads"),
        *("api_server_count", "stream_interval", "max_response_bytes", "sched_trace_max_bytes"),
        *("max_loras", "max_cpu_loras", "max_lora_rank", "max_lora_wait_steps", "max_image_pixels"),
        *("max_image_bytes", "media_memory", "data_parallel_size"),
    }
)
_AT_LEAST: Final = {"num_state_slots": LEAST_STATE_SLOTS, **dict.fromkeys(_POSITIVE, 1)}
_AT_MOST: Final = {
    "api_server_count": MAX_FRONT_ENDS,
    "tensor_parallel_size": MAX_TENSOR_PARALLEL_SIZE,
    "data_parallel_size": MAX_DATA_PARALLEL_SIZE,
    "standby_engines": MAX_STANDBY_PROCESSES,
    "standby_workers": MAX_STANDBY_PROCESSES,
}
_NOT_NEGATIVE: Final = frozenset(
    {
        *("kv_cache_metrics_one_in", "long_prefill_token_threshold", "cascade_attention_from"),
        *("peak_tflops", "peak_memory_gbps", "max_num_queued_reqs", "max_num_queued_tokens"),
        *("queue_timeout", "sse_keep_alive", "max_stored_responses_mib", "stored_response_seconds"),
        *("grammar_cache_entries", "grammar_cache_bytes", "max_restarts", "shutdown_timeout"),
        *("step_timeout", "start_timeout", "standby_engines", "standby_workers"),
    }
)
_MAY_BE_INFINITE: Final = frozenset(("step_timeout", "start_timeout"))
_SHARES: Final = {
    "max_pinned_share": "[0, 1]",
    "max_pinned_share_per_tenant": "[0, 1]",
    "watermark": "[0, 1)",
    "stop_admission_above": "(0, 1]",
    "resume_admission_below": "(0, 1]",
    "preempt_above": "(0, 1]",
    "gpu_memory_utilization": "(0, 1]",
}
"""The interval, whose ends belong to it where a bracket is square."""
_PORTS: Final = frozenset(("port", "admin_port"))

_HOST_NAME: Final = re.compile(r"(\*\.)?[\w-]+(\.[\w-]+)*", re.ASCII)
_ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s?#@]+")
_TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""Name of a method or a header (RFC 9110, 5.6.2)."""


def validate(config: ServeConfig) -> None:
    """Raise ConfigError for the first setting that is impossible or conflicting."""
    for section in config.__struct_fields__:
        values = getattr(config, section)
        for field in values.__struct_fields__:
            value = getattr(values, field)
            if isinstance(value, int | float):
                _check_number(field, value)
    _check_weights(config)
    _check_model(config.model)
    _check_cache(config.cache)
    _check_kv_events(config)
    _check_scheduler(config.scheduler)
    _check_device(config)
    _check_front_end(config.frontend)
    _check_media_sources(config.media)
    config.speculation.parsed()
    config.trace.parsed_profiler()
    _check_reliability(config.reliability, config.cache)
    _check_standby(config)
    _check_retention(config)
    _check_routed_experts(config)
    _check_lora(config)
    check_media(config)
    check_preemption(config)


def _check_number(field: str, value: float) -> None:
    """Raise ConfigError for a number out of the bounds that the tables have for its field."""
    bounds = ""
    if value < _AT_LEAST.get(field, value):
        bounds = f"at least {_AT_LEAST[field]}"
    elif value > _AT_MOST.get(field, value):
        bounds = f"at most {_AT_MOST[field]}"
    elif field in _NOT_NEGATIVE and not (
        0 <= value < math.inf or (value == math.inf and field in _MAY_BE_INFINITE)
    ):
        bounds = "0 or more"
    elif field in _PORTS and not 0 <= value <= 65535:
        bounds = "between 0 and 65535"
    elif interval := _SHARES.get(field):
        ends = (value == 0 and interval[0] == "[") or (value == 1 and interval[-1] == "]")
        bounds = "" if 0 < value < 1 or ends else f"in {interval}"
    if bounds:
        given = str(value).removesuffix(".0")
        raise ConfigError(f"{flag_name(field)} must be {bounds}, got {given}")


def _check_model(model: ModelConfig) -> None:
    texts = [("served_model_name", name) for name in model.served_model_name]
    texts += [(field, getattr(model, field)) for field in ("tokenizer", "generation_config")]
    for field, value in texts:
        if value is not None and not value.strip():
            raise ConfigError(f"{flag_name(field)} must not be empty")
    parse_overrides(model.override_generation_config)
    if model.pooler_config is not None:
        if model.runner == "generate":
            raise ConfigError("--pooler-config does not go with --runner generate")
        parse_pooler_config(model.pooler_config)
    if model.seed is not None and not 0 <= model.seed < 1 << 63:
        raise ConfigError(f"--seed must be in [0, 2^63), got {model.seed}")


def _check_cache(cache: CacheConfig) -> None:
    if cache.block_size > 1024 or cache.block_size & (cache.block_size - 1):
        raise ConfigError(f"--block-size must be a power of two up to 1024, got {cache.block_size}")
    if cache.num_gpu_blocks_override is not None and cache.num_gpu_blocks_override < 2:
        raise ConfigError("--num-gpu-blocks-override must be at least 2: block 0 is reserved")
    if cache.num_gpu_blocks_override is not None and cache.kv_cache_memory is not None:
        raise ConfigError(
            "--num-gpu-blocks-override and --kv-cache-memory both size the KV pool: give one"
        )
    _check_kv_transfer(cache)


def _check_routed_experts(config: ServeConfig) -> None:
    if not config.model.enable_return_routed_experts:
        return
    if kv_transfer_config(config.cache.kv_transfer_config).kv_connector:
        raise ConfigError(
            "--enable-return-routed-experts does not go with --kv-transfer-config: the experts of "
            "tokens whose KV is loaded are not known"
        )


def _check_retention(config: ServeConfig) -> None:
    scheduler = config.scheduler
    keeps = scheduler.scheduling_policy == "continuum" and scheduler.pin_policy != "none"
    if keeps and not config.cache.enable_prefix_caching:
        raise ConfigError(
            "--scheduling-policy continuum keeps KV for the prefix cache, and "
            "--no-enable-prefix-caching turns that off; --pin-policy none keeps nothing"
        )


def _check_scheduler(scheduler: SchedulerConfig) -> None:
    if scheduler.max_num_batched_tokens is not None:
        check_token_budget(scheduler)
    if scheduler.long_prefill_token_threshold and not scheduler.enable_chunked_prefill:
        raise ConfigError(
            "--long-prefill-token-threshold needs chunked prefill, "
            "and --no-enable-chunked-prefill turns it off"
        )
    slowdown = scheduler.max_prefill_slowdown
    if slowdown and not 1.0 < slowdown < math.inf:
        raise ConfigError(f"--max-prefill-slowdown must be 0 or more than 1, got {slowdown}")
    _check_pressure(scheduler)
    for field in ("peak_tflops", "peak_memory_gbps"):
        if getattr(scheduler, field) and not scheduler.enable_mfu_metrics:
            raise ConfigError(f"{flag_name(field)} needs --enable-mfu-metrics")
    if not scheduler.session_timeout > 0.0:
        raise ConfigError(f"--session-timeout must be more than 0, got {scheduler.session_timeout}")


def check_token_budget(scheduler: SchedulerConfig) -> None:
    """Raise ConfigError for a budget above the largest step of the workers, which is known now."""
    if scheduler.token_budget > scheduler.step_tokens:
        raise ConfigError(
            f"--max-num-scheduled-tokens {scheduler.token_budget} is more than "
            f"--max-num-batched-tokens, {scheduler.step_tokens}"
        )


def check_vision(scheduler: SchedulerConfig, vision: VisionFacts) -> None:
    """Raise ConfigError for limits with which the largest image of a model could never be computed.

    The token budget is known now. An image whose tokens attend to each other in both directions is
    computed in one step.
    """
    most = vision.max_embeds
    rows = scheduler.encoder_cache_rows(most)
    if rows < most:
        raise ConfigError(
            f"--encoder-cache-size {rows} is less than the {most} rows of an image of this model"
        )
    if not vision.is_bidirectional:
        return
    limits = {
        "max_num_scheduled_tokens": scheduler.max_num_scheduled_tokens,
        "max_num_batched_tokens": scheduler.step_tokens,
        "long_prefill_token_threshold": scheduler.long_prefill_token_threshold or None,
    }
    for field, limit in limits.items():
        if limit is not None and limit < most:
            raise ConfigError(
                f"{flag_name(field)} is {limit}, and an image of this model has {most} tokens, "
                "which are computed in one step"
            )


def _check_front_end(frontend: FrontEndConfig) -> None:
    admin_port = frontend.admin_port
    if admin_port and admin_port == frontend.port:
        raise ConfigError(f"--admin-port {admin_port} is the --port of all clients")
    if frontend.admin_socket == "":
        raise ConfigError("--admin-socket must name a path")
    endpoint = frontend.otlp_traces_endpoint
    if endpoint is not None and not re.match(r"(https?|grpc)://[^/\s]+", endpoint):
        raise ConfigError(
            f"--otlp-traces-endpoint must be a URL such as http://localhost:4317, got {endpoint}"
        )
    _check_cors(frontend)
    _check_keys(frontend)
    _check_tls(frontend)


def _check_cors(frontend: FrontEndConfig) -> None:
    for name in frontend.trusted_proxies:
        try:
            ipaddress.ip_network(name, strict=False)
        except ValueError:
            raise ConfigError(
                "--trusted-proxies takes addresses and networks such as 10.0.0.0/8, "
                f"not {shown(name)}"
            ) from None
    for name in frontend.allowed_hosts:
        if name != "*" and not _HOST_NAME.fullmatch(name):
            raise ConfigError(
                "--allowed-hosts takes names such as llm.example or *.example, without a port, "
                f"not {shown(name)}"
            )
    for origin in frontend.allowed_origins:
        if origin not in ("*", "null") and not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                "--allowed-origins takes origins such as https://chat.example, without a path, "
                f"not {shown(origin)}"
            )
    for field in ("allowed_methods", "allowed_headers"):
        for name in getattr(frontend, field):
            if not _TOKEN.fullmatch(name):
                raise ConfigError(f"{flag_name(field)} takes names or *, not {shown(name)}")
    default = FrontEndConfig()
    for field in ("allow_credentials", "allowed_methods", "allowed_headers"):
        if not frontend.allowed_origins and getattr(frontend, field) != getattr(default, field):
            raise ConfigError(f"{flag_name(field)} needs --allowed-origins")


def _check_media_sources(media: MediaConfig) -> None:
    for name in media.allowed_media_domains:
        host, _, port = name.rpartition(":")
        is_port = port.isascii() and port.isdecimal() and 0 < int(port) < 1 << 16
        if name != "*" and not _HOST_NAME.fullmatch(host if host and is_port else name):
            raise ConfigError(
                "--allowed-media-domains takes names such as images.example, *.example or "
                f"images.example:8080, not {shown(name)}"
            )
    path = media.allowed_local_media_path
    if path is not None and not os.path.isabs(path):
        raise ConfigError(f"--allowed-local-media-path must be an absolute path, got {shown(path)}")
    if not 0.0 < media.media_timeout < math.inf:
        raise ConfigError(f"--media-timeout must be more than 0, got {media.media_timeout}")
    _ = media.max_images


def _check_reliability(reliability: ReliabilityConfig, cache: CacheConfig) -> None:
    if reliability.reload_strategy == "side-by-side" and cache.has_fixed_kv_events_endpoint:
        raise ConfigError(
            "--reload-strategy side-by-side runs two engines at a time, which cannot both publish "
            "at the endpoints of --kv-events-config: give ipc, or another strategy"
        )


def _check_standby(config: ServeConfig) -> None:
    """Refuse standby processes that could never replace another."""
    reliability = config.reliability
    for field in ("standby_engines", "standby_workers"):
        if getattr(reliability, field) and not reliability.max_restarts:
            raise ConfigError(
                f"{flag_name(field)} needs restarts, and --max-restarts 0 forbids them"
            )
    if not reliability.standby_workers:
        return
    if config.device.device == "cuda":
        raise ConfigError(
            "--standby-workers needs --device cpu: workers on GPUs do not share their weights"
        )
    if (size := config.parallel.tensor_parallel_size) > 1:
        raise ConfigError(
            "--standby-workers replaces one worker, and all ranks of a model are restarted "
            f"together: --tensor-parallel-size 1 is needed, got {size}"
        )


def _check_keys(frontend: FrontEndConfig) -> None:
    """Refuse empty keys, which would match empty tokens."""
    for field in sorted(SECRET_FIELDS.intersection(frontend.__struct_fields__)):
        key = getattr(frontend, field)
        if key is not None and not key.strip():
            variable = f"TOKEND_{field.upper()}"
            raise ConfigError(f"{flag_name(field)} (or {variable}) must not be empty")
        file_field = f"{field}_file"
        if getattr(frontend, file_field) == "":
            raise ConfigError(f"{flag_name(file_field)} must name a file")


def _check_tls(frontend: FrontEndConfig) -> None:
    """Refuse incomplete TLS settings, which would have no effect."""
    if frontend.ssl_cert_reqs not in (0, 1, 2):
        raise ConfigError(f"--ssl-cert-reqs must be 0, 1 or 2, got {frontend.ssl_cert_reqs}")
    if frontend.ssl_certfile is None:
        for field in ("ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs"):
            if getattr(frontend, field):
                raise ConfigError(f"{flag_name(field)} needs --ssl-certfile")
    if frontend.ssl_cert_reqs and frontend.ssl_ca_certs is None:
        raise ConfigError(
            f"--ssl-cert-reqs {frontend.ssl_cert_reqs} needs --ssl-ca-certs to check against"
        )
    if frontend.ssl_ca_certs is not None and not frontend.ssl_cert_reqs:
        raise ConfigError("--ssl-ca-certs has no effect with --ssl-cert-reqs 0: give 1 or 2")


def _check_pressure(scheduler: SchedulerConfig) -> None:
    """Check the watermarks: admission resumes below the level at which it stops."""
    stop, preempt = scheduler.stop_admission_above, scheduler.preempt_above
    resume = scheduler.resume_admission_below
    if resume is not None and stop == 1.0:
        raise ConfigError(
            "--resume-admission-below needs --stop-admission-above: admission never stops"
        )
    if resume is not None and resume > stop:
        raise ConfigError(
            f"--resume-admission-below ({resume}) must not be more than "
            f"--stop-admission-above ({stop})"
        )
    if preempt < stop:
        raise ConfigError(
            f"--preempt-above ({preempt}) must not be less than --stop-admission-above ({stop}): "
            "requests would be preempted right after admission"
        )


def _check_lora(config: ServeConfig) -> None:
    lora = config.lora
    modules = parse_lora_modules(lora.lora_modules)
    key_names = LoRAAccess(lora.lora_access).key_names
    if not lora.enable_lora:
        for field in ("lora_modules", "lora_dir", "lora_access", "lora_allowed_dirs"):
            if getattr(lora, field):
                raise ConfigError(f"{flag_name(field)} needs --enable-lora")
        return
    if lora.max_cpu_loras is not None and lora.max_cpu_loras < lora.max_loras:
        raise ConfigError(
            f"--max-cpu-loras {lora.max_cpu_loras} must be at least --max-loras, which is "
            f"{lora.max_loras}"
        )
    for module in modules:
        if module.name in config.model.served_model_name:
            raise ConfigError(f"--lora-modules: {module.name} is a name of the model")
    if key_names and config.frontend.api_key_file is None:
        raise ConfigError("--lora-access names keys, so it needs --api-key-file")


def _check_weights(config: ServeConfig) -> None:
    weights, dtype = config.model.cpu_weights, config.model.dtype
    if config.device.device == "cuda" and weights != "auto":
        raise ConfigError(f"--cpu-weights {weights} needs --device cpu")
    works = _DTYPES_OF_WEIGHTS[weights]
    if dtype not in works:
        raise ConfigError(
            f"--cpu-weights {weights} goes with --dtype {' or '.join(works)}, got {dtype}"
        )


def _check_device(config: ServeConfig) -> None:
    cache, device = config.cache, config.device
    if device.device == "cuda" and device.cpu_kernels != "auto":
        raise ConfigError(f"--cpu-kernels {device.cpu_kernels} needs --device cpu")
    if device.device == "cpu" and cache.kv_cache_dtype == "fp8":
        raise ConfigError("--kv-cache-dtype fp8 needs --device cuda; a CPU has int8")
    kinds = {"cpu": "cpu", "flashinfer": "cuda"}
    needed = kinds.get(device.attention_backend, device.device)
    if device.device not in ("auto", needed):
        raise ConfigError(f"--attention-backend {device.attention_backend} needs --device {needed}")


def _check_kv_events(config: ServeConfig) -> None:
    events = config.cache.parsed_kv_events()
    if events is None:
        return
    events.check_engines(config.parallel.data_parallel_size)
    if not config.cache.enable_prefix_caching:
        raise ConfigError(
            "--kv-events-config publishes what the prefix cache holds, "
            "and --no-enable-prefix-caching turns it off"
        )


def _check_kv_transfer(cache: CacheConfig) -> None:
    """Check that prefix caching is on: KV connectors find KV by the hashes of the prefix cache."""
    transfer = kv_transfer_config(cache.kv_transfer_config)
    if transfer.kv_connector and not cache.enable_prefix_caching:
        raise ConfigError(
            "--kv-transfer-config finds KV by the hashes of the prefix cache, "
            "and --no-enable-prefix-caching turns it off"
        )
