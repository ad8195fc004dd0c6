"""Messages from the engine to its workers for one step.

A sequence is sent in full once, as NewRequestData; later steps contain only changes. A worker
keeps prompt, sampling parameters and sampled tokens until the handle is listed as finished.

    step N     NewRequestData(handle 7, prompt, blocks [3 4], computed 0, scheduled 20)
    step N+1   CachedRequestData: handles [7], computed [20], scheduled [1], new blocks [nil]
"""

import msgspec

from proto.kv_transfer import NO_PAYLOAD, Payload
from proto.sampling_params import SamplingParams

BlockIds = list[list[int]]
"""Block ids per KV cache group."""


class NewRequestData(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """A sequence that is new to the workers of this epoch.

    handle: names the sequence between engine and worker.
    output_token_ids: tokens generated before this epoch, after the prompt.
    seed, choice: key of the random numbers.
    block_ids: one list per KV group, covering [0, num_computed + num_scheduled).
    num_computed_tokens: positions [0, n) have valid KV.
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
    """Changes of known sequences, as parallel arrays [num_sequences].

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
    total_num_scheduled_tokens: sum over both; with 0 the step only frees or copies.
    finished_handles: sequences to drop; their blocks may be reused in this step.
    preempted_handles: sequences without KV; keep tokens and parameters, free the row.
    block_copies: source, target, source, target …; block ids of any group, copied before the
        forward pass. No target is the source of another copy.
    constrained_handles: sequences that sample under a grammar in this step. Their masks follow in
        a GrammarOutput of this step, because they depend on the tokens of the step before, which
        may still be computed when this message is sent.
    connector_metadata: data for the worker side of the KV connector.
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
    """Allowed tokens of the constrained sequences of a step.

    handles: subset of `constrained_handles`; a missing one has ended and is not masked.
    masks: little-endian uint32 [len(handles), ceil(vocab_size / 32)]; token i is allowed if bit
        i % 32 of word i // 32 is 1.
    """

    epoch: int
    step: int
    handles: list[int]
    masks: bytes
