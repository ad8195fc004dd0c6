"""The keyed draw on a device: what backend.py defines, for all rows of a step at once.

Two ways that give the same tokens: torch, with every word of every row in memory, and two
passes in Triton, where a program looks at a piece of a row:

    row       [ piece 0 | piece 1 | … ]      best score and token of each piece
    result    the best of these, the first among equals

Scores are float64, as on a CPU, so that no tie is made by rounding. A temperature of 0
means the best token of the row.
"""

from typing import Any, Final, Protocol

import torch

from worker.sampling.draw import ROUNDS, STREAM_SAMPLE

_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
_WEYL: Final = (0x9E3779B9, 0xBB67AE85)
_LOW: Final = 0xFFFFFFFF
_COUNTERS: Final = 512
"""Counters of a piece, four tokens each."""


class KeyedDraw(Protocol):
    """One way of drawing."""

    def __call__(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        seed: torch.Tensor,
        choice: torch.Tensor,
        position: torch.Tensor,
    ) -> torch.Tensor:
        """Token ids int64 [N] of logits float32 [N, V], contiguous; waits for nothing.

        temperature: float32 [N], 0 or more. seed, choice, position: int64 [N], the bits of
        unsigned numbers. −inf is never drawn; equal scores give the lowest id.
        """
        ...


class TritonDraw:
    """KeyedDraw as a kernel of Triton."""

    def __init__(self) -> None:
        self.kernel = _kernel()

    def __call__(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        seed: torch.Tensor,
        choice: torch.Tensor,
        position: torch.Tensor,
    ) -> torch.Tensor:
        """As the Protocol says."""
        num_rows, vocab_size = logits.shape
        num_pieces = -(-vocab_size // (4 * _COUNTERS))
        scores = logits.new_empty((num_rows, num_pieces), dtype=torch.float64)
        tokens = logits.new_empty((num_rows, num_pieces), dtype=torch.int64)
        self.kernel[(num_rows, num_pieces)](
            logits,
            temperature,
            seed,
            choice,
            position,
            scores,
            tokens,
            vocab_size,
            logits.stride(0),
            num_pieces,
            stream=STREAM_SAMPLE,
            rounds=ROUNDS,
            counters=_COUNTERS,
        )
        return tokens.gather(1, scores.argmax(dim=1, keepdim=True)).squeeze(1)


def _kernel() -> Any:
    """One program for each piece of each row."""
    import triton
    import triton.language as tl

    # Triton reads the annotations too, and knows none but its own.
    def draw_piece(  # type: ignore[no-untyped-def]
        logits,
        temperatures,
        seeds,
        choices,
        positions,
        scores,
        tokens,
        vocab_size,
        stride,
        num_pieces,
        stream: tl.constexpr,
        rounds: tl.constexpr,
        counters: tl.constexpr,
    ):
        row, piece = tl.program_id(0), tl.program_id(1)
        temperature = tl.load(temperatures + row)
        seed = tl.load(seeds + row)
        counter = piece * counters + tl.arange(0, counters)
        nothing = tl.zeros_like(counter)
        position = (nothing + tl.load(positions + row)).to(tl.uint32)
        choice = (nothing + tl.load(choices + row)).to(tl.uint32)
        w0, w1, w2, w3 = tl.philox(
            seed,
            counter.to(tl.uint32),
            position,
            choice,
            (nothing + stream).to(tl.uint32),
            rounds,
        )
        # Tokens 4 c to 4 c + 3 have the words of counter c.
        word = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
        token = piece * counters * 4 + tl.arange(0, counters * 4)
        inside = token < vocab_size
        logit = tl.load(logits + row * stride + token, mask=inside, other=float("-inf"))
        uniform = (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10
        random = temperature > 0
        divisor = tl.where(random, temperature, 1.0).to(tl.float64)
        noise = tl.where(random, -tl.log(-tl.log(uniform)), 0.0)
        score = logit.to(tl.float64) / divisor + noise
        most = tl.max(score, 0)
        first = tl.min(tl.where(score == most, token, vocab_size - 1), 0)
        tl.store(scores + row * num_pieces + piece, most)
        tl.store(tokens + row * num_pieces + piece, first.to(tl.int64))

    return triton.jit(draw_piece)
