"""The experts that computed each token, for requests with `return_routed_experts`.

Routers write the experts of a step to the record, which the model keeps. They are then stored by KV
slot, so that a prefix found in the cache brings its experts along, as it brings keys and values:

    record   [mixture, row of the step, expert]      int32
    slots    [KV slot, mixture, expert]              as small as the number of experts allows
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from proto.errors import ConfigError
from proto.messages.engine_io import RoutedExperts
from proto.messages.model_runner_output import RowExperts
from worker.attention.kv_cache import KVCache, Zeros, lazy_zeros
from worker.models.decoder import Decoder
from worker.models.moe import MoeSpec
from worker.models.spec import ModelSpec

FIELD: Final = "enable_return_routed_experts"
_MOST_IN_A_BYTE: Final = 256


def require_routed_experts(spec: ModelSpec) -> None:
    """Raise ConfigError for a model whose routed experts cannot be recorded."""
    mixtures = _mixtures(spec)
    if not mixtures:
        raise ConfigError(f"--enable-return-routed-experts: {spec.architecture} has no experts")
    if len({mixture.router.top_k for mixture in mixtures}) > 1:
        raise ConfigError(
            "--enable-return-routed-experts: layers choose different numbers of experts"
        )
    if None not in spec.windows:
        raise ConfigError(
            "--enable-return-routed-experts needs a layer without a sliding window: a window's KV "
            "slots are freed before the request ends"
        )


def routing_bytes(spec: ModelSpec) -> int:
    """Return the bytes of the experts of a KV slot."""
    mixtures = _mixtures(spec)
    return len(mixtures) * mixtures[0].router.top_k * _slot_dtype(spec).itemsize


def record_experts(model: Decoder, max_tokens: int, device: torch.device) -> torch.Tensor:
    """Let the model record the experts of each step of at most `max_tokens` tokens.

    Returns the record, int32 [mixtures, max_tokens, top_k], best experts first.
    """
    mixtures = _mixtures(model.spec)
    shape = (len(mixtures), max_tokens, mixtures[0].router.top_k)
    record = torch.zeros(shape, dtype=torch.int32, device=device)
    model.record_experts(record)
    return record


def _mixtures(spec: ModelSpec) -> list[MoeSpec]:
    return [layer.mlp for layer in spec.layers if isinstance(layer.mlp, MoeSpec)]


def _slot_dtype(spec: ModelSpec) -> torch.dtype:
    num_experts = max(mixture.router.num_experts for mixture in _mixtures(spec))
    return torch.uint8 if num_experts <= _MOST_IN_A_BYTE else torch.int16


@dataclass(frozen=True, slots=True)
class ExpertSpan:
    """Consecutive positions of one sequence, from `first` on."""

    seq_id: int
    first: int
    count: int


def expert_rows(
    spans: Sequence[ExpertSpan], experts: NDArray[np.generic], num_rejected: Mapping[int, int]
) -> list[RowExperts]:
    """Return the experts [n, mixtures, top_k] of the n positions of all spans as messages.

    num_rejected: by seq_id, positions at the end of the span that hold rejected drafts.
    """
    ends = np.cumsum([span.count for span in spans])
    _, num_layers, top_k = experts.shape
    messages = []
    for span, part in zip(spans, np.split(experts, ends[:-1]), strict=True):
        data = part[: span.count - num_rejected.get(span.seq_id, 0)].tobytes()
        experts_of_span = RoutedExperts(span.first, num_layers, top_k, experts.itemsize, data)
        messages.append(RowExperts(span.seq_id, experts_of_span))
    return messages


class RoutedExpertsCache:
    """The experts of every token whose KV is in a cache, on the model's device."""

    def __init__(
        self, spec: ModelSpec, cache: KVCache, record: torch.Tensor, zeros: Zeros = lazy_zeros
    ) -> None:
        """record: as `record_experts` returns it. zeros: makes the memory of its device."""
        num_mixtures, _, top_k = record.shape
        self._record = record
        self._block_size = cache.block_size
        self.group = cache.layout.windows.index(None)
        """The KV cache group whose blocks live as long as the request."""
        shape = (cache.num_blocks * cache.block_size, num_mixtures, top_k)
        self._slots = zeros(shape, _slot_dtype(spec))

    def store(self, slots: torch.Tensor) -> None:
        """Store the experts of the last step. slots: int64 [T], of its tokens."""
        rows = self._record[:, : len(slots)].transpose(0, 1)
        self._slots.index_copy_(0, slots, rows.to(self._slots.dtype))

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the experts [n, mixtures, top_k] of slots int64 [n], a copy."""
        return self._slots.index_select(0, slots)

    def copy_blocks(self, sources: torch.Tensor, copies: torch.Tensor) -> None:
        """Copy block sources[i] to block copies[i], as `KVCache.copy_blocks` does."""
        blocks = self._slots.view(-1, self._block_size, *self._slots.shape[1:])
        blocks.index_copy_(0, copies, blocks.index_select(0, sources))
