"""Edits of logits and the keyed draw on a device, by Triton kernels.

    listed   values added to single logits: biases, and −inf for forbidden tokens
    rows     penalties from counts on the device, then −inf for tokens that a mask rules out
    draw     argmax of logit / T plus Gumbel noise, for all rows of a step, over the tokens that
             their filters keep (device_filters.py)

Edited logits equal those of the CPU kernels bit for bit, and so do tokens, but for near ties.
"""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from worker.cuda.sampling.device_filters import RowFilters, TritonFilters, mask_dropped
from worker.reference.sampling import ROUNDS, STREAM_SAMPLE
from worker.sampling.logit_edits import WORD_BITS

SEEN: Final = 1 << 30
"""Bit of an entry of the counts: the token is in the prompt or in the outputs that the host sent.
The bits below count outputs."""
ANY_TOKEN: Final = -1
"""In ListedEdits.needed: the edit does not depend on the row's last token."""
NONE: Final = -1
"""In RowEditArrays.slots and masks: the row has no counts, or no mask."""
_LISTED_BLOCK: Final = 128
_ROW_CHUNK: Final = 1024


@dataclass(frozen=True, slots=True)
class ListedEdits:
    """E values added to single logits, on one device or on the host.

    index: int64 [E], row · V + token. value: float32 [E]; −inf forbids a token.
    source: int64 [E], a row of the batch. needed: int64 [E], the last token that this row must have
    for the edit to apply, or ANY_TOKEN.
    """

    index: torch.Tensor
    value: torch.Tensor
    source: torch.Tensor
    needed: torch.Tensor


@dataclass(frozen=True, slots=True)
class RowEditArrays:
    """Penalties and masks of R rows.

    rows: int64 [R], of the logits. slots: int64 [R], of the counts, or NONE. masks: int64
    [R], rows of `words`, or NONE. rules: float32 [R, 3], repetition, frequency and presence
    penalty. words: int32 [M, W], bit i of word j allows token 32 j + i.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    masks: torch.Tensor
    rules: torch.Tensor
    words: torch.Tensor


def largest_edits(num_rows: int, vocab_size: int) -> list[npt.NDArray[Any]]:
    """Return the fields of `RowEditArrays`, flat, for the step that takes the most memory.

    Every row has a slot, a penalty of each kind, and a mask that allows all tokens.
    """
    rows = np.arange(num_rows, dtype=np.int64)
    rules = np.tile(np.array([1.1, 0.1, 0.1], dtype=np.float32), num_rows)
    words = np.full(num_rows * -(-vocab_size // WORD_BITS), -1, dtype=np.int32)
    return [rows, rows, rows, rules, words]


class TritonEdits:
    """Kernels that edit logits float32 [N, V], contiguous, in place; they are only queued."""

    def __init__(self) -> None:
        from worker.cuda.kernels.sampling import add_listed, edit_chunk

        self._listed_kernel = add_listed
        self._rows_kernel = edit_chunk

    def add_listed(self, logits: torch.Tensor, listed: ListedEdits, last: torch.Tensor) -> None:
        """Add values to single logits. last: int64, the last token of every row of the batch."""
        count = len(listed.index)
        self._listed_kernel[(-(-count // _LISTED_BLOCK),)](
            logits,
            listed.index,
            listed.value,
            listed.source,
            listed.needed,
            last,
            count,
            any_token=ANY_TOKEN,
            block_size=_LISTED_BLOCK,
        )

    def edit_rows(self, logits: torch.Tensor, edits: RowEditArrays, counts: torch.Tensor) -> None:
        """Apply penalties, then write −inf over tokens that masks rule out.

        counts: int32 [S, V], number of outputs plus SEEN; 0 for a token that never occurred. Each
        product and each difference is rounded separately, as on the host.
        """
        vocab_size = logits.shape[1]
        self._rows_kernel[(len(edits.rows), -(-vocab_size // _ROW_CHUNK))](
            logits,
            counts,
            edits.words,
            edits.rows,
            edits.slots,
            edits.masks,
            edits.rules,
            vocab_size,
            edits.words.shape[1],
            seen=SEEN,
            chunk_size=_ROW_CHUNK,
            enable_fp_fusion=False,
        )


_DRAW_COUNTERS: Final = 512
"""Philox counters of a chunk; a counter gives the random words of four tokens."""


class TritonDraw:
    """The draw of the CPU's kernels, keyed by (seed, choice, position), for all rows of a step.

        row       [ chunk 0 | chunk 1 | … ]      the kernel finds best sum and token of a chunk
        result    torch takes the best of these, the first among equals

    Sums are float64, as on a CPU, so that rounding makes no ties. A temperature of 0 gives the best
    token of the row. A chunk of which the filters keep nothing costs no noise.
    """

    def __init__(self) -> None:
        from worker.cuda.kernels.sampling import draw_chunk

        self._kernel = draw_chunk
        self.filters = TritonFilters()

    def __call__(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        seed: torch.Tensor,
        choice: torch.Tensor,
        position: torch.Tensor,
        filters: RowFilters | None,
        masks_dropped: bool,
    ) -> torch.Tensor:
        """Queue the draw; return token ids int64 [N] for logits float32 [N, V], contiguous.

        temperature: float32 [N], 0 or more. seed, choice, position: int64 [N], the bits of
        unsigned numbers. filters: of some rows, or None. masks_dropped: set logits that a filter
        drops to −inf. −inf is never drawn; equal sums give the lowest id.
        """
        num_rows, vocab_size = logits.shape
        num_chunks = -(-vocab_size // (4 * _DRAW_COUNTERS))
        sums = logits.new_empty((num_rows, num_chunks), dtype=torch.float64)
        tokens = logits.new_empty((num_rows, num_chunks), dtype=torch.int64)
        filter_of_row = cuts = None
        if filters is not None:
            filter_of_row = filters.filter_of_row
            cuts = self.filters.cuts(logits, temperature, filters)
            if masks_dropped:
                mask_dropped(logits, temperature, filters, cuts)
        self._kernel[(num_rows, num_chunks)](
            logits,
            temperature,
            seed,
            choice,
            position,
            filter_of_row,
            cuts,
            sums,
            tokens,
            vocab_size,
            logits.stride(0),
            num_chunks,
            filtered=filters is not None,
            sample_stream=STREAM_SAMPLE,
            rounds=ROUNDS,
            counters=_DRAW_COUNTERS,
        )
        return tokens.gather(1, sums.argmax(dim=1, keepdim=True)).squeeze(1)
