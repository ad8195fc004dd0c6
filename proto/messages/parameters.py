"""Sampling parameters that are one number, each written once.

The field of `SamplingParams` or `LogitEdits` carries its bounds. Derived from it: the check of the
bounds, what goes with a beam search, and which fields the APIs of chat pass on unchanged.
"""

import typing
from typing import NamedTuple

import msgspec

from proto.errors import require


class Number(NamedTuple):
    """Bounds of a field, as the metadata of its annotation.

    low, high: allowed values; `low` itself is not if `above_low`.
    value_for_beams: the only value that a beam search accepts; None: the default.
    """

    low: float
    high: float
    above_low: bool = False
    value_for_beams: float | None = None

    def check(self, name: str, value: float) -> None:
        """Raise InvalidRequestError for a value out of bounds, or NaN."""
        inside = self.low < value <= self.high if self.above_low else self.low <= value <= self.high
        bounds = f"between {self.low:g} and {self.high:g}"
        if self.above_low:
            bounds = f"above {self.low:g} and at most {self.high:g}"
        require(inside, name, f"must be {bounds}, got {str(value).removesuffix('.0')}")


def numbers_of(struct: type[msgspec.Struct]) -> dict[str, Number]:
    """Return the fields of a struct that are annotated with a Number, by name."""
    found: dict[str, Number] = {}
    for name, hint in typing.get_type_hints(struct, include_extras=True).items():
        for metadata in getattr(hint, "__metadata__", ()):
            if isinstance(metadata, Number):
                found[name] = metadata
    return found
