"""Every setting of the daemon, with its default and its meaning.

The command line is generated from these Structs: a field is a flag
(`max_num_seqs` is `--max-num-seqs`), the string under it is its help. Nothing
else in tokend holds a default. Structs are frozen: what a process runs with is
what it was given.
"""

import math
import re
from typing import Final, Literal

import msgspec

from proto.errors import ConfigError
from proto.ids import MAX_CLIENTS

DType = Literal["auto", "float32", "bfloat16", "float16"]
KVCacheDType = Literal["auto", "bf16", "f16", "f32", "int8", "fp8"]
CpuWeights = Literal["auto", "packed", "int8", "bf16", "f32"]
TenantBy = Literal["api-key", "header", "none"]
GIB: Final = 1 << 30
MAX_TENSOR_PARALLEL_SIZE: Final = 64


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Which model is served, and as what."""

    model: str = "smollm2-135m-instruct"
    """A Hugging Face folder, a .gguf file, or the name of a packaged model."""
    served_model_name: str | None = None
    """Name that clients use; by default the name or last path part of the model."""
    tokenizer: str | None = None
    """Folder with another tokenizer.json; by default the model's own."""
    dtype: DType = "auto"
    """Arithmetic of weights and activations; auto takes what the device does best."""
    cpu_weights: CpuWeights = "auto"
    """Form of weights on a CPU; packed: the blocks of a GGUF; auto: f32 if --dtype is float32."""
    max_model_len: int | None = None
    """Most tokens of prompt and output together; by default what the model was made for."""
    seed: int | None = None
    """Makes the draws of requests without a seed repeatable from start to start."""


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The paged KV cache."""

    block_size: int = 16
    """Tokens in one KV block."""
    num_gpu_blocks_override: int | None = None
    """Number of KV blocks, instead of as many as the memory holds."""
    kv_cache_dtype: KVCacheDType = "auto"
    """What K and V are kept as: int8 has scales (CPU), fp8 is e4m3 (GPU), others are plain."""
    kv_cache_memory: int | None = None
    """Bytes for the KV pool of all workers (suffixes K, M, G); on a CPU 4 GiB by default."""
    enable_prefix_caching: bool = True
    """Reuse the KV of prompts that begin alike."""
    kv_events_endpoint: str | None = None
    """Publish what the prefix cache holds (prompts' token ids): ipc, ipc://PATH or tcp://HOST:PORT."""
    kv_cache_metrics_one_in: int = 0
    """Measure how long one KV block in this many keeps its content; 0 measures none."""
    gpu_memory_utilization: float = 0.9
    """Part of a GPU's memory that may be taken; the KV pool gets what weights and steps leave."""

    @property
    def has_fixed_kv_events_endpoint(self) -> bool:
        """Only one engine at a time can publish there."""
        return self.kv_events_endpoint not in (None, "ipc")


CPU_STEP_TOKENS: Final = 256
"""An abort or a shutdown waits for a step, which takes a CPU a second with many more."""


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How requests share a step."""

    max_num_seqs: int = 256
    """Most sequences that run at once."""
    max_num_batched_tokens: int | None = None
    """Token budget of a step, by default 256 on a CPU, 2048 to 8192 on a GPU by its memory; longer
    prompts are computed in chunks."""
    long_prefill_token_threshold: int = 0
    """Most tokens of one prompt in a step; 0 sets no limit."""
    enable_chunked_prefill: bool = True
    """Let a prompt be computed over several steps."""
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    """Order of waiting requests."""
    async_scheduling: bool | None = None
    """Schedule the next step while the current one computes; by default on a GPU only."""
    scheduler_reserve_full_isl: bool = False
    """Admit a request only when its whole prompt has room, not just the first chunk."""
    watermark: float = 0.0
    """Part of the KV blocks (0 to 1) left free when a request is admitted, for those that run."""
    stop_admission_above: float = 1.0
    """Admit nobody once more than this part of the KV blocks is in use."""
    resume_admission_below: float | None = None
    """After that, admit again below this part; by default nine tenths of it."""
    preempt_above: float = 1.0
    """Preempt, leaving one, while more than this part of the KV blocks is in use."""
    session_timeout: float = 600.0
    """Seconds that a session (a request with input in parts) waits for input before it ends."""
    crashes_until_alone: int = 3
    """Crashes in a row, getting no further in between, after which a request is computed alone."""
    max_num_queued_reqs: int | None = None
    """Most choices waiting for their first step; by default 4 times what can run; 0: no limit."""
    max_num_queued_tokens: int | None = None
    """Most prompt tokens of those; by default 4 times what the KV pool holds; 0: no limit."""

    @property
    def step_tokens(self) -> int:
        """The token budget of a step; a CPU's where none is set and no worker has said one."""
        return self.max_num_batched_tokens or CPU_STEP_TOKENS


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How many devices share the model."""

    tensor_parallel_size: int = 1
    """Workers that share each layer, one for each device; on a CPU they share the cores."""


class DeviceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the worker computes on."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the workers."""
    attention_backend: Literal["auto", "cpu", "reference", "flashinfer"] = "auto"
    """Attention kernels; reference is slow, plain torch."""
    cpu_threads: int | None = None
    """Threads of a CPU worker; by default one for each core, or its share of them."""
    enforce_eager: bool = False
    """On a GPU, launch each kernel of a step by itself instead of replaying captured graphs."""
    cascade_attention_from: int = 0
    """Read a prefix of this many KV blocks once for all sequences of a step; 0: never. Eager."""


class FrontEndConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The HTTP side."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8000
    """Port to listen on; 0 takes a free one and prints it."""
    api_key: str | None = None
    """Key that clients must send as a bearer token."""
    ssl_certfile: str | None = None
    """Certificate chain (PEM); with it the port speaks TLS only."""
    ssl_keyfile: str | None = None
    """Private key of the certificate (PEM), where it is not in the same file."""
    ssl_ca_certs: str | None = None
    """Authorities (PEM) that certificates of clients are checked against."""
    ssl_cert_reqs: int = 0
    """Whether clients show a certificate: 0 no, 1 if they have one, 2 always."""
    api_server_count: int = 1
    """Front-end processes."""
    disable_log_requests: bool = False
    """Do not log a line for each request."""
    api_key_file: str | None = None
    """File with a name and a key in each line; every name is a tenant."""
    tenant_by: TenantBy = "api-key"
    """What tells tenants apart, who share fairly: their keys, X-Tenant-ID as well, or nothing."""
    queue_timeout: float = 0.0
    """Seconds that a request may wait for its first step before it gets a 503; 0: no limit."""
    sse_keep_alive: float = 15.0
    """Seconds of silence after which a stream gets a comment, so that proxies keep it; 0: never."""
    admin_api_key: str | None = None
    """Key that operators must send for the admin routes; without one they are for this machine."""
    admin_api_key_file: str | None = None
    """File with a name and an operator's key in each line."""
    metrics_open: bool = False
    """Let /metrics answer without a key."""
    enable_tokenizer_info_endpoint: bool = False
    """Let /tokenizer_info show the tokenizer's settings and the chat template."""

    @property
    def has_client_keys(self) -> bool:
        """Whether clients need a key."""
        return self.api_key is not None or self.api_key_file is not None

    @property
    def has_admin_keys(self) -> bool:
        """Whether operators have keys of their own."""
        return self.admin_api_key is not None or self.admin_api_key_file is not None


class GrammarConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Structured output."""

    grammar_cache_entries: int = 256
    """Compiled grammars that are kept, about 100 kB each; 0 compiles each request's anew."""
    grammar_cache_bytes: int = 4 << 20
    """Bytes of their sources, at most."""


class ReliabilityConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What happens when a process dies or hangs, and when the daemon ends."""

    max_restarts: int = 8
    """Restarts without a completed step in between; one death more ends the daemon."""
    step_timeout: float = 60.0
    """Seconds without progress after which a process is ended and restarted; 0 for never."""
    start_timeout: float = 600.0
    """Seconds without a sign of progress that a process may take to start; 0 for ever."""
    enable_fault_injection: bool = False
    """Let the environment variable TOKEND_FAULTS break things on purpose; for tests."""
    shutdown_timeout: float = 30.0
    """Seconds in which requests may finish after SIGTERM; what is left is aborted."""
    reload_strategy: Literal["auto", "side-by-side", "in-place"] = "auto"
    """At a reload the new engine comes beside the old one, or after it; auto looks for memory."""


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything `tokend serve` was told."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    parallel: ParallelConfig = ParallelConfig()
    device: DeviceConfig = DeviceConfig()
    frontend: FrontEndConfig = FrontEndConfig()
    reliability: ReliabilityConfig = ReliabilityConfig()
    grammars: GrammarConfig = GrammarConfig()


_DTYPES_OF_WEIGHTS: Final[dict[CpuWeights, tuple[DType, ...]]] = {
    "auto": ("auto", "float32", "bfloat16", "float16"),
    "packed": ("auto", "float32", "bfloat16"),
    "int8": ("auto", "float32", "bfloat16"),
    "bf16": ("auto", "bfloat16"),
    "f32": ("auto", "float32"),
}
"""Activations that products with each form of the weights take."""


SECRET_FIELDS: Final = frozenset({"api_key", "admin_api_key"})
"""Values that nobody is shown: not in messages, and not in the list of processes."""


def flag_name(field: str) -> str:
    """The command-line flag of a field."""
    return "--" + field.replace("_", "-")


def validate(config: ServeConfig) -> None:
    """Raise ConfigError for the first setting that is impossible or conflicting."""
    _check_weights(config)
    cache, scheduler, frontend = config.cache, config.scheduler, config.frontend
    _positive("block_size", cache.block_size)
    _positive("max_num_seqs", scheduler.max_num_seqs)
    _positive("max_num_batched_tokens", scheduler.max_num_batched_tokens)
    _positive("max_model_len", config.model.max_model_len)
    for field in ("served_model_name", "tokenizer"):
        value = getattr(config.model, field)
        if value is not None and not value.strip():
            raise ConfigError(f"{flag_name(field)} must not be empty", field)
    _positive("kv_cache_memory", cache.kv_cache_memory)
    _check_parallel(config.parallel)
    _positive("cpu_threads", config.device.cpu_threads)
    _positive("api_server_count", frontend.api_server_count)
    if frontend.api_server_count > MAX_CLIENTS:
        raise ConfigError(
            f"--api-server-count must be at most {MAX_CLIENTS}, got {frontend.api_server_count}",
            "api_server_count",
        )
    if cache.block_size > 1024 or cache.block_size & (cache.block_size - 1):
        raise ConfigError(
            f"--block-size must be a power of two up to 1024, got {cache.block_size}", "block_size"
        )
    if cache.num_gpu_blocks_override is not None and cache.num_gpu_blocks_override < 2:
        raise ConfigError(
            "--num-gpu-blocks-override must be at least 2: block 0 is reserved",
            "num_gpu_blocks_override",
        )
    if cache.num_gpu_blocks_override is not None and cache.kv_cache_memory is not None:
        raise ConfigError(
            "--num-gpu-blocks-override and --kv-cache-memory both size the KV pool: give one",
            "num_gpu_blocks_override",
        )
    _check_device(config)
    _check_kv_events(cache)
    if cache.kv_cache_metrics_one_in < 0:
        raise ConfigError(
            f"--kv-cache-metrics-one-in must be 0 or more, got {cache.kv_cache_metrics_one_in}",
            "kv_cache_metrics_one_in",
        )
    if scheduler.long_prefill_token_threshold < 0:
        raise ConfigError(
            "--long-prefill-token-threshold must be 0 or more, "
            f"got {scheduler.long_prefill_token_threshold}",
            "long_prefill_token_threshold",
        )
    if scheduler.long_prefill_token_threshold and not scheduler.enable_chunked_prefill:
        raise ConfigError(
            "--long-prefill-token-threshold needs chunked prefill, "
            "and --no-enable-chunked-prefill turns it off",
            "long_prefill_token_threshold",
        )
    _check_pressure(scheduler)
    if not scheduler.session_timeout > 0.0:
        raise ConfigError(
            f"--session-timeout must be more than 0, got {scheduler.session_timeout}",
            "session_timeout",
        )
    _positive("crashes_until_alone", scheduler.crashes_until_alone)
    for field in ("max_num_queued_reqs", "max_num_queued_tokens"):
        _not_negative(field, getattr(scheduler, field) or 0)
    for field in ("grammar_cache_entries", "grammar_cache_bytes"):
        _not_negative(field, getattr(config.grammars, field))
    for field in ("queue_timeout", "sse_keep_alive"):
        _not_negative(field, getattr(frontend, field))
    if config.reliability.max_restarts < 0:
        raise ConfigError(
            f"--max-restarts must be 0 or more, got {config.reliability.max_restarts}",
            "max_restarts",
        )
    for field in ("step_timeout", "start_timeout"):
        value = getattr(config.reliability, field)
        if not value >= 0.0:
            raise ConfigError(f"{flag_name(field)} must be 0 or more, got {value}", field)
    if not 0.0 <= config.reliability.shutdown_timeout < math.inf:
        raise ConfigError(
            f"--shutdown-timeout must be 0 or more, got {config.reliability.shutdown_timeout}",
            "shutdown_timeout",
        )
    if config.reliability.reload_strategy == "side-by-side" and cache.has_fixed_kv_events_endpoint:
        raise ConfigError(
            "--reload-strategy side-by-side has two engines at a time, which cannot both publish "
            f"at --kv-events-endpoint {cache.kv_events_endpoint}: give ipc, or another strategy",
            "reload_strategy",
        )
    if not 0 <= frontend.port <= 65535:
        raise ConfigError(f"--port must be between 0 and 65535, got {frontend.port}", "port")
    _check_keys(frontend)
    _check_tls(frontend)
    if config.model.seed is not None and not 0 <= config.model.seed < 1 << 63:
        raise ConfigError(f"--seed must be in [0, 2^63), got {config.model.seed}", "seed")


def _check_parallel(parallel: ParallelConfig) -> None:
    """How many a model can be shared by is known when it is loaded; this is before any starts."""
    _positive("tensor_parallel_size", parallel.tensor_parallel_size)
    if parallel.tensor_parallel_size > MAX_TENSOR_PARALLEL_SIZE:
        raise ConfigError(
            f"--tensor-parallel-size must be at most {MAX_TENSOR_PARALLEL_SIZE}, "
            f"got {parallel.tensor_parallel_size}",
            "tensor_parallel_size",
        )


def _check_keys(frontend: FrontEndConfig) -> None:
    """An empty key would let in whoever sends an empty one."""
    for field in sorted(SECRET_FIELDS):
        key = getattr(frontend, field)
        if key is not None and not key.strip():
            variable = f"TOKEND_{field.upper()}"
            raise ConfigError(f"{flag_name(field)} (or {variable}) must not be empty", field)
        file_field = f"{field}_file"
        if getattr(frontend, file_field) == "":
            raise ConfigError(f"{flag_name(file_field)} must name a file", file_field)


def _check_tls(frontend: FrontEndConfig) -> None:
    """Half a TLS setting would leave open what looks closed."""
    if frontend.ssl_cert_reqs not in (0, 1, 2):
        raise ConfigError(
            f"--ssl-cert-reqs must be 0, 1 or 2, got {frontend.ssl_cert_reqs}", "ssl_cert_reqs"
        )
    if frontend.ssl_certfile is None:
        for field in ("ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs"):
            if getattr(frontend, field):
                raise ConfigError(f"{flag_name(field)} needs --ssl-certfile", field)
    if frontend.ssl_cert_reqs and frontend.ssl_ca_certs is None:
        raise ConfigError(
            f"--ssl-cert-reqs {frontend.ssl_cert_reqs} needs --ssl-ca-certs to check against",
            "ssl_cert_reqs",
        )
    if frontend.ssl_ca_certs is not None and not frontend.ssl_cert_reqs:
        raise ConfigError(
            "--ssl-ca-certs checks nobody with --ssl-cert-reqs 0: give 1 or 2", "ssl_ca_certs"
        )


def _check_pressure(scheduler: SchedulerConfig) -> None:
    """Doors that close above one occupancy open below a lower one, or they would flap."""
    if not 0.0 <= scheduler.watermark < 1.0:
        raise ConfigError(f"--watermark must be in [0, 1), got {scheduler.watermark}", "watermark")
    stop, preempt = scheduler.stop_admission_above, scheduler.preempt_above
    resume = scheduler.resume_admission_below
    for field in ("stop_admission_above", "resume_admission_below", "preempt_above"):
        value = getattr(scheduler, field)
        if value is not None and not 0.0 < value <= 1.0:
            raise ConfigError(f"{flag_name(field)} must be in (0, 1], got {value}", field)
    if resume is not None and stop == 1.0:
        raise ConfigError(
            "--resume-admission-below needs --stop-admission-above: admission never stops",
            "resume_admission_below",
        )
    if resume is not None and resume > stop:
        raise ConfigError(
            f"--resume-admission-below ({resume}) must not be more than "
            f"--stop-admission-above ({stop})",
            "resume_admission_below",
        )
    if preempt < stop:
        raise ConfigError(
            f"--preempt-above ({preempt}) must not be less than --stop-admission-above ({stop}): "
            "requests would be admitted to be preempted",
            "preempt_above",
        )


def _check_weights(config: ServeConfig) -> None:
    """Which activations go with which weights; a GPU has no such choice."""
    weights, dtype = config.model.cpu_weights, config.model.dtype
    if config.device.device == "cuda" and weights != "auto":
        raise ConfigError(f"--cpu-weights {weights} needs --device cpu", "cpu_weights")
    works = _DTYPES_OF_WEIGHTS[weights]
    if dtype not in works:
        raise ConfigError(
            f"--cpu-weights {weights} goes with --dtype {' or '.join(works)}, got {dtype}",
            "cpu_weights",
        )


def _check_device(config: ServeConfig) -> None:
    """What one kind of device has and the other does not."""
    cache, device = config.cache, config.device
    if not 0.0 < cache.gpu_memory_utilization <= 1.0:
        raise ConfigError(
            f"--gpu-memory-utilization must be in (0, 1], got {cache.gpu_memory_utilization}",
            "gpu_memory_utilization",
        )
    _not_negative("cascade_attention_from", device.cascade_attention_from)
    if device.device == "cpu" and cache.kv_cache_dtype == "fp8":
        raise ConfigError(
            "--kv-cache-dtype fp8 needs --device cuda; a CPU has int8", "kv_cache_dtype"
        )
    kinds = {"cpu": "cpu", "flashinfer": "cuda"}
    needed = kinds.get(device.attention_backend, device.device)
    if device.device not in ("auto", needed):
        raise ConfigError(
            f"--attention-backend {device.attention_backend} needs --device {needed}",
            "attention_backend",
        )


def _check_kv_events(cache: CacheConfig) -> None:
    endpoint = cache.kv_events_endpoint
    if endpoint is None:
        return
    if not re.fullmatch(r"ipc|ipc:///.+|tcp://[^/\s]+:[0-9]+", endpoint):
        raise ConfigError(
            f"--kv-events-endpoint takes ipc, ipc:///PATH or tcp://HOST:PORT, got {endpoint!r}",
            "kv_events_endpoint",
        )
    if not cache.enable_prefix_caching:
        raise ConfigError(
            "--kv-events-endpoint publishes what the prefix cache holds, "
            "and --no-enable-prefix-caching turns it off",
            "kv_events_endpoint",
        )


def _not_negative(field: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise ConfigError(f"{flag_name(field)} must be 0 or more, got {value}", field)


def _positive(field: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise ConfigError(f"{flag_name(field)} must be at least 1, got {value}", field)
