"""The sampling parameters of the rows of a batch: one record for each row.

    seed | choice | position | the fields of DRAW_PARAMETERS

The batch holds an array of these records; a step selects the records of its rows. Both backends
read them: the C++ kernels as `struct RowParams`, torch and Triton as one tensor for each field. The
fields come from DRAW_PARAMETERS in proto/messages/sampling_params.py, the one table of these.
"""

from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from proto.messages.sampling_params import DRAW_PARAMETERS, SamplingParams

ROW_PARAMS: Final = np.dtype(
    [("seed", np.uint64), ("choice", np.uint32), ("position", np.uint32)]
    + [
        (name, np.int32 if isinstance(default, int) else np.float32)
        for name, default in DRAW_PARAMETERS.items()
    ],
    align=True,
)
"""Fields and layout of `struct RowParams` in csrc.

seed, choice, position: the key of a draw; position is the index of the output token, 0 for the
    first one, and is set for each step.
The others: DRAW_PARAMETERS of proto/messages/sampling_params.py, in that order.
"""
FILTERS: Final = tuple(name for name in DRAW_PARAMETERS if name != "temperature")
"""Parameters that remove tokens, listed as in `DRAW_PARAMETERS`.

Every device applies min-p first, then top-k, then top-p, each to the tokens that the one before
leaves. A row with all of them at their defaults needs no filter.
"""

RowParams = npt.NDArray[np.void]
"""An array [N] of ROW_PARAMS."""


def neutral_params(num_rows: int) -> RowParams:
    """Return records [num_rows] with the key 0 and the default of each parameter."""
    params = np.zeros(num_rows, dtype=ROW_PARAMS)
    for name, default in DRAW_PARAMETERS.items():
        params[name] = default
    return params


def record_of(params: SamplingParams, seed: int, choice: int) -> tuple[Any, ...]:
    """Return the record of a request, a tuple to be assigned to an element of RowParams."""
    return (seed, choice, 0, *(getattr(params, name) for name in DRAW_PARAMETERS))


def needs_filter(params: RowParams) -> npt.NDArray[np.bool_]:
    """Return the rows, bool [N], with at least one filter."""
    found = np.zeros(len(params), dtype=np.bool_)
    for name in FILTERS:
        found |= params[name] != DRAW_PARAMETERS[name]
    return found


def torch_columns(params: RowParams, names: Iterable[str]) -> list[npt.NDArray[Any]]:
    """Return the named fields as arrays [N] of types that torch computes with: int64, float64."""
    columns = [params[name] for name in names]
    return [
        column.astype(np.float64 if column.dtype.kind == "f" else np.int64) for column in columns
    ]
