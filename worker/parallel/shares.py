"""Which part of a model each rank has: pure arithmetic on a ModelSpec.

    KV heads       dealt out in order, as evenly as possible; with more ranks than KV heads
                   several ranks have the same one
    query heads    follow their KV heads; ranks with the same KV head share its query heads
    inner columns  of the MLP, and rows of embedding and head: as evenly as possible

    SmolLM2, two ranks    KV heads 0 1 | 2    query heads 0 … 5 | 6 7 8    inner 768 | 768

Norms, and biases that are added to a sum, are on every rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from proto.errors import ConfigError
from worker.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank has; ranges over the whole model's heads, inner columns and token ids."""

    rank: int
    kv_heads: range
    heads: range
    inner: range
    vocab: range

    def spec(self, whole: ModelSpec) -> ModelSpec:
        """The arithmetic of this rank's layers. The vocabulary is that of the whole model."""
        return replace(
            whole,
            num_heads=len(self.heads),
            num_kv_heads=len(self.kv_heads),
            intermediate_size=len(self.inner),
        )


def divide(spec: ModelSpec, size: int, inner_units: Sequence[int] = (1,)) -> tuple[Share, ...]:
    """The share of each of `size` ranks.

    inner_units: numbers of inner columns that are best not separated, best first; one is taken
        that divides the inner size and leaves something for every rank, if there is one.
    Raises ConfigError where there are more ranks than heads, inner columns or tokens.
    """
    fewest = min(spec.num_heads, spec.intermediate_size, spec.vocab_size)
    if size > fewest:
        raise ConfigError(
            f"--tensor-parallel-size {size}: {spec.architecture} with {spec.num_heads} heads can "
            f"be shared by at most {fewest} workers",
            "tensor_parallel_size",
        )
    fits = (unit for unit in inner_units if _deals(spec.intermediate_size, unit, size))
    unit = next(fits, 1)
    inner = [
        range(units.start * unit, units.stop * unit)
        for units in deal(spec.intermediate_size // unit, size)
    ]
    heads = _heads(spec, size)
    vocab = deal(spec.vocab_size, size)
    return tuple(
        Share(rank, *heads[rank], inner=inner[rank], vocab=vocab[rank]) for rank in range(size)
    )


def deal(count: int, size: int) -> list[range]:
    """range(count) in `size` pieces in order; the first ones may have one more."""
    least, more = divmod(count, size)
    ends = [least * rank + min(rank, more) for rank in range(size + 1)]
    return [range(first, end) for first, end in pairwise(ends)]


def _deals(count: int, unit: int, size: int) -> bool:
    return count % unit == 0 and count // unit >= size


def _heads(spec: ModelSpec, size: int) -> list[tuple[range, range]]:
    """KV heads and query heads of each rank."""
    queries = spec.num_heads // spec.num_kv_heads
    if size <= spec.num_kv_heads:
        return [
            (kv, range(kv.start * queries, kv.stop * queries))
            for kv in deal(spec.num_kv_heads, size)
        ]
    # ranks of a KV head   | 0 1 2 | 3 4 |      its query heads   | 0 | 1 | 2 3 |
    found = []
    for kv, ranks in enumerate(deal(size, spec.num_kv_heads)):
        if len(ranks) > queries:
            raise ConfigError(
                f"--tensor-parallel-size {size}: {spec.num_heads} query heads over "
                f"{spec.num_kv_heads} KV heads do not suffice for so many workers",
                "tensor_parallel_size",
            )
        first = kv * queries
        found += [
            (range(kv, kv + 1), range(first + part.start, first + part.stop))
            for part in deal(queries, len(ranks))
        ]
    return found
