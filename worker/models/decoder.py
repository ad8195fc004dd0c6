"""The decoder of every family: embedding, layers, last norm and head; an encoder, too.

It knows neither requests nor KV pages: the tokens of all requests are one packed batch, and the
attention backend has planned the step beforehand.
"""

from collections.abc import Sequence

import torch

from worker.attention.backend import AttentionBackend
from worker.layers.adapters import StepAdapters
from worker.layers.embedding import Embedding, EncoderInput
from worker.layers.layer_progress import LayerProgress
from worker.layers.linear import Linear
from worker.layers.norm import Norm
from worker.models.layer_stack import LayerStack, RowAddition
from worker.models.spec import ModelSpec


class Decoder:
    """Computes hidden states from tokens, and logits from hidden states.

    stacks: implementations of all layers; the first that takes a step runs it, and the last takes
    any. norm: None if the last layer ends with one. head: None for a model that pools hidden
    states. adapters: those of the rows that `forward` and `logits` compute; None for a model that
    is served without adapters.
    """

    can_be_captured = True
    """Whether a CUDA graph can replay a step."""
    implementation = ""
    """Whose code computes the model, with its version; "" for tokend's own."""

    def __init__(
        self,
        spec: ModelSpec,
        embedding: Embedding | EncoderInput,
        stacks: Sequence[LayerStack],
        norm: Norm | None,
        head: Linear | None,
        adapters: StepAdapters | None = None,
    ) -> None:
        self.spec = spec
        self.adapters = adapters
        self._embedding = embedding
        self._stacks = stacks
        self._norm = norm
        self._head = head

    def record_experts(self, record: torch.Tensor) -> None:
        """Write the experts of each step's rows to `record`, int32 [mixtures, rows, top_k]."""
        for stack in self._stacks:
            stack.record_experts(record)

    def record_residuals(self, layers: Sequence[int], record: torch.Tensor) -> None:
        """Write the residual before some layers to `record`, [layers, rows, hidden], in each step.

        The number of all layers stands for what follows the last one. The record has the dtype of
        the embedding, and at least as many rows as a step.
        """
        for stack in self._stacks:
            stack.record_residuals(layers, record)

    def track_layers(self, progress: LayerProgress | None) -> None:
        """Wait before each layer of a step and note it afterwards; None: no longer."""
        for stack in self._stacks:
            stack.track_layers(progress)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBackend,
        token_types: torch.Tensor | None = None,
        embeddings: Sequence[tuple[int, torch.Tensor]] = (),
    ) -> torch.Tensor:
        """Return hidden states [T, hidden], not yet normed, for int64 [T] token ids.

        positions: rotary ones, int64 [T] or in M-RoPE [3, T], below the model's length. `attention`
        writes every token's key and value and attends for the whole batch. token_types: int64 [T],
        of an encoder's tokens; None: all 0. embeddings: (first token, rows [n, hidden]) in place of
        the scaled embedding of n tokens; wider rows have what the first layers add after it
        (RowAddition).
        """
        if isinstance(self._embedding, EncoderInput):
            hidden = self._embedding(token_ids, positions, token_types)
        else:
            hidden = self._embedding(token_ids)
            if self.adapters is not None and self.adapters.groups:
                self.adapters.embed(token_ids, hidden, self._embedding)
        size = hidden.shape[1]
        additions = []
        for first, rows in embeddings:
            hidden[first : first + len(rows)] = rows[:, :size]
            if rows.shape[1] > size:
                values = rows[:, size:].to(hidden.dtype).contiguous()
                additions.append(RowAddition(first, values))
        num_rows = len(token_ids)
        stack = next(stack for stack in self._stacks if stack.takes(num_rows, attention))
        return stack.run(hidden, positions, attention, additions)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [N, vocab] for rows of `forward`'s result, contiguous [N, hidden].

        Their dtype is that of the head.
        """
        return self.logits_of_normed(self.normed(hidden))

    @torch.inference_mode()
    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the last norm of rows of `forward`'s result, a new [N, hidden]."""
        assert self._norm is not None
        return self._norm(hidden)

    @torch.inference_mode()
    def logits_of_normed(self, normed: torch.Tensor) -> torch.Tensor:
        """Return the logits [N, vocab] of rows that the head reads, contiguous [N, hidden]."""
        assert self._head is not None, "the model has no head"
        logits = self._head(normed)
        if self.adapters is not None and self.adapters.groups:
            self.adapters.change_logits(normed, logits)
        scale, soft_cap = self.spec.logit_scale, self.spec.logit_soft_cap
        if soft_cap:
            return logits.mul_(scale / soft_cap).tanh_().mul_(soft_cap)
        return logits if scale == 1.0 else logits.mul_(scale)

    @torch.inference_mode()
    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the rows [N, hidden] of the embedding for int64 [N], without the model's scale."""
        assert isinstance(self._embedding, Embedding)
        return self._embedding.rows(token_ids)

    @torch.inference_mode()
    def final_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the last norm of rows of `forward`'s result, [N, hidden] in float32."""
        hidden = hidden.float()
        return hidden if self._norm is None else self._norm(hidden)

    def float32_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the same logits in float32."""
        return self.logits(hidden).float()
