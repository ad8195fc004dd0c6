"""A model whose hidden states are no numbers when a fault says so; wired for tests only."""

import torch

from proto.faults import FaultInjector
from worker.attention.base import AttentionBackend
from worker.models.decoder import Decoder


class FaultyModel(Decoder):
    """The same model, weights shared, but for the steps that are to be broken."""

    def __init__(self, model: Decoder, saboteur: FaultInjector) -> None:
        vars(self).update(vars(model))
        self._model = model
        self._saboteur = saboteur

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend
    ) -> torch.Tensor:
        hidden = self._model.forward(token_ids, positions, attention)
        return hidden * float("nan") if self._saboteur.breaks_numbers else hidden
