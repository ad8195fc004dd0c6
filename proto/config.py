"""Every setting of the daemon, with its default and its meaning.

The command line is generated from these Structs: a field is a flag
(`max_num_seqs` is `--max-num-seqs`), the string under it is its help. Nothing
else in tokend holds a default. Structs are frozen: what a process runs with is
what it was given. Which values are possible together is in config_checks.py.
"""

from typing import Final, Literal

import msgspec

DType = Literal["auto", "float32", "bfloat16", "float16"]
KVCacheDType = Literal["auto", "bf16", "f16", "f32", "int8", "fp8"]
CpuWeights = Literal["auto", "packed", "int8", "bf16", "f32"]
PinPolicyName = Literal["rule", "fixed", "none"]
PreemptionMode = Literal["recompute", "swap", "auto"]
LogFormat = Literal["text", "json"]
TenantBy = Literal["api-key", "header", "none"]
ToolCallParser = Literal["auto", "hermes", "llama3_json", "mistral", "mistral_named", "pythonic"]
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
    chat_template: str | None = None
    """File with another chat template (Jinja); by default the model's own."""
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
    kv_cache_populate: bool = False
    """On a CPU, take the memory of the KV pool at the start, not as tokens first need it."""
    enable_prefix_caching: bool = True
    """Reuse the KV of prompts that begin alike."""
    kv_events_endpoint: str | None = None
    """Publish what the prefix cache holds (prompts' token ids): ipc, ipc://PATH or tcp://HOST:PORT."""
    kv_cache_metrics_one_in: int = 0
    """Measure how long one KV block in this many keeps its content; 0 measures none."""
    gpu_memory_utilization: float = 0.9
    """Part of a GPU's memory that may be taken; the KV pool gets what weights and steps leave."""
    kv_transfer_config: str | None = None
    """KV connector, as JSON (kv_connector, kv_connector_extra_config …): KV beyond the pool."""

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
    max_step_stretch: float = 0.0
    """Most that a prompt may stretch a step of others that decode, as a multiple; 0: no limit."""
    scheduling_policy: Literal["fcfs", "priority", "continuum"] = "fcfs"
    """Order of waiting requests; continuum: of jobs, whose KV may be kept between two turns."""
    pin_policy: PinPolicyName = "rule"
    """How long continuum keeps it: by what it would cost and durations of tools, 2 s if they are
    short, or not at all."""
    max_pinned_share: float = 0.5
    """Most of the KV blocks (0 to 1) that jobs keep between turns."""
    max_pinned_share_per_tenant: float = 0.5
    """Most of the KV blocks (0 to 1, a part of all) that the jobs of one tenant keep between turns;
    a limit of its own only where it is below --max-pinned-share."""
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
    preemption: PreemptionMode = "auto"
    """How preempted KV comes back: computed, loaded from host memory, or by what is faster."""
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


ReasoningParserName = Literal[
    "auto",
    "none",
    "deepseek_r1",
    "deepseek_v3",
    "glm45",
    "granite",
    "holo2",
    "kimi_k2",
    "minimax_m2",
    "mistral",
    "qwen3",
    "seed_oss",
    "smollm3",
    "step3",
]


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
    log_format: LogFormat = "text"
    """Lines of the log for people, or each a JSON object."""
    api_key_file: str | None = None
    """File with a name and a key in each line; every name is a tenant."""
    tenant_by: TenantBy = "api-key"
    """What tells tenants apart, who share fairly: their keys, X-Tenant-ID as well, or nothing."""
    queue_timeout: float = 0.0
    """Seconds that a request may wait for its first step before it gets a 503; 0: no limit."""
    sse_keep_alive: float = 15.0
    """Seconds of silence after which a stream gets a comment, so that proxies keep it; 0: never."""
    reasoning_parser: ReasoningParserName = "auto"
    """Where a model's thoughts begin and end; auto looks into the chat template."""
    stream_interval: int = 1
    """Tokens between two events of a streamed choice, where the request does not say."""
    admin_api_key: str | None = None
    """Key that operators must send for the admin routes; without one they are for this machine."""
    admin_api_key_file: str | None = None
    """File with a name and an operator's key in each line."""
    metrics_open: bool = False
    """Let /metrics answer without a key."""
    tool_call_parser: ToolCallParser = "auto"
    """How the model writes calls of tools; auto finds that in the chat template."""
    enable_tokenizer_info_endpoint: bool = False
    """Let /tokenizer_info show the tokenizer's settings and the chat template."""
    max_stored_responses_mib: int = 64
    """Memory for responses that clients ask to be stored, a quarter of it for one client at most;
    0 stores none."""
    stored_response_seconds: float = 3600.0
    """How long such a response is kept."""
    page: bool = True
    """Serve the page at / and the live view of the engine that it shows."""

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


class TraceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the scheduler decided, step by step, in a file: docs/trace.md."""

    sched_trace: str | None = None
    """File (.jsonl) for the scheduler's trace; `tokend trace` shows and replays it."""
    sched_trace_max_bytes: int = 4 << 30
    """The trace ends when its file is so long (suffixes K, M, G)."""


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
    trace: TraceConfig = TraceConfig()


SECRET_FIELDS: Final = frozenset({"api_key", "admin_api_key"})
"""Values that nobody is shown: not in messages, and not in the list of processes."""


def flag_name(field: str) -> str:
    """The command-line flag of a field."""
    return "--" + field.replace("_", "-")
