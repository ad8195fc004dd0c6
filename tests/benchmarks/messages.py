"""Workloads and timings of benchmarks of parts of the daemon.

Exchanged between benchmarks and the programs that run a workload: one JSON document per line, so
that programs of other environments can run it, too.

A workload is a recipe, not a recording: both sides derive the same token ids from it.
"""

from typing import Literal

import msgspec

from proto.messages.prepared_model import PreparedModel
from proto.messages.sampling_params import SamplingParams
from proto.settings.config import KVCacheDType, ServeConfig


class RequestRecipe(msgspec.Struct, frozen=True):
    """The recipe of a request.

    segments: the prompt as pairs (seed, number of tokens); the tokens of a segment
        are `random.Random(seed).choices(range(1000, 30000), k=number)`, so segments
        of one seed share a prefix.
    max_tokens: number of output tokens; no token ends the request earlier.
    priority: lower goes first, with the policy `priority`.
    tenant: for fairness between tenants.
    """

    segments: tuple[tuple[int, int], ...]
    max_tokens: int
    priority: int = 0
    tenant: int = 0


class SchedulerWorkload(msgspec.Struct, frozen=True, kw_only=True):
    """A load in a closed loop: `concurrency` requests are always unfinished.

    requests: added in this order, and repeated from the start.
    concurrency: a new request is added, outside the measured time, for each one that ends.
    warm_up_steps, measured_steps: in this order.
    measure: the steps that count; "hashing" runs no steps and times the hashing of the
        first request's prompt instead.
    num_blocks: of the KV pool, the null block included. traced: as with --sched-trace.
    watched: the live view has a subscriber, with a view after every 16th step.
    The rest are settings of the scheduler, as in proto/settings/config.py.
    """

    name: str
    requests: tuple[RequestRecipe, ...]
    concurrency: int
    warm_up_steps: int
    measured_steps: int
    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    scheduling_policy: str = "fcfs"
    eviction_policy: str = "lru"
    scheduler_features: tuple[str, ...] = ()
    measure: Literal["every step", "preempting steps", "hashing"] = "every step"
    traced: bool = False
    watched: bool = False


class Timing(msgspec.Struct, frozen=True):
    """Microseconds, bytes or a number per step."""

    median: float
    p99: float


