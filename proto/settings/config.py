"""Settings of the daemon: names, defaults and help texts.

The command line and docs/configuration.md are generated from these Structs: a field is a flag
(`max_num_seqs` is `--max-num-seqs`) and the string below it is its help. Defaults are defined
only here. Which values are valid, alone and together, is checked in config_checks.py.
"""

from collections.abc import Mapping
from typing import Final, Literal

import msgspec

from proto.runtime.plugins import Kind
from proto.settings.kv_events_config import KVEventsConfig, kv_events_config
from proto.settings.limit_mm import parse_limit_mm
from proto.settings.profiler_config import ProfilerConfig, parse_profiler_config
from proto.settings.speculative_config import SpeculativeConfig, parse_speculative_config

DType = Literal["auto", "float32", "bfloat16", "float16"]
ModelImpl = Literal["auto", "tokend", "transformers"]
Runner = Literal["auto", "generate", "pooling"]
KVCacheDType = Literal["auto", "bf16", "f16", "f32", "int8", "fp8"]
CpuWeights = Literal["auto", "packed", "int8", "packed+int8", "bf16", "f32"]
CpuKernels = Literal[
    "auto",
    "amx",
    "avx512_bf16",
    "avx512_vnni",
    "avx512",
    "avx2_vnni",
    "avx2",
    "baseline",
]
PinPolicyName = Literal["rule", "fixed", "none"]
PreemptionMode = Literal["recompute", "swap", "auto"]
LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
TenantBy = Literal["api-key", "header", "none"]
PARTS: Final[Mapping[str, tuple[Kind, tuple[str, ...]]]] = {
    "scheduling_policy": ("scheduling_policy", ("fcfs", "priority", "continuum")),
    "eviction_policy": ("eviction_policy", ("lru",)),
    "device": ("device", ("auto", "cpu", "cuda", "reference")),
    "tool_call_parser": (
        "tool_parser",
        (
            "auto",
            "deepseek_v3",
            "deepseek_v31",
            "glm45",
            "granite",
            "harmony",
            "hermes",
            "hunyuan_a13b",
            "kimi_k2",
            "llama3_json",
            "mistral",
            "mistral_named",
            "phi4_mini",
            "pythonic",
            "qwen3_coder",
        ),
    ),
}
"""Settings that name a part, which may be from outside: its kind, and the built-in names."""
GIB: Final = 1 << 30
MAX_TENSOR_PARALLEL_SIZE: Final = 64
MAX_DATA_PARALLEL_SIZE: Final = 64
MAX_STANDBY_PROCESSES: Final = 16
"""Of each role."""


