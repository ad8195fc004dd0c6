"""One row's changes of scores as the kernels read them: a struct of pointers.

Owns the struct, and keeps alive what it points to. Most of it never changes, so it is made
once a sequence and not once a step.
"""

import ctypes
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from worker.kernels import Edits

Ids = npt.NDArray[np.int64]
Values = npt.NDArray[np.float32]
_EVERY_TOKEN: Final = -1
_NO_IDS: Final = np.empty(0, dtype=np.int64)
_NO_VALUES: Final = np.empty(0, dtype=np.float32)


class EditsView:
    """TokendEdits of csrc/edits.h.

    allowed: int64 [A], or None for every token. bias_ids int64 [B], bias_values float32 [B].
    rules: repetition, frequency and presence penalty.
    """

    def __init__(
        self,
        allowed: Ids | None,
        bias_ids: Ids,
        bias_values: Values,
        rules: tuple[float, float, float],
    ) -> None:
        self._constant = (allowed, bias_ids, bias_values)
        self._count_ids, self._counts, self._forbidden = _NO_IDS, _NO_VALUES, _NO_IDS
        repetition, frequency, presence = rules
        self._fields = Edits(
            num_allowed=_EVERY_TOKEN if allowed is None else len(allowed),
            allowed=None if allowed is None else allowed.ctypes.data,
            num_biases=len(bias_ids),
            bias_ids=bias_ids.ctypes.data,
            bias_values=bias_values.ctypes.data,
            repetition=repetition,
            frequency=frequency,
            presence=presence,
        )
        self.address = ctypes.addressof(self._fields)

    def set_counts(self, ids: Ids, counts: Values, size: int) -> None:
        """The first `size` of these are the tokens that penalties are for."""
        if ids is not self._count_ids:
            self._count_ids, self._counts = ids, counts
            self._fields.count_ids = ids.ctypes.data
            self._fields.counts = counts.ctypes.data
        self._fields.num_counts = size

    def set_forbidden(self, token_ids: Sequence[int]) -> None:
        """Tokens that cannot be chosen now."""
        self._fields.num_forbidden = len(token_ids)
        if token_ids:
            self._forbidden = np.array(token_ids, dtype=np.int64)
            self._fields.forbidden = self._forbidden.ctypes.data
