"""The interface of models that propose drafts, and what the runner passes to them after a step.

    step N     forward ─▶ keep_states ─▶ sample ─▶ after_step ─▶ ModelRunnerOutput with drafts
    step N+1   the engine schedules what it takes of them; the model verifies it (step_inputs.py)

A draft follows the tokens of its step, so it is proposed when they are known on the host. On a GPU
that is when the step's answer is collected, and the next step may be queued already:

    host     launch N │ launch N+1 │ tokens of N ─▶ after_step(N): launch, wait, … ─▶ answer of N
    device   [ step N ][ step N+1 ]                 [ pass ] [ pass ]

All ranks of a model make the same drafts, because they compute the same numbers.
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
    states: what `keep_states` returned for it.
    num_tokens: int64 [S], known tokens of each sequence behind this step, without what later steps
        added; 0 if the sequence is not in its row any more.
    num_lookahead: int64 [S], most tokens to propose for each sequence; 0 for no draft. The block
        table of a sequence has room for that many behind the tokens of the step.
    min_survival: survival below which a draft ends.
    """

    inputs: StepInputs
    seq_ids: Sequence[int]
    states: torch.Tensor | None
    num_tokens: NDArray[np.int64]
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

    def copy_blocks(self, sources: NDArray[np.int64], copies: NDArray[np.int64]) -> None:
        """Copy what is kept for block sources[i] to block copies[i]; called before a step runs.

        sources, copies: int64 [n]; no block is in both.
        """
        ...

    def keep_states(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Return what the drafter reads of a step's states, in new memory; called right behind it.

        hidden: [T, H], before the last norm. None for a drafter that reads none.
        """
        ...

    def after_step(self, step: SampledStep) -> Drafts:
        """Return drafts for sequences with lookahead; called after every step that ran the model.

        A sequence is missing if its KV is not complete yet.
        """
        ...