def memory_size(num_bytes: int) -> str:
    """Format a number of bytes for messages: "16.51 GiB", below 1 GiB "92 MiB", "3.5 MiB"."""
    if abs(num_bytes) >= GIB:
        return f"{num_bytes / GIB:,.2f} GiB"
    mib = num_bytes / (1 << 20)
    return f"{mib:,.{1 if abs(mib) < 10 else 0}f} MiB"


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The model to serve, and how."""

    model: str = "smollm2-135m-instruct"
    """A Hugging Face folder, a .gguf file (of a split model any part) or a folder with one model in
    such files, the name of a packaged model, or ORG/NAME on the Hugging Face hub, downloaded if it
    is not in the Hugging Face cache (ORG/NAME:Q4_K_M: one of its GGUF files)."""
    revision: str | None = None
    """Branch, tag or commit of a model on the Hugging Face hub; by default its default branch."""
    mmproj: str | None = None
    """File of a GGUF model's vision part; by default the one with mmproj in its name that is beside
    the model or in its repository on the hub."""
    mmproj_auto: bool = True
    """Find the file of a GGUF model's vision part, and download it with a model of the hub."""
    hf_token: str | None = None
    """Token for the Hugging Face hub, for gated and private models; better in HF_TOKEN."""
    model_families: tuple[str, ...] = ()
    """Families of models from outside (module:name), beside those of installed packages."""
    served_model_name: tuple[str, ...] = ()
    """Model names in the API, of which responses have the first; by default the name or last path
    component of the model."""
    tokenizer: str | None = None
    """Folder with a tokenizer.json to use instead of the model's own."""
    chat_template: str | None = None
    """File with a chat template (Jinja) to use instead of the model's own."""
    dtype: DType = "auto"
    """Data type of weights and activations; auto: the fastest one of the device."""
    cpu_weights: CpuWeights = "auto"
    """Weight format on a CPU; auto: packed for a GGUF of blocks, else bf16 or int8."""
    model_impl: ModelImpl = "auto"
    """Code of the model; auto: tokend's own, or transformers' where tokend has none (slower)."""
    max_model_len: int | None = None
    """Maximum tokens of prompt and output together (8k: 8,000; 8K: 8,192); by default, or auto, the
    model's own maximum."""
    seed: int | None = None
    """Seed for requests without one, so that their sampling is the same after each start."""
    generation_config: str = "auto"
    """Sampling defaults of requests; auto: of the model's generation_config.json or GGUF file;
    vllm: none; else of a generation_config.json in this folder."""
    override_generation_config: str | None = None
    """Sampling defaults as JSON (temperature, top_k, max_new_tokens, …), over those of
    --generation-config; null for none."""
    runner: Runner = "auto"
    """What the model does: generate text, or pool it into vectors or scores; auto: as its folder
    says."""
    pooler_config: str | None = None
    """Pooling as JSON (pooling_type, normalize, true_token_id, false_token_id), instead of what the
    model's folder says."""
    enable_prompt_embeds: bool = False
    """Take prompts as embeddings, too: prompt_embeds of completions, as safetensors."""
    enable_return_routed_experts: bool = False
    """Keep the experts that computed each token of an MoE model, for return_routed_experts."""

    @property
    def mmproj_file(self) -> str | None:
        """The file of the vision part, "" for none; None for the one that belongs to the model."""
        return self.mmproj or (None if self.mmproj_auto else "")

    def served_names(self, model_name: str) -> tuple[str, ...]:
        """Return the names in the API of a model that is called `model_name`."""
        return self.served_model_name or (model_name,)


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The paged KV cache."""

    block_size: int = 16
    """Tokens in one KV block."""
    num_gpu_blocks_override: int | None = None
    """Number of KV blocks, instead of as many as fit into memory."""
    kv_cache_dtype: KVCacheDType = "auto"
    """Data type of the KV cache: int8 has scales (CPU), fp8 is e4m3 (GPU); others are unscaled."""
    kv_cache_memory: int | None = None
    """Bytes of the KV pool of all workers of an engine (suffixes K, M, G, T); by default on a CPU
    three quarters of its share of the memory that weights and steps leave free."""
    num_state_slots: int | None = None
    """Slots for the states of recurrent layers. A running sequence takes two, three while it holds
    a cached state that it began with, and one without prefix caching; by default twice the two
    (or one) of each sequence, but at most a quarter of the free memory."""
    kv_cache_populate: bool = False
    """On a CPU, allocate the memory of the KV pool at the start, not on first use."""
    enable_prefix_caching: bool = True
    """Reuse the KV cache of prompts with a common prefix."""
    eviction_policy: str = "lru"
    """Order in which unused KV blocks are evicted."""
    kv_events_config: str | None = None
    """Publish prefix cache events (with token ids), as JSON (enable_kv_cache_events, endpoint,
    replay_endpoint, …) with vLLM's keys and on its wire."""
    kv_cache_metrics_one_in: int = 0
    """Measure the lifetime of one in this many KV blocks; 0: of none."""
    gpu_memory_utilization: float = 0.9
    """Share of GPU memory to use; the KV pool gets what weights and activations leave of it."""
    kv_transfer_config: str | None = None
    """KV connector as JSON (kv_connector, kv_connector_extra_config …): KV outside the pool."""

    @property
    def pool_setting(self) -> str | None:
        """The field that sets the size of the KV pool, or None."""
        names = ("kv_cache_memory", "num_gpu_blocks_override")
        return next((name for name in names if getattr(self, name) is not None), None)

    def parsed_kv_events(self) -> KVEventsConfig | None:
        """Return where KV events are published; None if they are not. Raises ConfigError."""
        return kv_events_config(self.kv_events_config)

    @property
    def has_fixed_kv_events_endpoint(self) -> bool:
        """Whether only one engine at a time can publish KV events."""
        events = self.parsed_kv_events()
        return events is not None and events.is_fixed


DEFAULT_POOL_SHARE: Final = 0.75
"""Share that a KV pool without a setting takes of the memory that is left on a CPU."""
CPU_STEP_TOKENS: Final = 256
"""Default token budget of a step on a CPU. An abort waits for the end of a step."""
MIN_ENCODER_CACHE_ROWS: Final = 4096
MAX_ENCODER_CACHE_ROWS: Final = 1 << 14
"""Rows of encoder output that workers keep at least, by default."""


