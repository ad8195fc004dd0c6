"""Messages from the engine to its workers for one step.

A sequence is sent in full once, as NewRequestData; later steps contain only changes. A worker
keeps prompt, sampling parameters and sampled tokens until the seq_id is listed as finished.

    step N     NewRequestData(seq_id 7, prompt, blocks [3 4], computed 0, scheduled 20)
    step N+1   CachedRequestData: seq_ids [7], computed [20], scheduled [1], new blocks [nil]
"""

import msgspec

from proto.messages.kv_connector import NO_PAYLOAD, Payload
from proto.messages.multimodal import EncoderSlice, MultiModalFeature
from proto.messages.pooling import PoolingParams
from proto.messages.sampling_params import SamplingParams

BlockIds = list[list[int]]
"""Block ids per KV cache group."""


class NewRequestData(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """A sequence that is new to the workers of this epoch.

    seq_id: names the sequence between engine and worker.
    output_token_ids: tokens generated before this epoch, after the prompt.
    seed, choice: key of the random numbers.
    block_ids: one list per KV group, covering [0, num_computed + num_scheduled).
    num_computed_tokens: positions [0, n) have valid KV.
    pooling_params: for a sequence that is pooled; no token is sampled for it.
    extra_key: 64 bits of the digest of its extra keys (`engine_core/block_hashing.py:ExtraKeys`), 0
        without any. Sequences of different keys share no KV.
    prompt_embeds: as in EngineCoreRequest.
    lora_int_id: the adapter of the sequence, which the workers hold; 0 for none. lora_scale: factor
        of its effect.
    mm_features: as in EngineCoreRequest.
    """

    seq_id: int
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    sampling_params: SamplingParams
    seed: int
    choice: int
    block_ids: BlockIds
    num_computed_tokens: int
    num_scheduled_tokens: int
    pooling_params: PoolingParams | None = None
    extra_key: int = 0
    prompt_embeds: bytes = b""
    lora_int_id: int = 0
    lora_scale: float = 1.0
    mm_features: list[MultiModalFeature] = []


class CachedRequestData(msgspec.Struct, array_like=True, frozen=True):
    """Changes of known sequences, as parallel arrays [num_sequences].

    new_block_ids: per sequence None, or block ids per group to append; for a
        resumed sequence its whole block table, which replaces the old one.
    resumed_seq_ids: those of `seq_ids` that were preempted before, or were given
        tokens and blocks of another sequence.
    resumed_output_token_ids: for each of them all its output tokens.
    forced_seq_ids, forced_token_ids: of `seq_ids`, those whose last token was
        chosen by the engine, and this token.
    """

    seq_ids: list[int] = []
    num_computed_tokens: list[int] = []
    num_scheduled_tokens: list[int] = []
    new_block_ids: list[BlockIds | None] = []
    resumed_seq_ids: list[int] = []
    resumed_output_token_ids: list[list[int]] = []
    forced_seq_ids: list[int] = []
    forced_token_ids: list[int] = []


class SchedulerOutput(msgspec.Struct, array_like=True, tag=1, frozen=True, kw_only=True):
    """One step of work.

    epoch: the worker epoch. step: number of the step, from 1 for each engine process.
    new_requests, cached_requests: what to compute, running sequences first.
    total_num_scheduled_tokens: sum over both; with 0 the step only frees, copies or encodes images.
    finished_seq_ids: sequences to drop; their blocks may be reused in this step.
    preempted_seq_ids: sequences without KV; keep tokens and parameters, free the row.
    block_copies: source, target, source, target …; block ids of any group, copied before the
        forward pass. No target is the source of another copy.
    state_copies: the same for slots of recurrent states.
    constrained_seq_ids: sequences that sample under a grammar in this step. Their masks follow in
        a GrammarOutput of this step, because they depend on the tokens of the step before, which
        may still be computed when this message is sent.
    connector_metadata: data for the worker side of the KV connector.
    spec_decode_seq_ids, scheduled_spec_decode_tokens: parallel; continued sequences with a draft,
        and its tokens, which follow their known tokens in this step. They are counted in the
        scheduled tokens. Every position from the last known token on is sampled, and the tokens
        of a row end with the first one that differs from its draft.
    lookahead_seq_ids, num_lookahead_tokens: parallel; continued sequences for which the workers'
        draft model proposes at most this many tokens, to follow those that this step samples. Their
        block tables have room for them, after all tokens of the step.
    min_draft_acceptance_prob: acceptance probability below which such a proposal ends.
    scheduled_encoder_inputs: what is encoded of images before the step's tokens, in this order.
    free_encoder_mm_hashes: images whose encoder output workers forget before that, finished or not.
    """

    epoch: int
    step: int
    new_requests: list[NewRequestData]
    cached_requests: CachedRequestData
    total_num_scheduled_tokens: int
    finished_seq_ids: list[int]
    preempted_seq_ids: list[int]
    block_copies: list[int] = []
    constrained_seq_ids: list[int] = []
    connector_metadata: Payload = NO_PAYLOAD
    spec_decode_seq_ids: list[int] = []
    scheduled_spec_decode_tokens: list[list[int]] = []
    lookahead_seq_ids: list[int] = []
    num_lookahead_tokens: list[int] = []
    min_draft_acceptance_prob: float = 0.0
    state_copies: list[int] = []
    scheduled_encoder_inputs: list[EncoderSlice] = []
    free_encoder_mm_hashes: list[bytes] = []

    @property
    def has_result(self) -> bool:
        """Whether the workers compute something, whose result the engine waits for."""
        return bool(self.total_num_scheduled_tokens or self.scheduled_encoder_inputs)

    @property
    def drafts(self) -> dict[int, list[int]]:
        """The draft of each sequence that has one, by seq_id."""
        return dict(zip(self.spec_decode_seq_ids, self.scheduled_spec_decode_tokens, strict=True))


class GrammarOutput(msgspec.Struct, array_like=True, tag=2, frozen=True):
    """Allowed tokens of the constrained sequences of a step.

    seq_ids: of `constrained_seq_ids`; a missing one has ended, or its mask is late: it is not
        masked, and the engine drops what it samples. A sequence with a draft has a mask for each of
        its sampled positions, in order.
    masks: little-endian uint32 [len(seq_ids), ceil(vocab_size / 32)]; token i is allowed if bit
        i % 32 of word i // 32 is 1.
    """

    epoch: int
    step: int
    seq_ids: list[int]
    masks: bytes
