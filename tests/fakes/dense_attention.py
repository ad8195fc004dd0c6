"""An attention backend for one sequence: plain dense torch, no pages."""

import numpy as np
import torch

from worker.attention.backend import AttentionInputs, Rotation
from worker.attention.state_cache import AttentionWithStates, StateCache
from worker.models.decoder import Decoder
from worker.models.rotary import rotate
from worker.models.spec import ModelSpec

_ONE_BLOCK = 1 << 20


def logits_in_chunks(decoder: Decoder, tokens: torch.Tensor, *sizes: int) -> torch.Tensor:
    """Return the logits of all tokens of a sequence, computed this many at a time."""
    attention = DenseAttention(decoder.spec)
    hidden = []
    for chunk, positions in zip(
        tokens.split(sizes), torch.arange(len(tokens)).split(sizes), strict=True
    ):
        attention.begin_chunk(len(chunk))
        hidden.append(decoder.forward(chunk, positions, attention))
    return decoder.float32_logits(torch.cat(hidden))


class DenseAttention(AttentionWithStates):
    """Causal attention over all keys and values passed to `run` since construction.

    With the states of recurrent layers, for which each chunk has to be announced.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self.attention = self
        self._num_tokens = 0
        if (shape := spec.state_shape()) is not None:
            self.states = StateCache(shape, 2, _ONE_BLOCK)
        self._scale = spec.attention_shape.scale
        self._soft_cap = spec.attention_shape.soft_cap
        self._windows = spec.windows
        self._latent_dim = spec.attention_shape.latent_dim
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}

    def begin_chunk(self, num_tokens: int) -> None:
        """Announce the next tokens; needed only for a model with states."""
        start, self._num_tokens = self._num_tokens, self._num_tokens + num_tokens
        if hasattr(self, "states"):
            ends = np.array([self._num_tokens], dtype=np.int32)
            tokens = np.array([0, num_tokens], dtype=np.int32)
            slot = np.ones((1, 1), dtype=np.int32)
            self.states.plan_step(
                AttentionInputs(tokens, ends, slot, np.arange(start, self._num_tokens))
            )

    def run(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None,
        rotation: Rotation,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """query [T, Hq, D], key and value [T, Hkv, D], appended; a new [T, Hq, D or latent]."""
        query, key = (rotate(each, rotation, self._latent_dim) for each in (query, key))
        if value is None:
            value = key[..., : self._latent_dim]
        if layer in self._keys:
            key = torch.cat((self._keys[layer], key))
            value = torch.cat((self._values[layer], value))
        self._keys[layer], self._values[layer] = key, value
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", query.float(), key.float()) * self._scale
        if self._soft_cap:
            scores = self._soft_cap * torch.tanh(scores / self._soft_cap)
        new, total = query.shape[0], key.shape[0]
        visible = torch.ones(new, total).tril(total - new).bool()
        window = self._windows[layer]
        if window is not None:
            visible = visible.triu(total - new - window + 1)
        scores = scores.masked_fill(~visible, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks[:, None, None].expand(-1, new, 1)), dim=-1)
        weights = scores.softmax(-1)[..., :total]
        result = torch.einsum("hqk,khd->qhd", weights, value.float())
        return result.to(query.dtype).contiguous()
