"""What the engine tells its workers for one step.

A sequence is described once, in NewRequestData; afterwards only what changed is
sent. A worker keeps prompt, sampling parameters and the tokens it sampled until
the handle is listed as finished.

    step N     NewRequestData(handle 7, prompt, blocks [3 4], computed 0, scheduled 20)
    step N+1   CachedRequestData: handles [7], computed [20], scheduled [1], new blocks [nil]
"""

import msgspec

from proto.kv_transfer import NO_PAYLOAD, Payload
from proto.sampling_params import SamplingParams

BlockIds = list[list[int]]
"""Block ids per KV cache group."""


class NewRequestData(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """A sequence that the worker has not seen in this epoch.

    handle: names the sequence between engine and worker.
    output_token_ids: tokens generated before this epoch, after the prompt.
    seed, choice: key of the draws.
    block_ids: one list per KV group, covering [0, num_computed + num_scheduled).
    num_computed_tokens: positions [0, n) whose KV is valid already.
    """

    handle: int
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    sampling_params: SamplingParams
    seed: int
    choice: int
    block_ids: BlockIds
    num_computed_tokens: int
    num_scheduled_tokens: int


class CachedRequestData(msgspec.Struct, array_like=True, frozen=True):
    """Sequences that the worker knows, as parallel arrays [num_sequences].

    new_block_ids: per sequence None, or block ids per group to append; for a
        resumed sequence its whole block table, which replaces the old one.
    resumed_handles: those of `handles` that were preempted before, or were given
        tokens and blocks of another sequence.
    resumed_output_token_ids: for each of them all its output tokens.
    dictated_handles, dictated_token_ids: of `handles`, those whose last token was
        chosen by the engine, and this token.
    """

    handles: list[int] = []
    num_computed_tokens: list[int] = []
    num_scheduled_tokens: list[int] = []
    new_block_ids: list[BlockIds | None] = []
    resumed_handles: list[int] = []
    resumed_output_token_ids: list[list[int]] = []
    dictated_handles: list[int] = []
    dictated_token_ids: list[int] = []


class SchedulerOutput(msgspec.Struct, array_like=True, tag=1, frozen=True, kw_only=True):
    """One step of work.

    epoch: the worker epoch. step: counts from 1 within the life of the engine.
    new_requests, cached_requests: what to compute, running sequences first.
    total_num_scheduled_tokens: sum over both; 0 only carries what
        workers are to forget or to copy.
    finished_handles: forget these; their block ids may be in use again in this step.
    preempted_handles: their KV is gone; keep tokens and parameters, free the row.
    block_copies: source, copy, source, copy …; whole blocks, of any group, to be copied
        before anything is computed. No copy is the source of another.
    constrained_handles: those that sample in this step, and not just any token: before that
        comes a GrammarOutput of this step. Which tokens may be theirs follows from the step
        before, which may be under way when this one is sent.
    connector_metadata: what the KV connector has its other half do with this step.
    """

    epoch: int
    step: int
    new_requests: list[NewRequestData]
    cached_requests: CachedRequestData
    total_num_scheduled_tokens: int
    finished_handles: list[int]
    preempted_handles: list[int]
    block_copies: list[int] = []
    constrained_handles: list[int] = []
    connector_metadata: Payload = NO_PAYLOAD


class GrammarOutput(msgspec.Struct, array_like=True, tag=2, frozen=True):
    """Which tokens the constrained sequences of a step may have.

    handles: of `constrained_handles`; one that is left out is over, and may have any.
    masks: little-endian uint32 [len(handles), ceil(vocab_size / 32)]; bit i % 32 of word i // 32
        says whether token i is allowed.
    """

    epoch: int
    step: int
    handles: list[int]
    masks: bytes
