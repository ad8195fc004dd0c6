"""The weights of one model, or one rank's pieces of them, by tokend's names, wherever and however
they are stored.

Owns the matching of files against a ModelSpec: names, shapes, completeness, and
what GGUF files do to query and key rows and to norms. Knows nothing of layers or fusion.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from proto.errors import ModelError
from proto.prepared_model import TensorEntry, TensorIndex
from worker.loader.blocks import StoredBlocks, check_blocks
from worker.loader.files import TensorFiles
from worker.loader.index import entries_by_name
from worker.loader.names import ROPE_FACTORS, carries_no_weight, name_in_file
from worker.loader.pieces import Piece
from worker.models.spec import (
    DefaultRope,
    FactorsRope,
    Llama3Rope,
    ModelSpec,
    Rope,
    parameter_shapes,
)

_UNDIVIDED: Final[Mapping[str, Piece]] = MappingProxyType({})


class WeightSource:
    """Reads weights into tensors of one dtype and device; safe to use from several threads.

    pieces: what is read of each weight instead of all of it.

    Raises ModelError at once for a tensor that is missing, unknown or of a shape
    other than the spec's, naming it as the file does.
    """

    def __init__(
        self,
        index: TensorIndex,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        pieces: Mapping[str, Piece] = _UNDIVIDED,
    ) -> None:
        self._spec = spec
        self._dtype = dtype
        self._device = device
        self._files = TensorFiles(index)
        shapes = parameter_shapes(spec)
        self._pieces = {name: pieces.get(name, Piece()) for name in shapes}
        self._shapes = {name: self._pieces[name].shape_of(shape) for name, shape in shapes.items()}
        is_gguf = index.format == "gguf"
        self._permuted = is_gguf and spec.gguf_permutes_qk
        self._one_is_missing = spec.norms_add_one and not is_gguf
        in_file = {
            name: entry
            for name, entry in entries_by_name(index).items()
            if not carries_no_weight(index.format, name)
        }
        rope_factors = in_file.pop(ROPE_FACTORS, None) if is_gguf else None
        self.ropes = spec.ropes if rope_factors is None else self._ropes_with(rope_factors)
        self._entries = {
            name: _take(in_file, name_in_file(index.format, name, spec.post_norms), shape)
            for name, shape in shapes.items()
        }
        if spec.tied_embeddings:
            self._drop_copy_of_embedding(in_file, name_in_file(index.format, "head.weight"))
        if in_file:
            raise ModelError(
                f"tensor {next(iter(in_file))} is no part of {spec.architecture} with this "
                f"configuration ({len(in_file)} such tensors)"
            )

    def read(self, *names: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """These weights, one below the other, as one new tensor; of another dtype if asked."""
        rows = [self._shapes[name][0] for name in names]
        shape = (sum(rows), *self._shapes[names[0]][1:])
        result = torch.empty(shape, dtype=dtype or self._dtype, device=self._device)
        for name, part in zip(names, torch.split(result, rows), strict=True):
            self._read_into(name, part)
        return result

    def read_norm(self, name: str) -> torch.Tensor:
        """What a norm multiplies by, as a new tensor.

        In float32 where 1 is part of it: in 16 bits little would be left of the rest.
        """
        if not self._spec.norms_add_one:
            return self.read(name)
        stored = self._files.read(self._entries[name])
        weight = stored.to(self._device, torch.float32, copy=True)
        return weight.add_(1.0) if self._one_is_missing else weight

    def type_of(self, name: str) -> str:
        """How a weight is stored: for a GGUF file one of GGUF's types, else the file's own word."""
        return self._entries[name].type

    def columns_of(self, name: str) -> int:
        """Numbers in a row of a weight, which are those that a product sums over."""
        return self._shapes[name][-1]

    def read_blocks(self, name: str) -> StoredBlocks:
        """A weight in blocks (one of the types in blocks.py) as it is stored; shares the map."""
        piece = self._pieces[name]
        entry = piece.entry_of(self._entries[name])
        check_blocks(entry)
        rows, columns = entry.shape
        data = self._files.bytes_of(entry)
        whole_rows = StoredBlocks(entry.type, rows, columns, data, self._row_order(name))
        return piece.columns_of(whole_rows)

    def separates(self, name: str, block_size: int) -> bool:
        """Whether the piece of a weight begins or ends within a block of so many columns."""
        return self._pieces[name].separates(block_size, self._entries[name].shape[-1])

    def _row_order(self, name: str) -> npt.NDArray[np.int64]:
        """Int64 [rows]: row i of a weight is this row in the file; see _read_into."""
        order = np.arange(self._shapes[name][0], dtype=np.int64)
        heads = self._heads_in_halves(name)
        return order.reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1) if heads else order

    def _heads_in_halves(self, name: str) -> int:
        """Heads whose rows the file interleaves; 0 where it has them in our order."""
        if not self._permuted or name.split(".")[-2] not in ("q", "k"):
            return 0
        return self._shapes[name][0] // self._spec.head_dim

    def _read_into(self, name: str, destination: torch.Tensor) -> None:
        piece = self._pieces[name]
        stored = self._files.read(piece.entry_of(self._entries[name]))
        if stored.dim() > 1:
            stored = stored[:, piece.columns]
        heads = self._heads_in_halves(name)
        if heads:
            # file rows of a head       0 h 1 h+1 2 h+2 …     (h = head_dim / 2)
            # as the decoder turns them 0 1 2 … h-1 h h+1 …
            half = self._spec.head_dim // 2
            stored = stored.view(heads, half, 2, -1).transpose(1, 2)
            destination = destination.view(heads, 2, half, -1)
        destination.copy_(stored)

    def _ropes_with(self, entry: TensorEntry) -> tuple[Rope, ...]:
        """The rotary embedding whose scaling the file gives as divisors of the frequencies."""
        rope, *others = dict.fromkeys(self._spec.ropes)
        if others:
            raise ModelError(f"tensor {entry.name} does not say which of the layers it is for")
        if not isinstance(rope, DefaultRope | Llama3Rope):
            raise ModelError(
                f"tensor {entry.name} and the configuration's {type(rope).__name__} "
                "both scale the rotary frequencies"
            )
        _check_shape(entry, (self._spec.head_dim // 2,))
        factors = self._files.read(entry)
        wrong = factors[~(factors.isfinite() & (factors > 0))].tolist()
        if wrong:
            raise ModelError(
                f"tensor {entry.name} divides rotary frequencies by {wrong[0]:g}, which "
                "is no positive number"
            )
        scaled = FactorsRope(rope.theta, tuple(factors.tolist()))
        return (scaled,) * self._spec.num_layers

    def _drop_copy_of_embedding(self, in_file: dict[str, TensorEntry], name: str) -> None:
        """A tied head may be stored too, if it is the same: then the embedding serves as both."""
        copy = in_file.pop(name, None)
        if copy is None:
            return
        embedding = self._entries["embedding.weight"]
        _check_shape(copy, embedding.shape)
        if not torch.equal(self._files.read(copy), self._files.read(embedding)):
            raise ModelError(
                f"tensor {name} differs from {embedding.name}, "
                "but the configuration has tie_word_embeddings = true"
            )


def _take(in_file: dict[str, TensorEntry], name: str, shape: tuple[int, ...]) -> TensorEntry:
    entry = in_file.pop(name, None)
    if entry is None:
        raise ModelError(f"tensor {name} of shape {list(shape)} is missing")
    _check_shape(entry, shape)
    return entry


def _check_shape(entry: TensorEntry, shape: tuple[int, ...]) -> None:
    if entry.shape != shape:
        raise ModelError(
            f"tensor {entry.name} has shape {list(entry.shape)}, "
            f"the configuration asks for {list(shape)}"
        )
