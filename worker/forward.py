"""From the inputs of a step to its hidden states, one launch of a kernel after the other.

The same as a replayed graph is in cuda_graphs.py.
"""

from typing import Protocol

import torch

from worker.attention.base import AttentionBackend
from worker.input_batch import StepInputs
from worker.models.decoder import Decoder


class Forward(Protocol):
    """Plans attention for a step and runs the model's layers."""

    def __call__(
        self, inputs: StepInputs, token_ids: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """int64 [T] token ids and positions, where the model is, to hidden states [T, hidden]."""
        ...


class EagerForward:
    """Forward of any step."""

    def __init__(self, model: Decoder, attention: AttentionBackend) -> None:
        self._model = model
        self._attention = attention

    def __call__(
        self, inputs: StepInputs, token_ids: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """As the Protocol says."""
        self._attention.plan(inputs.attention)
        return self._model.forward(token_ids, positions, self._attention)
