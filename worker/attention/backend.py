"""The interface of attention backends: what a step's inputs are and what a backend must do.

A step has T query tokens of S sequences, packed one sequence after another:

    query_start   0        3  4           9
    tokens        [ a a a ][ b ][ c c c c c ]
    seq_lens      [ 3,       17,  25 ]          KV tokens once this step is written

Sequence c computes five tokens of a longer prompt: its queries have positions 20..24, and each
sees the keys 0..its own position. In a layer with a window of 4, the query at 22 sees the keys
19..22, and pages before its window may belong to other sequences.

Tokens of an image may see each other in both directions. Then `attend_end` says for each query
where its keys end; they begin where they do for other queries, a window before its own position:

    sequence c, position   20  21  22  23  24      an image at 21..23
    attend_end             21  24  24  24  25
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

Rotation = torch.Tensor
"""Cosines and sines of each token, float32 [T, 2, head_dim / 2], contiguous."""


def start_offsets(counts: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.int32]:
    """Return where each of packed ranges of these lengths begins, and the end: int32 [S + 1]."""
    offsets = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=offsets[1:])
    return offsets


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """The sequences and tokens of one step in one KV cache group; numpy, C-contiguous.

    query_start: int32 [S + 1], offsets into the packed tokens, from 0 to T.
    seq_lens: int32 [S], KV tokens of each sequence including this step's.
    block_table: int32 [S, max_blocks], page p of a sequence is block_table[s, p];
        entries beyond its last page, and pages before its window, are never read.
    slot_mapping: int64 [T], block * block_size + offset at which each token's K
        and V are written.
    num_drafts: int32 [S], tokens at the end of each sequence's that may be rejected; None: not
        known, of a backend that need not know them.
    attend_end: int32 [T], position after the last token that each query sees; at least that after
        its own, at most seq_lens, and never falling within a sequence. None: after its own.
    """

    query_start: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    block_table: npt.NDArray[np.int32]
    slot_mapping: npt.NDArray[np.int64]
    num_drafts: npt.NDArray[np.int32] | None = None
    attend_end: npt.NDArray[np.int32] | None = None

    @property
    def num_tokens(self) -> int:
        return int(self.slot_mapping.shape[0])

    @property
    def num_seqs(self) -> int:
        return int(self.seq_lens.shape[0])

    @property
    def is_decode(self) -> bool:
        """Whether each token is a query of its own, and none is part of a chunk."""
        return self.num_tokens == self.num_seqs


class QuerySplit(Enum):
    """Which sequences are given to attention as sequences of one query each.

    So that their sums have the same order as in a decode.

    NONE: a query has the same bits within a chunk as alone. DRAFTS: those with drafts, since their
    tokens are decodes otherwise. ALL: prompts too, so that not even the length of a chunk matters.
    """

    NONE = auto()
    DRAFTS = auto()
    ALL = auto()


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads of one layer on this device.

    num_heads is a multiple of num_kv_heads; query head h reads KV head
    h // (num_heads // num_kv_heads). `scale` multiplies query times key, which then becomes
    soft_cap * tanh(score / soft_cap) (Gemma 2, section 2); a soft_cap of 0 leaves it unchanged.

    bidirectional: a query sees the tokens after its own, too, as far as its window reaches to both
    sides; all tokens of a sequence are then in the same step.

    latent_dim: not 0 in latent attention (DeepSeek-V2, section 2.1), which has one KV head and
    caches no values. The first latent_dim numbers of a key are its value too; the others rotate:

        key, query  | latent | rotated part |      output  | latent |
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    soft_cap: float = 0.0
    latent_dim: int = 0
    bidirectional: bool = False

    @property
    def rotary_dim(self) -> int:
        """The last numbers of a head, to which the rotary embedding applies."""
        return self.head_dim - self.latent_dim

    @property
    def value_dim(self) -> int:
        """Numbers of a value, and of each head of the output."""
        return self.latent_dim or self.head_dim

    @property
    def flops_per_key(self) -> int:
        """FLOPs of one token for each that it sees: query by key, weight by value."""
        return 2 * self.num_heads * (self.head_dim + self.value_dim)

    @property
    def group_size(self) -> int:
        """Query heads of one KV head."""
        return self.num_heads // self.num_kv_heads


class AttentionBackend(Protocol):
    """Attention over the pages of one KV cache."""

    @property
    def query_split(self) -> QuerySplit:
        """Which sequences of a step it is to be given as sequences of one query each."""

    def plan(self, inputs: Sequence[AttentionInputs]) -> None:
        """Prepare a step, given one entry per KV cache group; called once before its layers run."""

    def run(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None,
        rotation: Rotation,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Rotate queries and keys, write K and V of every token of the step, then attend.

        query [T, num_heads, head_dim]; key, value [T, num_kv_heads, head_dim], not yet rotated, of
        one dtype, which need not be the cache's; heads and dims contiguous, rows at any stride
        (slices of one fused tensor). Returns a new contiguous [T, num_heads, value_dim] of that
        dtype. value: None in latent attention.

        sinks: float32 [num_heads], a logit of each head that takes part in the softmax of every
        query but has no value, so that weights sum to less than 1 (OpenAI, gpt-oss model card).
        """