class SchedulerTimings(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a workload, in CPU time; None for parts that do not occur in it.

    num_steps: steps that count. num_scheduled, num_preempted: mean requests per step.
    schedule, update: the two halves of a step, up to the finished message.
    encode, decode: of the step's three messages, on both sides.
    wire_bytes: of the three messages.
    hash: of the first request's prompt. view: a live view and its message; not part of a step.
    """

    workload: str
    num_steps: int
    num_scheduled: float = 0.0
    num_preempted: float = 0.0
    schedule: Timing | None = None
    update: Timing | None = None
    encode: Timing | None = None
    decode: Timing | None = None
    wire_bytes: Timing | None = None
    hash: Timing | None = None
    view: Timing | None = None


class SchedulerFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One workload over all rounds: medians of the rounds' figures, in microseconds and bytes.

    *_min: the figure of the best round, which was disturbed least by other load.
    """

    num_scheduled: float
    num_preempted: float
    schedule_us_median: float | None = None
    schedule_us_min: float | None = None
    schedule_us_p99: float | None = None
    update_us_median: float | None = None
    update_us_min: float | None = None
    update_us_p99: float | None = None
    encode_us_median: float | None = None
    encode_us_p99: float | None = None
    decode_us_median: float | None = None
    decode_us_p99: float | None = None
    wire_bytes_median: float | None = None
    hash_us_median: float | None = None
    hash_us_min: float | None = None
    hash_us_p99: float | None = None
    view_us_median: float | None = None
    view_us_p99: float | None = None


class SchedulerRow(SchedulerFigures, frozen=True, kw_only=True):
    """A row of the table: our figures, and the peer's if there is one.

    ratio, ratio_min: ours to the peer's of schedule + update (or of the hashing),
        of the medians and of the best rounds; None if one had no step that counts.
    """

    workload: str
    rounds: int
    peer: SchedulerFigures | None = None
    ratio: float | None = None
    ratio_min: float | None = None


class AttentionWorkload(msgspec.Struct, frozen=True, kw_only=True):
    """One step of attention alone, all layers, over a cache that is full.

    num_seqs: sequences with `context_tokens` each, of which `query_tokens` are new.
    dtype: of the activations. kv_cache_dtype: as the setting.
    rounds: pairs of one step and one measurement of the memory bandwidth.
    read_megabytes: size of the latter, more than the CPU caches hold.
    num_threads: of a CPU; None: as in the daemon.
    The rest is the shape of the model.
    """

    name: str
    num_seqs: int
    context_tokens: int
    query_tokens: int
    dtype: Literal["float32", "bfloat16", "float16"]
    kv_cache_dtype: KVCacheDType
    rounds: int
    read_megabytes: int = 512
    num_threads: int | None = None
    num_layers: int = 30
    num_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 64
    block_size: int = 16


class AttentionTimings(msgspec.Struct, frozen=True, kw_only=True):
    """The timings of one workload.

    kernels: the instruction set.
    step_ms_*: rotary embedding, KV write and attention of all layers.
    kv_megabytes: visible K and V, scales included, which a step reads once.
    kv_gb_per_s_*: of that; read_gb_per_s_*: summing a large array, in large pages as K and V
        are, with the same threads.
    share_of_read_median: their ratio, by round.
    attention_gflop_per_s_best: both products over the pairs of tokens that attend to each other.
    """

    workload: str
    kernels: str
    num_threads: int
    step_ms_best: float
    step_ms_median: float
    kv_megabytes: float
    kv_gb_per_s_best: float
    kv_gb_per_s_median: float
    read_gb_per_s_best: float
    read_gb_per_s_median: float
    share_of_read_median: float
    attention_gflop_per_s_best: float


class StepWorkload(msgspec.Struct, frozen=True, kw_only=True):
    """Steps of a worker by itself, in which `num_rows` sequences decode one token each.

    config: as in the daemon. context_tokens: initial context of each sequence.
    computes_prompts: a measured step is instead all chunks of a prompt of context_tokens, of each
        sequence in turn. temperature: of the sampling; 0 is greedy.
    """

    config: ServeConfig
    model: PreparedModel
    num_rows: int
    context_tokens: int
    warm_up_steps: int
    measured_steps: int
    computes_prompts: bool = False
    temperature: float = 0.0


class StepTimings(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds per step, by part.

    product: the model's matrix products. attention: rotary embedding, KV write and attention.
    rest: everything else; its share is computed for every step.
    waits_a_step: how often a thread gave up its core; page_faults_a_step: without a disk.
    """

    device: str
    num_threads: int
    num_rows: int
    context_tokens: int
    num_steps: int
    step_ms_median: float
    step_ms_min: float
    step_ms_p99: float
    product_ms_median: float
    attention_ms_median: float
    rest_ms_median: float
    rest_ms_min: float
    rest_share_median: float
    page_faults_a_step: float
    waits_a_step: float


class SamplingCase(msgspec.Struct, frozen=True, kw_only=True):
    """A sampling step, by the parameters of its rows."""

    name: str
    rows: list[SamplingParams]


class SamplingWorkload(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling steps with random logits, without a model; the cases alternate.

    context_tokens: initial context of each row, half of it outputs. dtype: of the logits.
    num_steps: measured steps of each case. num_threads: as in AttentionWorkload.
    """

    cases: list[SamplingCase]
    vocab_size: int
    context_tokens: int
    num_steps: int
    dtype: Literal["float32", "bfloat16", "float16"]
    num_threads: int | None = None


class SamplingCaseTimings(msgspec.Struct, frozen=True, kw_only=True):
    """Microseconds from a step's logits to its tokens, and relative to the first case."""

    name: str
    num_rows: int
    step_us_median: float
    step_us_min: float
    ratio_median: float
    ratio_min: float


class SamplingTimings(msgspec.Struct, frozen=True, kw_only=True):
    """kernels: the instruction set."""

    kernels: str
    num_threads: int
    num_steps: int
    cases: list[SamplingCaseTimings]


class LimitsWorkload(msgspec.Struct, frozen=True, kw_only=True):
    """The essential parts of a model's steps, measured separately.

    rows: numbers of rows of the products. prompt_tokens: of the prompts whose attention is
    measured, as many as fit into a step. rounds: of each part; the best one counts.
    """

    config: ServeConfig
    model: PreparedModel
    rows: list[int]
    prompt_tokens: int
    rounds: int


class LimitsTimings(msgspec.Struct, frozen=True, kw_only=True):
    """Times of the separate parts.

    weights: their format or formats.
    layer_products_ms, head_product_ms: of all layers, and of the logits, by the numbers in `rows`.
    attention_ns_per_pair: all layers of a prompt, per pair of tokens that attend to each other.
    weight_bytes: bytes read by a step of one row.
    kv_bytes_per_token: of each group of layers, with its window in tokens.
    """

    device: str
    num_threads: int
    weights: str
    rows: list[int]
    layer_products_ms: list[float]
    head_product_ms: list[float]
    attention_ns_per_pair: float
    read_gb_per_s: float
    weight_bytes: int
    kv_bytes_per_token: list[tuple[int, int | None]]


class OffloadWorkload(msgspec.Struct, frozen=True, kw_only=True):
    """Agents that return after a while, and scans between them: prompts that are never repeated.

    Sizes are in blocks. num_agents: each has an initial prompt of agent_blocks, of which
    common_blocks are the same for all, and grows by turn_blocks in each of num_turns turns.
    scan_share: part of all requests that are scans, of scan_blocks each.
    device_blocks, medium_blocks: capacity of the device and of the medium.
    policies: of the medium, as "none", "lru", "arc"; with the suffix "+2" blocks are stored at
    the second lookup.
    """

    policies: list[str]
    num_agents: int = 24
    num_turns: int = 24
    agent_blocks: int = 40
    common_blocks: int = 20
    turn_blocks: int = 4
    scan_share: float = 0.5
    scan_blocks: int = 120
    device_blocks: int = 500
    medium_blocks: int = 2000
    seed: int = 0


class OffloadHits(msgspec.Struct, frozen=True, kw_only=True):
    """Of one policy, as shares of the blocks of the agents' prompts (scans find nothing).

    device, medium: found there. computed: the rest. num_stored: blocks copied to the medium,
    scans included.
    """

    policy: str
    num_blocks: int
    device: float
    medium: float
    computed: float
    num_stored: int


class OffloadHitsOfAll(msgspec.Struct, frozen=True, kw_only=True):
    """Hits of all policies, a row each."""

    rows: list[OffloadHits]


class OffloadTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Median milliseconds from a request to its only token, by the place of its prompt's KV.

    ratio: of medium to computed. num_tokens: of the prompt.
    """

    num_tokens: int
    rounds: int
    computed_ms: float
    medium_ms: float
    device_ms: float
    ratio: float
