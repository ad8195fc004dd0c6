"""Adapters with random updates of a product, and the outputs that they lead to, in float64."""

import torch

from worker.layers.adapters import Adapter, LowRankPart, LowRankUpdate, StepAdapters


def random_update(
    in_features: int,
    shape: tuple[tuple[int, int], ...],
    dtype: torch.dtype,
    seed: int,
    *,
    scales_outputs: bool = False,
) -> LowRankUpdate:
    """Return an update of parts (rank, outputs), one below the other."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator)

    parts, rank, first = [], 0, 0
    for ranks, outputs in shape:
        up = (0.3 * numbers(ranks, outputs)).to(dtype)
        parts.append(LowRankPart(range(first, first + outputs), range(rank, rank + ranks), up))
        rank, first = rank + ranks, first + outputs
    down = (numbers(rank, in_features) / in_features**0.5).to(dtype)
    gain, shift = (0.5 * numbers(first), numbers(first)) if scales_outputs else (None, None)
    return LowRankUpdate(down, tuple(parts), gain, shift)


def expected(
    update: LowRankUpdate, x: torch.Tensor, y: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """Return the outputs with an update of all rows, in float64."""
    reduced = x.double() @ update.down.double().t() * scales[:, None].double()
    after = y.double().clone()
    if update.gain is not None:
        after += y.double() * update.gain * scales[:, None].double()
    if update.shift is not None:
        after += update.shift * scales[:, None].double()
    for part in update.parts:
        columns, ranks = part.outputs, part.ranks
        delta = reduced[:, ranks.start : ranks.stop] @ part.up.double()
        after[:, columns.start : columns.stop] += delta
    return after


def packed(adapters: StepAdapters, update: LowRankUpdate | None) -> Adapter:
    """Return an adapter with this update of product 0, or with none, as steps read it."""
    work = adapters.packed(Adapter(products={} if update is None else {0: update}))
    while True:
        try:
            next(work)
        except StopIteration as finished:
            adapter: Adapter = finished.value
            return adapter
