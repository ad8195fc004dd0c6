"""The answer of a worker to one step."""

import msgspec

from proto.errors import ErrorInfo
from proto.messages.engine_io import LogprobsArrays, RoutedExperts


class RowLogprobs(msgspec.Struct, array_like=True, frozen=True):
    """Log-probabilities of consecutive positions of one sequence."""

    seq_id: int
    arrays: LogprobsArrays


class RowExperts(msgspec.Struct, array_like=True, frozen=True):
    """Routed experts of consecutive positions of one sequence."""

    seq_id: int
    experts: RoutedExperts


class RowPooled(msgspec.Struct, array_like=True, frozen=True):
    """The result of one pooled sequence. data: float32 little-endian."""

    seq_id: int
    data: bytes


class ModelRunnerOutput(msgspec.Struct, array_like=True, tag=1, frozen=True):
    """Sampled tokens and log-probabilities of one step.

    seq_ids: every sequence of the step, in the order new requests, cached requests.
    sampled_token_ids: the tokens of each sequence; empty for a sequence whose prompt is not
        complete yet. One token, or the accepted tokens of a draft and the one after them.
    logprobs: of the sampled tokens, for sequences that request them.
    prompt_logprobs: of positions computed in this step, for sequences that request them;
        position p (from 1) is the log-probability of prompt token p.
    compute_seconds: time from the message to the sampled tokens; for steps queued on a device,
        from the end of the previous step.
    error: why the step failed; the worker exits.
    failed_seq_ids: sequences with NaN or infinity in hidden states or logits. They have no
        sampled tokens.
    candidates: for beams whose last token is computed, the best next tokens in order, without
        ranks; no token is sampled for them.
    routed_experts: of positions computed in this step, for sequences that request them; in the
        first step of a sequence also of those found in the prefix cache.
    pooler_outputs: of pooled sequences whose prompt is complete; they have no sampled tokens.
    draft_seq_ids, draft_token_ids, draft_acceptance_probs: parallel; sequences for whose
        next step the worker proposes a draft, the draft, which follows all sampled tokens, and for
        each of its tokens the probability that it and all before it are accepted, as the draft
        model has it.
        The draft is empty if no token is likely enough; a sequence with lookahead is missing while
        the draft model still computes its prompt, or if it has reached the length of that model.
    draft_pass_rows, draft_pass_seconds: parallel; tokens and time of each pass of the draft model,
        which is not part of compute_seconds.
    encoder_seconds: time of the step's encoder slices, not part of compute_seconds.
    failed_mm_hashes: images that could not be encoded; their slices count as done, without output.
    """

    epoch: int
    step: int
    seq_ids: list[int]
    sampled_token_ids: list[list[int]]
    logprobs: list[RowLogprobs] = []
    prompt_logprobs: list[RowLogprobs] = []
    compute_seconds: float = 0.0
    error: ErrorInfo | None = None
    failed_seq_ids: list[int] = []
    candidates: list[RowLogprobs] = []
    routed_experts: list[RowExperts] = []
    pooler_outputs: list[RowPooled] = []
    draft_seq_ids: list[int] = []
    draft_token_ids: list[list[int]] = []
    draft_acceptance_probs: list[list[float]] = []
    draft_pass_rows: list[int] = []
    draft_pass_seconds: list[float] = []
    encoder_seconds: float = 0.0
    failed_mm_hashes: list[bytes] = []
