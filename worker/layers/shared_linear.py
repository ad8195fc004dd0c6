"""Layers whose weights are divided among ranks, over what each rank has.

    rows divided       columns of the result are divided as well: no layer of its own is needed
                       before the next product, whose columns are divided alike
    columns divided    SummedLinear: each rank has a summand of the whole result
    rows of the head   GatheredHead: each rank has the scores of some tokens
    rows of a table    SharedTable: each rank has the embeddings of some tokens

    x ─▶ qkv, gate_up (rows) ─▶ heads, inner columns ─▶ o, down (columns) ─▶ sum over ranks

(Shoeybi et al., Megatron-LM, section 3.) Sums are taken in float32, in the order of the ranks
and on every rank, and rounded once: all ranks go on with the same bits, and a row does not
depend on the rows beside it.
"""

from collections.abc import Sequence

import torch

from worker.layers.embedding import Table
from worker.layers.linear import Linear
from worker.parallel.group import RankGroup


class SummedLinear:
    """A product over some of the columns of a weight; the bias is one rank's."""

    def __init__(self, linear: Linear, group: RankGroup) -> None:
        self._linear = linear
        self._group = group

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return _sum(self._parts(x)).to(x.dtype)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        total = residual.float()  # the residual itself where it is of float32
        for part in self._parts(x):
            total += part
        return residual.copy_(total) if total is not residual else residual

    def _parts(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self._group.gather(self._linear(x)).unbind()


class GatheredHead:
    """Scores of all tokens, of which each rank computes those in its range of `vocab`."""

    def __init__(self, linear: Linear, group: RankGroup, vocab: Sequence[range]) -> None:
        self._linear = linear
        self._group = group
        self._sizes = [len(each) for each in vocab]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        own = self._linear(x)
        # ranks  | 0 … 33 | 34 … 66 · | 67 … 99 · |    all as wide as the widest
        padded = own.new_zeros(len(own), max(self._sizes))
        padded[:, : own.shape[1]] = own
        parts = zip(self._group.gather(padded), self._sizes, strict=True)
        return torch.cat([part[:, :size] for part, size in parts], dim=1)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return residual.add_(self(x))


class SharedTable:
    """Rows of a table, of which this rank has those of the tokens in `own`, in `table`.

    num_tokens: of the whole table.
    """

    def __init__(self, table: Table, group: RankGroup, own: range, num_tokens: int) -> None:
        self._table = table
        self._group = group
        self._own = own
        self._num_tokens = num_tokens

    @property
    def dtype(self) -> torch.dtype:
        return self._table.dtype

    def rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        if token_ids.device.type == "cpu":  # another device would have to be waited for
            self._refuse_odd(token_ids)
        elsewhere = (token_ids < self._own.start) | (token_ids >= self._own.stop)
        rows = self._table.rows((token_ids - self._own.start).masked_fill_(elsewhere, 0))
        rows.masked_fill_(elsewhere[:, None], 0.0)
        # one summand of each number is not zero, so nothing is rounded
        return _sum(self._group.gather(rows).unbind()).to(rows.dtype)

    def _refuse_odd(self, token_ids: torch.Tensor) -> None:
        odd = (token_ids < 0) | (token_ids >= self._num_tokens)
        if odd.any():
            raise IndexError(f"row {int(token_ids[odd][0])} of {self._num_tokens}")


def _sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """In float32, from the first to the last; a new tensor."""
    total = parts[0].to(torch.float32, copy=True)
    for part in parts[1:]:
        total += part
    return total
