"""The interface of models that propose drafts, and what the runner tells them of each step.

    step N     forward ─▶ sample ─▶ Drafter.after_step ─▶ ModelRunnerOutput with drafts
    step N+1   the engine schedules what it takes of them; the model verifies it (step_inputs.py)

A draft follows all tokens of its sequence, so it is proposed when those of the step are known, in
the same call. All ranks of a model make the same drafts, because they compute the same numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from worker.step_inputs import StepInputs


@dataclass(frozen=True, slots=True)
class SampledStep:
    """A step of the served model whose tokens are in the batch; S sequences.

    inputs: its arrays. seq_ids: [S], in their order.
    hidden: [T, H], hidden states of its tokens before the last norm; valid during the call.
    sampled: [S], the tokens of each sequence that count; none while its prompt is incomplete, and
        if its logits are not finite.
    num_lookahead: int64 [S], most tokens to propose for each sequence; 0 for no draft. The block
        table of a sequence has room for that many behind the tokens of the step.
    min_survival: survival below which a draft ends.
    """

    inputs: StepInputs
    seq_ids: Sequence[int]
    hidden: torch.Tensor
    sampled: Sequence[Sequence[int]]
    num_lookahead: NDArray[np.int64]
    min_survival: float


@dataclass(slots=True)
class Drafts:
    """Proposals for the next step, and the passes that made them.

    seq_ids, token_ids, survivals: parallel; sequences for which there was a choice, and their
        drafts, which may be empty. The survival of a token is the probability that it and all
        before it are accepted, as the drafter has it.
    pass_rows, pass_seconds: parallel, tokens and time of each pass of the drafter's model.
    """

    seq_ids: list[int] = field(default_factory=list)
    token_ids: list[list[int]] = field(default_factory=list)
    survivals: list[list[float]] = field(default_factory=list)
    pass_rows: list[int] = field(default_factory=list)
    pass_seconds: list[float] = field(default_factory=list)


class Drafter(Protocol):
    """Proposes tokens after each step of one engine."""

    def warm_up(self) -> None:
        """Run each kernel once, because first calls are slow; called before all other methods."""
        ...

    def copy_blocks(self, sources: torch.Tensor, copies: torch.Tensor) -> None:
        """Copy what is kept for block sources[i] to block copies[i]; called before a step runs.

        sources, copies: int64 [n] on the model's device; no block is in both.
        """
        ...

    def after_step(self, step: SampledStep) -> Drafts:
        """Return drafts for sequences with lookahead; called after every step that ran the model.

        A sequence is missing if its KV is not complete yet.
        """
        ...
