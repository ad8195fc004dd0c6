"""Layers of another form than mixer, then MLP: mixers in parallel, and layers without one part."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch

from worker.models.parts import ForwardContext, LayerPart, PartReader, PartSpec, Shard, WeightSpec

_ANY_NUMBER = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ParallelMixerSpec(PartSpec):
    """Mixers that read the same input and add up their outputs; names of weights differ.

    input_factors: of the input of each. output_factors: of the output of each, whose multiple is
        rounded before it is added.
    """

    parts: tuple[PartSpec, ...]
    input_factors: tuple[float, ...]
    output_factors: tuple[float, ...]

    @property
    def weights(self) -> tuple[WeightSpec, ...]:
        return tuple(chain.from_iterable(part.weights for part in self.parts))

    @property
    def mixers(self) -> tuple[PartSpec, ...]:
        return self.parts

    @property
    def flops_per_token(self) -> int:
        return sum(part.flops_per_token for part in self.parts)

    @property
    def outputs_per_token(self) -> int:
        return sum(part.outputs_per_token for part in self.parts)

    @property
    def max_ranks(self) -> int:
        return min(part.max_ranks for part in self.parts)

    def shard(
        self, rank: int, size: int, block_columns: Mapping[str, int]
    ) -> tuple["ParallelMixerSpec", dict[str, Shard]]:
        parts, shards = zip(
            *(part.shard(rank, size, block_columns) for part in self.parts), strict=True
        )
        return replace(self, parts=parts), dict(chain.from_iterable(map(dict.items, shards)))

    def read(self, reader: PartReader) -> Callable[[], "ParallelMixer"]:
        builds = [part.read(reader) for part in self.parts]
        return lambda: ParallelMixer(self, [build() for build in builds])


class ParallelMixer:
    """The mixers of a layer, one after the other."""

    def __init__(self, spec: ParallelMixerSpec, parts: Sequence[LayerPart]) -> None:
        self.spec = spec
        self.parts = list(zip(parts, spec.input_factors, spec.output_factors, strict=True))

    def add_to(
        self, residual: torch.Tensor, x: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        for part, input_factor, output_factor in self.parts:
            own = x if input_factor == 1.0 else x * input_factor
            if output_factor == 1.0:
                residual = part.add_to(residual, own, context)
            else:
                output = part.add_to(torch.zeros_like(residual), own, context)
                residual.add_(output.mul_(output_factor))
        return residual


@dataclass(frozen=True, kw_only=True)
class NoPartSpec(PartSpec):
    """In place of the mixer or the MLP of a layer that has none; it also has no norm."""

    @property
    def weights(self) -> tuple[WeightSpec, ...]:
        return ()

    @property
    def mixers(self) -> tuple[PartSpec, ...]:
        return ()

    @property
    def max_ranks(self) -> int:
        return _ANY_NUMBER

    def shard(
        self, rank: int, size: int, block_columns: Mapping[str, int]
    ) -> tuple["NoPartSpec", dict[str, Shard]]:
        return self, {}

    def read(self, reader: PartReader) -> Callable[[], "NoPart"]:
        return NoPart


class NoPart:
    """Adds nothing."""

    def add_to(
        self, residual: torch.Tensor, x: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        return residual
