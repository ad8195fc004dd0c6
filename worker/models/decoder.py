"""The decoder that every family runs on: a ModelSpec's arithmetic over loaded weights.

Owns what is before and behind the layers, and the choice of what computes these. Knows
neither requests nor pages: the tokens of all requests are one packed batch, and attention
is a backend that has been told about the step beforehand.
"""

from collections.abc import Sequence

import torch

from worker.attention.base import AttentionBackend
from worker.layers.embedding import Embedding
from worker.layers.linear import Linear
from worker.layers.norm import RMSNorm
from worker.layers.scratch import RowBuffer
from worker.models.layer_stack import LayerStack
from worker.models.spec import ModelSpec


class Decoder:
    """Token ids and positions to hidden states, hidden states to logits.

    stacks: the layers, in the order in which they are asked whether they take a step;
        the last one takes all.
    """

    def __init__(
        self,
        spec: ModelSpec,
        embedding: Embedding,
        stacks: Sequence[LayerStack],
        norm: RMSNorm,
        head: Linear,
    ) -> None:
        self.spec = spec
        self._embedding = embedding
        self._stacks = stacks
        self._norm = norm
        self._normed = RowBuffer(spec.hidden_size)
        self._head = head

    @torch.inference_mode()
    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend
    ) -> torch.Tensor:
        """int64 [T] token ids and positions to hidden states [T, hidden], not yet normed.

        Positions are below the model's length. `attention` writes every token's
        key and value and attends for the whole batch.
        """
        hidden = self._embedding(token_ids)
        num_rows = len(token_ids)
        stack = next(each for each in self._stacks if each.takes(num_rows, attention))
        return stack.run(hidden, positions, attention)

    @torch.inference_mode()
    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rows of `forward`'s result, contiguous [N, hidden], to logits [N, vocab].

        These are of the head's dtype.
        """
        return self._head(self._norm.into(hidden, self._normed.rows(hidden)))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The same in float32."""
        return self.scores(hidden).float()
