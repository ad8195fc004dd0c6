"""What parts of the daemon are measured with, and what came out.

Spoken between `tokend bench` and the programs that play a workload: one
JSON document a line, so that a program of another environment can play it too.

A workload is a recipe, not a recording: both sides make the same token ids from it.
"""

from typing import Literal

import msgspec

from proto.config import KVCacheDType, ServeConfig
from proto.prepared_model import PreparedModel
from proto.sampling_params import SamplingParams


class RequestRecipe(msgspec.Struct, frozen=True):
    """A request to make.

    segments: the prompt, as (seed, number of tokens) each; the tokens of a segment
        are `random.Random(seed).choices(range(1000, 30000), k=number)`, so segments
        of one seed begin alike.
    max_tokens: it ends after so many outputs; no token stops it sooner.
    priority: lower goes first, where the policy asks.
    tenant: whose it is, where the scheduler shares between tenants.
    """

    segments: tuple[tuple[int, int], ...]
    max_tokens: int
    priority: int = 0
    tenant: int = 0


class SchedulerWorkload(msgspec.Struct, frozen=True, kw_only=True):
    """A load in a closed loop: `concurrency` requests are always unfinished.

    requests: offered in this order, and from the start again when they run out.
    concurrency: a new request is offered, outside the measured time, for each that ends.
    warm_up_steps, measured_steps: in this order.
    measure: which of the measured steps count; "hashing" runs no steps, and times
        the hashing of the first request's prompt instead.
    num_blocks: of the KV pool, the null block included. traced: as with --sched-trace.
    watched: somebody watches the live view, of which one is made after each 16th step.
    The rest are settings of the scheduler, as in proto/config.py.
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
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    measure: Literal["every step", "preempting steps", "hashing"] = "every step"
    traced: bool = False
    watched: bool = False


class Timing(msgspec.Struct, frozen=True):
    """Microseconds (or bytes, or a number) a step."""

    median: float
    p99: float


class SchedulerTimings(msgspec.Struct, frozen=True, kw_only=True):
    """One workload played once, in CPU time; None for what does not occur in it.

    num_steps: that were counted. num_scheduled, num_preempted: requests a step, mean.
    schedule, update: the two halves of a step, up to the finished message.
    encode, decode: of the step's three messages, on whichever side that happens.
    wire_bytes: of the three together.
    hash: of the first request's prompt. view: to make a view and its message; no part of a step.
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

    *_min: the figure of the best round, which other load on the machine disturbed least.
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
    """A row of the table: ours, and beside it the peer's where there is one.

    ratio, ratio_min: ours to the peer's of schedule + update (or of the hashing),
        of the medians and of the best rounds; None where one had no step that counts.
    """

    workload: str
    rounds: int
    peer: SchedulerFigures | None = None
    ratio: float | None = None
    ratio_min: float | None = None


class AttentionWorkload(msgspec.Struct, frozen=True, kw_only=True):
    """One step of attention alone, all layers, over a cache that is full.

    num_seqs: in the step, each with `context_tokens`, of which `query_tokens` are new.
    dtype: of the activations. kv_cache_dtype: as the setting.
    rounds: each is one step and one measurement of the memory, one after the other.
    read_megabytes: of that: more than the caches of a processor hold.
    num_threads: of a CPU; None takes those that the daemon takes.
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
    """What one workload took.

    kernels: the instruction set.
    step_ms_*: rotary embedding, KV write and attention of all layers.
    kv_megabytes: K and V in sight, scales included, that a step reads once.
    kv_gb_per_s_*: of that; read_gb_per_s_*: summing a large array, in large pages as K and V
        are, with the same threads.
    share_of_read_median: the one by the other, round by round.
    attention_gflop_per_s_best: both products over the pairs of tokens that see each other.
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

    config: as the daemon would have it. context_tokens: that each has when it begins.
    temperature: of the sampling; 0 is greedy.
    """

    config: ServeConfig
    model: PreparedModel
    num_rows: int
    context_tokens: int
    warm_up_steps: int
    measured_steps: int
    temperature: float = 0.0


class StepTimings(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds a step, and where they go.

    product: the model's matrix products. attention: rotary embedding, KV write and attention.
    rest: all else; its share is that of each step by itself.
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
    """A step by what each of its rows wants."""

    name: str
    rows: list[SamplingParams]


class SamplingWorkload(msgspec.Struct, frozen=True, kw_only=True):
    """The sampling of steps whose scores are random, without a model; the cases take turns.

    context_tokens: that each row has when it begins, half of them outputs. dtype: of the scores.
    num_steps: of each case that are measured. num_threads: as of AttentionWorkload.
    """

    cases: list[SamplingCase]
    vocab_size: int
    context_tokens: int
    num_steps: int
    dtype: Literal["float32", "bfloat16", "float16"]
    num_threads: int | None = None


class SamplingCaseTimings(msgspec.Struct, frozen=True, kw_only=True):
    """Microseconds from a step's scores to its tokens, and by those of the first case."""

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
    """What a model's steps cannot do without, measured part by part.

    rows: numbers of rows that are multiplied. prompt_tokens: of the prompts whose attention is
    measured, as many as a step has. rounds: of each part, of which the best counts.
    """

    config: ServeConfig
    model: PreparedModel
    rows: list[int]
    prompt_tokens: int
    rounds: int


class LimitsTimings(msgspec.Struct, frozen=True, kw_only=True):
    """What each part takes by itself.

    weights: the form or forms that they are in.
    layer_products_ms, head_product_ms: of all layers, and of the scores, by the numbers in `rows`.
    attention_ns_per_pair: all layers of a prompt, by pairs of tokens that see each other.
    weight_bytes: that a step of one row reads.
    kv_bytes_per_token: of each group of layers, beside its window in tokens.
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
    """Agents that come back after a while, and scans between them: prompts that nobody repeats.

    Sizes are in blocks. num_agents: each has a beginning of agent_blocks, of which common_blocks
    are the same for all, and grows by turn_blocks with each of num_turns turns.
    scan_share: part of all requests that are scans, of scan_blocks each.
    device_blocks, medium_blocks: what the device and the medium behind it hold.
    policies: of the medium, as "none", "lru", "arc"; "+2" behind one stores what was looked for
    twice.
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

    device, medium: found there. computed: the rest. num_stored: blocks that were copied out,
    scans included.
    """

    policy: str
    num_blocks: int
    device: float
    medium: float
    computed: float
    num_stored: int


class OffloadHitsOfAll(msgspec.Struct, frozen=True, kw_only=True):
    """A row for each policy."""

    rows: list[OffloadHits]


class OffloadTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds from a request to its only token, medians, by where its prompt's KV is.

    ratio: of the medium by computed. num_tokens: of the prompt.
    """

    num_tokens: int
    rounds: int
    computed_ms: float
    medium_ms: float
    device_ms: float
    ratio: float