CPU_PREFILL_SLOWDOWN: Final = 2.0
"""Default of --max-prefill-slowdown on a CPU."""


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Scheduling: which requests run, and how they share a step."""

    max_num_seqs: int = 256
    """Maximum number of sequences that run at the same time."""
    max_num_batched_tokens: int | None = None
    """Maximum tokens per step, by default 256 on a CPU (an encoder's longest text, at least 2048),
    2048 to 8192 on a GPU by its memory; longer prompts are computed in chunks."""
    max_num_scheduled_tokens: int | None = None
    """Maximum tokens that the scheduler puts into a step, if less than --max-num-batched-tokens,
    which is what workers keep memory for."""
    max_num_encoder_input_tokens: int | None = None
    """Maximum rows of encoder output of images that a step computes; by default as many as decoding
    requests can wait for on a CPU, whole images on a GPU."""
    encoder_cache_size: int | None = None
    """Rows of encoder output of images that workers keep; by default four of the largest images, at
    least 4096 and at most 16384, or one that is larger."""
    long_prefill_token_threshold: int = 0
    """Maximum tokens of one prompt in a step; 0: no limit."""
    enable_chunked_prefill: bool = True
    """Compute long prompts in chunks over several steps."""
    max_prefill_slowdown: float | None = None
    """Maximum step time with prefill, as a multiple of that of decoding alone, unless prompts come
    faster; 0: no limit; by default 2 on a CPU, 0 on a GPU."""
    scheduling_policy: str = "fcfs"
    """Order of waiting requests; continuum: by agent session, with KV retained between turns."""
    scheduler_features: tuple[str, ...] = ()
    """Features of the scheduler from outside (module:name), in this order."""
    pin_policy: PinPolicyName = "rule"
    """How long continuum retains KV between turns; rule: by recomputation cost and tool durations;
    fixed: 2 s if tool calls are short; none: not at all."""
    max_pinned_share: float = 0.5
    """Maximum share of the KV blocks (0 to 1) retained between turns of agent sessions."""
    max_pinned_share_per_tenant: float = 0.5
    """Maximum share of all KV blocks (0 to 1) retained for the agent sessions of one tenant; has an
    effect only below --max-pinned-share."""
    async_scheduling: bool | None = None
    """Schedule the next step while the current one computes; by default on a GPU only."""
    scheduler_reserve_full_isl: bool = False
    """Admit a request only if its whole prompt fits the KV pool, not just its first chunk."""
    watermark: float = 0.0
    """Share of the KV blocks (0 to 1) that admission leaves free for running requests."""
    stop_admission_above: float = 1.0
    """Stop admitting requests when more than this share of the KV blocks is in use."""
    resume_admission_below: float | None = None
    """Resume admission below this share; by default 0.9 times --stop-admission-above."""
    preempt_above: float = 1.0
    """Preempt requests, down to one, while more than this share of the KV blocks is in use."""
    preemption: PreemptionMode = "auto"
    """How preempted KV is restored: recomputed, loaded from host memory, or by the faster way."""
    session_timeout: float = 600.0
    """Seconds that a session (a request with input in parts) waits for its next input."""
    crashes_until_isolated: int = 3
    """Crashes without progress in between after which a request is computed alone."""
    max_num_queued_reqs: int | None = None
    """Maximum choices before their first step; by default 4 times what can run; 0: no limit."""
    max_num_queued_tokens: int | None = None
    """Maximum prompt tokens that wait; by default 4 times what fits the KV pool; 0: no limit."""
    enable_mfu_metrics: bool = False
    """Estimate FLOPs and bytes of each step, by the model's shape, for /metrics."""
    peak_tflops: float = 0.0
    """TFLOP/s of one device, for the share that each step reaches; 0: unknown."""
    peak_memory_gbps: float = 0.0
    """Memory bandwidth of one device in GB/s, for the share that each step reaches; 0: unknown."""

    @property
    def step_tokens(self) -> int:
        """Largest step of the workers.

        Without a setting a CPU's default, until the engine has put what workers report in its place
        (`with_step_tokens`).
        """
        return self.max_num_batched_tokens or CPU_STEP_TOKENS

    @property
    def token_budget(self) -> int:
        """Most tokens that the scheduler puts into a step."""
        return self.max_num_scheduled_tokens or self.step_tokens

    def encoder_cache_rows(self, max_embeds: int) -> int:
        """Return the rows of encoder output that workers keep. max_embeds: of the largest image."""
        several = min(4 * max_embeds, MAX_ENCODER_CACHE_ROWS)
        return self.encoder_cache_size or max(several, max_embeds, MIN_ENCODER_CACHE_ROWS)


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Distribution of the model over devices."""

    tensor_parallel_size: int = 1
    """Number of workers (one per device) that share each layer; on a CPU they share the cores."""
    data_parallel_size: int = 1
    """Number of engines that serve the model, each with workers and a KV pool of its own."""
    enable_expert_parallel: bool = False
    """Give each worker whole experts of an MoE layer instead of a part of each."""

    @property
    def flags(self) -> str:
        """The flags that say how many workers there are, for messages."""
        ranks = f"--tensor-parallel-size {self.tensor_parallel_size}"
        if self.data_parallel_size == 1:
            return ranks
        engines = f"--data-parallel-size {self.data_parallel_size}"
        return f"{engines} with {ranks}" if self.tensor_parallel_size > 1 else engines

    @property
    def num_workers(self) -> int:
        """Workers of all engines together."""
        return self.tensor_parallel_size * self.data_parallel_size


class DeviceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Device of the workers, and how it is used."""

    device: str = "auto"
    """Device of the workers; reference: plain torch on the CPU, slow, to compare with."""
    attention_backend: Literal["auto", "cpu", "flashinfer"] = "auto"
    """Attention kernels; auto: plain torch, slow, for heads that no kernel computes."""
    cpu_threads: int | None = None
    """OpenMP threads of a CPU worker; by default one per core, or its share of the cores."""
    cpu_kernels: CpuKernels = "auto"
    """Best instruction set that a CPU worker may use; auto: the CPU's."""
    enforce_eager: bool = False
    """On a GPU, launch kernels one by one instead of replaying CUDA graphs."""
    batch_invariant: bool = False
    """The bits of a token do not depend on the other tokens of a step; slower on a GPU."""
    cascade_attention_from: int = 0
    """Read a common prefix of at least this many KV blocks once per step; 0: never; eager only."""


ReasoningParserName = Literal[
    "auto",
    "none",
    "deepseek_r1",
    "deepseek_v3",
    "glm45",
    "granite",
    "granite33",
    "harmony",
    "holo2",
    "hunyuan_a13b",
    "kimi_k2",
    "minimax_m2",
    "mistral",
    "qwen3",
    "seed_oss",
    "smollm3",
    "step3",
]


class FrontEndConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Front end: HTTP, keys, logs, parsers."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8000
    """Port to listen on; 0: any free port, which is printed."""
    api_key: str | None = None
    """Key that clients must send as a bearer token."""
    ssl_certfile: str | None = None
    """Certificate chain (PEM); enables TLS, and only TLS, on the port."""
    ssl_keyfile: str | None = None
    """Private key of the certificate (PEM), if it is not in the same file."""
    ssl_ca_certs: str | None = None
    """Certificate authorities (PEM) for client certificates."""
    ssl_cert_reqs: int = 0
    """Client certificates: 0 not requested, 1 optional, 2 required."""
    api_server_count: int = 1
    """Number of front-end processes."""
    disable_log_requests: bool = False
    """Do not log a line for each request, refused ones included."""
    log_client_address: bool = True
    """Put the client's address into the lines of requests."""
    trusted_proxies: tuple[str, ...] = ("127.0.0.1", "::1")
    """Addresses and networks of proxies whose X-Forwarded-For or X-Real-IP names the client in the
    log; '[]': of none."""
    log_format: LogFormat = "text"
    """Format of all lines on both output streams: text, or one JSON object per line. Lines that the
    log's reader does not take are dropped, and a later line says how many."""
    log_level: LogLevel = "info"
    """Lowest level of log lines; debug adds the times of the start's phases."""
    api_key_file: str | None = None
    """File with a tenant name and an API key on each line."""
    tenant_by: TenantBy = "api-key"
    """How fair scheduling identifies tenants: by API key, by X-Tenant-ID too, or not at all."""
    queue_timeout: float = 0.0
    """Seconds that a request may wait for its first step before a 503; 0: no limit."""
    max_response_bytes: int = 128 << 20
    """Most bytes of text and log-probabilities of a response: estimated before its request is
    accepted, and counted while it is made."""
    sse_keep_alive: float = 15.0
    """Seconds without data after which a stream gets an empty line, for proxies; 0: never."""
    reasoning_parser: ReasoningParserName = "auto"
    """Parser of reasoning content; auto: detected from the chat template."""
    stream_interval: int = 1
    """Tokens per event of a stream, unless the request sets it."""
    admin_api_key: str | None = None
    """Key for operators' routes; without one they accept local programs only."""
    admin_api_key_file: str | None = None
    """File with a name and an admin key on each line."""
    admin_port: int | None = None
    """Port on 127.0.0.1 for operators' routes, health and metrics alone; 0: any free port."""
    admin_socket: str | None = None
    """Path of a Unix socket of mode 0600 for the same, without keys."""
    metrics_open: bool = False
    """Serve /metrics without a key."""
    tool_call_parser: str = "auto"
    """Parser of tool calls; auto: detected from the chat template."""
    enable_tokenizer_info_endpoint: bool = False
    """Serve the tokenizer's settings and the chat template at /tokenizer_info."""
    spm_infill: bool = False
    """Put the suffix before the prefix where a model fills in the middle, as some were trained."""
    max_stored_responses_mib: int = 64
    """MiB for stored responses in each front end, at most a quarter per client; 0: store none."""
    stored_response_seconds: float = 3600.0
    """Seconds after which a stored response is deleted."""
    allowed_origins: tuple[str, ...] = ()
    """Origins whose pages may use the API (CORS), such as https://chat.example; *: all."""
    allowed_hosts: tuple[str, ...] = ()
    """Further names of the server in Host, such as llm.example or *.example; *: all."""
    allow_credentials: bool = False
    """Let those pages send cookies, HTTP logins and client certificates."""
    allowed_methods: tuple[str, ...] = ("*",)
    """Methods that those pages may use; *: all."""
    allowed_headers: tuple[str, ...] = ("*",)
    """Request headers that those pages may send; *: all."""
    page: bool = True
    """Serve the web page at / with the live view of the engine."""
    otlp_traces_endpoint: str | None = None
    """URL of an OpenTelemetry collector that gets a span per request; needs the extra otel."""

    @property
    def has_client_keys(self) -> bool:
        return self.api_key is not None or self.api_key_file is not None

    @property
    def has_admin_keys(self) -> bool:
        return self.admin_api_key is not None or self.admin_api_key_file is not None

    @property
    def has_admin_listener(self) -> bool:
        return self.admin_port is not None or self.admin_socket is not None


class MediaConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Images in requests: where they may come from, and their limits."""

    allowed_media_domains: tuple[str, ...] = ()
    """Hosts whose http and https URLs may be images: a name, *.example for all below one, NAME:PORT
    for a port that is not the scheme's own, or * for all; by default none. Hosts with loopback,
    link-local, private or reserved addresses are never reached."""
    allowed_local_media_path: str | None = None
    """Folder whose files may be images (file:// URLs), with all folders in it; by default none."""
    limit_mm_per_prompt: str | None = None
    """Most images of a prompt, as JSON; by default {"image": 64}; with 0 images models are served
    for text."""
    max_image_pixels: int = 64_000_000
    """Most pixels of an image as it is sent."""
    max_image_bytes: int = 20 << 20
    """Most bytes of an encoded image (suffixes K, M, G)."""
    media_timeout: float = 10.0
    """Seconds for an image to be fetched, and again to be decoded and scaled."""
    media_memory: int = 256 << 20
    """Bytes of shared memory in each front end (suffixes K, M, G) for pixels of images: of those of
    open requests, and of earlier ones as long as there is space."""

    @property
    def max_images(self) -> int:
        """Most images of a prompt. Raises ConfigError."""
        return parse_limit_mm(self.limit_mm_per_prompt)


class GrammarConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Structured output."""

    grammar_cache_entries: int = 256
    """Most compiled grammars to cache, typically of 200 kB; 0: compile for every request."""
    grammar_cache_bytes: int = 64 << 20
    """Maximum total bytes of cached grammars and their sources."""


class SpeculationConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Speculative decoding: several tokens of a request in one step."""

    speculative_config: str | None = None
    """Drafts as JSON, with vLLM's keys: method (suffix, ngram, grammar, draft_model, eagle, eagle3,
    several joined by +, none), model, num_speculative_tokens, prompt_lookup_min …; by default
    suffix+grammar where bits do not depend on the batch, else none."""
    speculative_max_tokens: int = 16
    """Longest draft of a request, 1 to 64; how much of it is computed is decided in each step."""

    def parsed(self, default: tuple[str, ...] = ()) -> SpeculativeConfig:
        """Return what both say, with the methods `default` without a text; parsed only once.

        Raises ConfigError naming the key at fault.
        """
        return parse_speculative_config(
            self.speculative_config, self.speculative_max_tokens, default
        )


class LoRAConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Adapters (LoRA) on the model."""

    enable_lora: bool = False
    """Serve adapters on the model."""
    lora_modules: tuple[str, ...] = ()
    """Adapters to load at the start: NAME=PATH, or vLLM's JSON (name, path)."""
    max_loras: int = 8
    """Most adapters in one step."""
    max_cpu_loras: int | None = None
    """Most adapters that the workers keep in memory; by default four times --max-loras."""
    max_lora_rank: int = 64
    """Largest rank of an adapter."""
    lora_target_modules: tuple[str, ...] = ()
    """Modules that adapters may change, by the last part of their names; by default all."""
    lora_dir: str | None = None
    """Folder in which an adapter is looked up by its name when a request first names it."""
    lora_allowed_dirs: tuple[str, ...] = ()
    """Folders in which adapters must lie that are loaded while it serves; by default any."""
    lora_access: tuple[str, ...] = ()
    """Who may use which adapters: PATTERN=KEY[+KEY …], names of adapters with * and ?, and names of
    keys in --api-key-file; by default all clients may use all."""
    max_lora_wait_steps: int = 64
    """Steps for which a request may wait for one of --max-loras; then requests of other adapters
    wait for it."""

    @property
    def num_resident(self) -> int:
        """Adapters that the workers keep in memory."""
        return 4 * self.max_loras if self.max_cpu_loras is None else self.max_cpu_loras


class ReliabilityConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Restarts, timeouts, shutdown and reload."""

    max_restarts: int = 8
    """Maximum restarts without a completed step in between; the next crash ends the daemon."""
    step_timeout: float = 60.0
    """Seconds without progress after which a process is killed and restarted; 0: never."""
    start_timeout: float = 600.0
    """Seconds without progress after which a starting process is killed; 0: never."""
    standby_engines: int = 0
    """Started engine processes without requests, which replace one that dies at once."""
    standby_workers: int = 0
    """Workers with the weights and without an engine, which replace one that dies at once; needs
    weights that workers share in memory."""
    enable_fault_injection: bool = False
    """Inject the faults listed in the environment variable TOKEND_FAULTS; for tests."""
    shutdown_timeout: float = 30.0
    """Seconds for requests to finish after SIGTERM; then the rest is aborted."""
    reload_strategy: Literal["auto", "side-by-side", "in-place"] = "auto"
    """Start the new engine beside the old one or after it; auto: by available memory."""

    @property
    def standby(self) -> str:
        """The standby processes in words, such as "1 engine, 2 workers"; "" for none."""
        numbers = (("engine", self.standby_engines), ("worker", self.standby_workers))
        return ", ".join(f"{n} {role}{'s' if n > 1 else ''}" for role, n in numbers if n)


class TraceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Trace of scheduling decisions, see docs/trace.md, and profiles of the processes."""

    sched_trace: str | None = None
    """File (.jsonl) for the scheduler's trace; see `tokend trace`."""
    sched_trace_max_bytes: int = 4 << 30
    """Maximum size of the trace file (suffixes K, M, G, T); then tracing stops."""
    profiler_config: str | None = None
    """Profiles at POST /start_profile, as JSON with vLLM's keys: profiler (torch),
    torch_profiler_dir, torch_profiler_with_stack, max_iterations …; by default none."""

    def parsed_profiler(self) -> ProfilerConfig | None:
        """Return the profiler's settings, None if it is off; raises ConfigError."""
        return parse_profiler_config(self.profiler_config)


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of `tokend serve`."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    parallel: ParallelConfig = ParallelConfig()
    device: DeviceConfig = DeviceConfig()
    frontend: FrontEndConfig = FrontEndConfig()
    reliability: ReliabilityConfig = ReliabilityConfig()
    grammars: GrammarConfig = GrammarConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    lora: LoRAConfig = LoRAConfig()
    trace: TraceConfig = TraceConfig()
    media: MediaConfig = MediaConfig()


SECRET_FIELDS: Final = frozenset({"api_key", "admin_api_key", "hf_token"})
"""Fields whose values never appear in messages or process listings."""


def flag_name(field: str) -> str:
    return "--" + field.replace("_", "-")
