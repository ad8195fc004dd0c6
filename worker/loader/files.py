"""Tensors out of memory-mapped files, whatever the format.

Owns the maps. A format says how bytes become numbers; see gguf.py and safetensors.py.
"""

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from proto.errors import ModelError
from proto.prepared_model import TensorEntry, TensorIndex
from worker.loader.gguf import GgufFormat
from worker.loader.safetensors import SafetensorsFormat

RawBytes = npt.NDArray[np.uint8]


class TensorFormat(Protocol):
    """How a file format stores numbers."""

    def decode(self, entry: TensorEntry, data: RawBytes) -> torch.Tensor:
        """The tensor of entry.shape, in whatever float dtype costs least; may share `data`."""
        ...


class TensorFiles:
    """Reads tensors by their entries; safe to use from several threads."""

    def __init__(self, index: TensorIndex) -> None:
        self._format = _format_named(index.format)
        # Copy-on-write maps: torch wants writable memory, and nobody writes.
        self._maps: list[RawBytes] = [
            np.memmap(path, dtype=np.uint8, mode="c") for path in index.files
        ]

    def read(self, entry: TensorEntry) -> torch.Tensor:
        """The tensor, valid while this object lives; raises ModelError naming it."""
        return self._format.decode(entry, self.bytes_of(entry))

    def bytes_of(self, entry: TensorEntry) -> RawBytes:
        """What the file has for it: uint8 [num_bytes] of the map."""
        return self._maps[entry.file][entry.offset : entry.offset + entry.num_bytes]


def _format_named(name: str) -> TensorFormat:
    match name:
        case "gguf":
            return GgufFormat()
        case "safetensors":
            return SafetensorsFormat()
        case _:
            raise ModelError(f"tensors in format {name!r}: supported: gguf, safetensors")
