"""The Triton kernels of sampling on a device: edits of logits, and the keyed draw.

    listed   values added to single logits: biases, and −inf for forbidden tokens
    rows     penalties from counts on the device, then −inf for tokens that a mask rules out
    draw     argmax of logit / T plus Gumbel noise, for all rows of a step, over the tokens that
             their filters keep (device_filters.py)

Edited logits equal those of the CPU kernels bit for bit, and so do tokens, but for near ties.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from worker.sampling.device_filters import (
    RowFilters,
    TritonFilters,
    mask_dropped,
    order_function,
    publish,
)
from worker.sampling.logit_edits import WORD_BITS
from worker.sampling.torch_backend import ROUNDS, STREAM_SAMPLE

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
        self.listed_kernel = _listed_kernel()
        self.kernel = _rows_kernel()

    def add_listed(self, logits: torch.Tensor, listed: ListedEdits, last: torch.Tensor) -> None:
        """Add values to single logits. last: int64, the last token of every row of the batch."""
        count = len(listed.index)
        self.listed_kernel[(-(-count // _LISTED_BLOCK),)](
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
        self.kernel[(len(edits.rows), -(-vocab_size // _ROW_CHUNK))](
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


def _listed_kernel() -> Any:
    """Return the Triton kernel of `TritonEdits.add_listed`."""
    import triton
    import triton.language as tl

    # Triton reads annotations and accepts only its own.
    def add_listed(  # type: ignore[no-untyped-def]
        logits,
        indices,
        values,
        sources,
        needed,
        last,
        count,
        any_token: tl.constexpr,
        block_size: tl.constexpr,
    ):
        """Add the values of a block of edits to their logits, unless another token is needed.

        Grid: (blocks,). logits: float32 [N, V]. indices, values, sources, needed: [count], as in
        ListedEdits. last: int64, by row of the batch. Additions are atomic, because a logit may
        have several edits.
        """
        edit_index = tl.program_id(0) * block_size + tl.arange(0, block_size)
        inside = edit_index < count
        wanted = tl.load(needed + edit_index, mask=inside, other=any_token)
        source = tl.load(sources + edit_index, mask=inside, other=0)
        found = tl.load(last + source, mask=inside, other=0)
        applies = inside & ((wanted == any_token) | (wanted == found))
        value = tl.load(values + edit_index, mask=inside, other=0.0)
        target = tl.load(indices + edit_index, mask=inside, other=0)
        tl.atomic_add(logits + target, value, mask=applies)

    return triton.jit(add_listed)


def _rows_kernel() -> Any:
    """Return the Triton kernel of `TritonEdits.edit_rows`."""
    import triton
    import triton.language as tl

    # Triton reads annotations and accepts only its own.
    def edit_chunk(  # type: ignore[no-untyped-def]
        logits,
        counts,
        words,
        rows,
        slots,
        masks,
        rules,
        vocab_size,
        num_words,
        seen: tl.constexpr,
        chunk_size: tl.constexpr,
    ):
        """Penalise the logits of a chunk, then write −inf over tokens that the mask rules out.

        Grid: (R, chunks). logits: float32 [N, V]. counts: int32 [S, V]. words: int32 [M,
        num_words]. rows, slots, masks, rules: as in RowEditArrays.
        """
        edit_index, chunk_index = tl.program_id(0), tl.program_id(1)
        token = chunk_index * chunk_size + tl.arange(0, chunk_size)
        inside = token < vocab_size
        zeros = tl.zeros_like(token).to(tl.int64)
        slot, word_row = zeros + tl.load(slots + edit_index), zeros + tl.load(masks + edit_index)
        address = logits + tl.load(rows + edit_index) * vocab_size + token
        logit = tl.load(address, mask=inside, other=0.0)
        entry = tl.load(counts + slot * vocab_size + token, mask=inside & (slot >= 0), other=0)
        num_outputs = (entry & (seen - 1)).to(tl.float32)
        repetition = tl.load(rules + 3 * edit_index)
        frequency = tl.load(rules + 3 * edit_index + 1)
        presence = tl.load(rules + 3 * edit_index + 2)
        scaled = tl.where(logit > 0, tl.div_rn(logit, repetition), logit * repetition)
        changed = scaled - frequency * num_outputs - tl.where(num_outputs > 0, presence, 0.0)
        logit = tl.where(entry != 0, changed, logit)
        word = tl.load(
            words + word_row * num_words + token // 32, mask=inside & (word_row >= 0), other=0
        )
        allowed = (word_row < 0) | (((word >> (token % 32)) & 1) != 0)
        tl.store(address, tl.where(allowed, logit, float("-inf")), mask=inside)

    return triton.jit(edit_chunk)


_DRAW_COUNTERS: Final = 512
"""Philox counters of a chunk; a counter gives the random words of four tokens."""


class TritonDraw:
    """The draw of cpu_kernels.py, keyed by (seed, choice, position), for all rows of a step.

        row       [ chunk 0 | chunk 1 | … ]      the kernel finds best sum and token of a chunk
        result    torch takes the best of these, the first among equals

    Sums are float64, as on a CPU, so that rounding makes no ties. A temperature of 0 gives the best
    token of the row. A chunk of which the filters keep nothing costs no noise.
    """

    def __init__(self) -> None:
        self.kernel = _draw_kernel()
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
        self.kernel[(num_rows, num_chunks)](
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


def _draw_kernel() -> Any:
    """Return the Triton kernel of `TritonDraw`."""
    import triton
    import triton.language as tl

    jit: Callable[[Any], Any] = triton.jit
    order_key = order_function()

    @jit
    def sums_of(  # type: ignore[no-untyped-def]
        logit,
        temperature,
        seed,
        choice,
        position,
        sample_stream: tl.constexpr,
        rounds: tl.constexpr,
        counters: tl.constexpr,
    ):
        """Return logit / temperature plus noise of this program's chunk, float64.

        logit: [4 counters]. At a temperature of 0 the logit itself, without noise.
        """
        counter = tl.program_id(1) * counters + tl.arange(0, counters)
        zeros = tl.zeros_like(counter)
        w0, w1, w2, w3 = tl.philox(
            seed,
            counter.to(tl.uint32),
            (zeros + position).to(tl.uint32),
            (zeros + choice).to(tl.uint32),
            (zeros + sample_stream).to(tl.uint32),
            rounds,
        )
        # Tokens 4 c to 4 c + 3 have the words of counter c.
        word = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
        uniform = (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10
        random = temperature > 0
        divisor = tl.where(random, temperature, 1.0).to(tl.float64)
        noise = tl.where(random, -tl.log(-tl.log(uniform)), 0.0)
        return logit.to(tl.float64) / divisor + noise

    # Triton reads annotations and accepts only its own.
    def draw_chunk(  # type: ignore[no-untyped-def]
        logits,
        temperatures,
        seeds,
        choices,
        positions,
        filter_of_row,
        cuts,
        sums,
        tokens,
        vocab_size,
        stride,
        num_chunks,
        filtered: tl.constexpr,
        sample_stream: tl.constexpr,
        rounds: tl.constexpr,
        counters: tl.constexpr,
    ):
        """Write the best sum of logit / temperature and noise in a chunk, and its token.

        Grid: (N, chunks). logits: float32, rows `stride` apart. temperatures: float32 [N]. seeds,
        choices, positions: int64 [N]. filter_of_row: int64 [N], and cuts: int32 [F, 2], of
        TritonFilters; None if not `filtered`. sums: float64 [N, chunks], −inf if the filter keeps
        nothing of the chunk. tokens: int64 [N, chunks], the lowest of those with the best sum. A
        chunk has 4 tokens for each of its `counters`.
        """
        row, chunk_index = tl.program_id(0), tl.program_id(1)
        temperature = tl.load(temperatures + row)
        token = chunk_index * counters * 4 + tl.arange(0, counters * 4)
        inside = token < vocab_size
        logit = tl.load(logits + row * stride + token, mask=inside, other=float("-inf"))
        most = tl.full((), float("-inf"), tl.float64)
        first = chunk_index * counters * 4
        drawn = True
        if filtered:
            filter_index = tl.load(filter_of_row + row)
            if filter_index >= 0:
                last_key = tl.load(cuts + 2 * filter_index)
                last_id = tl.load(cuts + 2 * filter_index + 1)
                key = order_key(tl.div_rn(logit, temperature))
                kept = (key > last_key) | ((key == last_key) & (token <= last_id))
                logit = tl.where(kept, logit, float("-inf"))
                drawn = tl.max((inside & kept).to(tl.int32), 0) > 0
        if drawn:
            total = sums_of(
                logit,
                temperature,
                tl.load(seeds + row),
                tl.load(choices + row),
                tl.load(positions + row),
                sample_stream,
                rounds,
                counters,
            )
            most = tl.max(total, 0)
            first = tl.min(tl.where(total == most, token, vocab_size - 1), 0)
        tl.store(sums + row * num_chunks + chunk_index, most)
        tl.store(tokens + row * num_chunks + chunk_index, first.to(tl.int64))

    publish(globals(), order_key, sums_of)
    return triton.jit(draw_chunk)
