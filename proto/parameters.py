"""Sampling parameters that are one number, each written once.

The field of `SamplingParams` or `LogitEdits` carries its bounds and its meaning. Derived from it:
the check of the bounds, the field of a client's request with its default, what goes with a beam
search, the documentation, and which fields the APIs of chat pass on unchanged.
"""

import typing
from typing import NamedTuple

import msgspec

from proto.errors import require


class Number(NamedTuple):
    """Bounds and meaning of a field, as the metadata of its annotation.

    meaning: for docs/api.md. low, high: allowed values; `low` itself is not if `above_low`.
    beam_value: the only value that a beam search accepts; None: the default.
    """

    meaning: str
    low: float
    high: float
    above_low: bool = False
    beam_value: float | None = None

    def check(self, name: str, value: float) -> None:
        """Raise InvalidRequestError for a value out of bounds, or NaN."""
        inside = self.low < value <= self.high if self.above_low else self.low <= value <= self.high
        bounds = f"between {self.low:g} and {self.high:g}"
        if self.above_low:
            bounds = f"above {self.low:g} and at most {self.high:g}"
        require(inside, name, f"must be {bounds}, got {value}")


def numbers_of(struct: type[msgspec.Struct]) -> dict[str, Number]:
    """Return the fields of a struct that are annotated with a Number, by name."""
    found: dict[str, Number] = {}
    for name, hint in typing.get_type_hints(struct, include_extras=True).items():
        for metadata in getattr(hint, "__metadata__", ()):
            if isinstance(metadata, Number):
                found[name] = metadata
    return found


def default_of(struct: type[msgspec.Struct], name: str) -> float:
    (default,) = (field.default for field in msgspec.structs.fields(struct) if field.name == name)
    return float(default)
