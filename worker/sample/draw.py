"""The keyed draw: Gumbel-max over one row of scores.

    token = argmax_i  logit_i / T − ln(−ln u_i)

u_i is a function of (seed, choice, position, token id i) alone, see philox.py: the
same request draws the same token in any row of any batch on any device. Compared
with inverting the cumulated distribution it also survives small differences of the
logits: only near ties of the perturbed scores can flip.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from worker.kernels import Kernels
from worker.sample.philox import gumbel_noise


@dataclass(frozen=True, slots=True)
class DrawKeys:
    """Key of each draw, arrays [N]: seed uint64, choice and position uint32."""

    seed: npt.NDArray[np.uint64]
    choice: npt.NDArray[np.uint32]
    position: npt.NDArray[np.uint32]


class Draw(Protocol):
    """Draws one token for each of some rows."""

    def __call__(
        self,
        logits: torch.Tensor,
        rows: npt.NDArray[np.int64],
        temperature: npt.NDArray[np.float32],
        keys: DrawKeys,
    ) -> npt.NDArray[np.int64]:
        """logits float32 [M, V] of which `rows` [N] are drawn; −inf is never drawn.

        temperature [N] is above 0. Returns token ids [N]; equal scores give the
        lowest id.
        """
        ...


def draw_reference(
    logits: torch.Tensor,
    rows: npt.NDArray[np.int64],
    temperature: npt.NDArray[np.float32],
    keys: DrawKeys,
) -> npt.NDArray[np.int64]:
    """Draw in numpy, float64, row by row."""
    tokens = np.empty(len(rows), dtype=np.int64)
    for index, row in enumerate(rows):
        scores = logits[row].numpy().astype(np.float64) / np.float64(temperature[index])
        noise = gumbel_noise(
            int(keys.seed[index]), int(keys.choice[index]), int(keys.position[index]), len(scores)
        )
        tokens[index] = np.argmax(scores + noise)
    return tokens


class KernelDraw:
    """Draw by the C++ kernel; the tokens are those of draw_reference."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def __call__(
        self,
        logits: torch.Tensor,
        rows: npt.NDArray[np.int64],
        temperature: npt.NDArray[np.float32],
        keys: DrawKeys,
    ) -> npt.NDArray[np.int64]:
        assert logits.dtype == torch.float32 and logits.stride(1) == 1
        token_ids = np.empty(len(rows), dtype=np.int64)
        # Held in a list until the kernel is done: a converted copy has no other owner.
        arrays = [
            np.ascontiguousarray(array, dtype=dtype)
            for array, dtype in (
                (rows, np.int64),
                (temperature, np.float32),
                (keys.seed, np.uint64),
                (keys.choice, np.uint32),
                (keys.position, np.uint32),
            )
        ]
        self._kernels.draw(
            logits.data_ptr(),
            logits.stride(0),
            logits.shape[1],
            len(rows),
            *(array.ctypes.data for array in arrays),
            token_ids.ctypes.data,
        )
        return token_ids
