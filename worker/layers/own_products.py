"""Which products our own kernels multiply, and with what: for kernels that do several at once.

Owns the list of the forms that have such a description; a form that is not in it is multiplied
by itself.
"""

import ctypes

from worker.layers.block_linear import BlockLinear, JoinedLinear
from worker.layers.linear import Linear
from worker.layers.mixed_linear import MixedLinear


def form_changes(linear: Linear) -> tuple[int, ...]:
    """Numbers of rows from which on another form of the weight multiplies."""
    return (linear.many_from,) if isinstance(linear, MixedLinear) else ()


def own_parts(linear: Linear, num_rows: int) -> tuple[ctypes.Structure, ...]:
    """The weights that multiply so many rows, one below the other, as `worker.kernels.Part`.

    Valid as long as `linear` lives. Empty where no kernel of ours does it.
    """
    if isinstance(linear, MixedLinear):
        return own_parts(linear.form(num_rows), num_rows)
    if isinstance(linear, BlockLinear | JoinedLinear):
        return linear.parts
    return ()
