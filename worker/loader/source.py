"""The weights of one model in its files, by this program's names, as one rank reads them.

WeightSource matches the files against a ModelSpec (names, shapes, completeness) and undoes what
GGUF files do to query and key rows and to norms. It knows nothing of layers and fused products.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from proto.errors import ModelError
from proto.prepared_model import TensorEntry, TensorIndex
from worker.layers.kernel_weights import GGUF_BLOCKS
from worker.loader.files import StoredBlocks, TensorFiles, check_blocks, entries_by_name
from worker.models.parts import Shard
from worker.models.rope import DefaultRope, FactorsRope, Llama3Rope, Rope
from worker.models.spec import ModelSpec

ROPE_FACTORS: Final = "rope_freqs.weight"
"""In a GGUF file: divisors of the rotary frequencies, float32 [head_dim / 2]."""
_WHOLE: Final[Mapping[str, Shard]] = MappingProxyType({})


def block_columns(spec: ModelSpec, index: TensorIndex) -> dict[str, int]:
    """Return the columns of a quantisation block of each weight of a layer, by its local name.

    The largest of all layers; weights that are not stored in blocks are left out.
    """
    types = {entry.name: entry.type for entry in index.tensors}
    columns: dict[str, int] = {}
    for name, weight in spec.weights().items():
        stored_as = types.get(weight.name_in(index.format))
        if name.startswith("layers.") and stored_as in GGUF_BLOCKS:
            local = name.split(".", 2)[2]
            columns[local] = max(columns.get(local, 1), GGUF_BLOCKS[stored_as][0])
    return columns


class WeightSource:
    """Reads weights into tensors of one dtype and device; safe to use from several threads.

    spec: the whole model. shards: the part of each divided weight that is read.

    Raises ModelError at once for a tensor that is missing, unknown or of a shape
    other than the spec's, naming it as the file does.
    """

    def __init__(
        self,
        index: TensorIndex,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        shards: Mapping[str, Shard] = _WHOLE,
    ) -> None:
        self._spec = spec
        self._dtype = dtype
        self._device = device
        self._files = TensorFiles(index)
        self._weights = spec.weights()
        self._shards = {name: shards.get(name, Shard()) for name in self._weights}
        self._shapes = {
            name: self._shards[name].shape_of(weight.shape)
            for name, weight in self._weights.items()
        }
        self._is_gguf = index.format == "gguf"
        in_file = {
            name: entry
            for name, entry in entries_by_name(index).items()
            if self._is_gguf or not _repeats_config(name)
        }
        self._rope_factors: tuple[float, ...] | None = None
        if self._is_gguf and (factors := in_file.pop(ROPE_FACTORS, None)):
            self._rope_factors = self._read_rope_factors(factors)
        self._entries = {
            name: _pop_entry(in_file, weight.name_in(index.format), weight.shape)
            for name, weight in self._weights.items()
        }
        if spec.tied_embeddings:
            self._drop_copy_of_embedding(
                in_file, "output.weight" if self._is_gguf else "lm_head.weight"
            )
        if in_file:
            raise ModelError(
                f"tensor {next(iter(in_file))} is no part of {spec.architecture} with this "
                f"configuration ({len(in_file)} such tensors)"
            )

    def read(self, *names: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return these weights, one below the other, as one new tensor (of `dtype` if given)."""
        rows = [self._shapes[name][0] for name in names]
        shape = (sum(rows), *self._shapes[names[0]][1:])
        result = torch.empty(shape, dtype=dtype or self._dtype, device=self._device)
        for name, part in zip(names, torch.split(result, rows), strict=True):
            self._read_into(name, part)
        return result

    def read_norm(self, name: str) -> torch.Tensor:
        """Return what a norm multiplies by, as a new tensor.

        Float32 if the model's norms add 1 to the weight: 16 bits would round the rest away.
        """
        if not self._spec.norms_add_one:
            return self.read(name)
        stored = self._files.read(self._entries[name])
        weight = stored.to(self._device, torch.float32, copy=True)
        return weight if self._is_gguf else weight.add_(1.0)

    def type_of(self, name: str) -> str:
        """Return how a weight is stored: one of GGUF's types, or the safetensors dtype."""
        return self._entries[name].type

    def columns_of(self, name: str) -> int:
        """Return the columns of a weight: the numbers that a product sums over."""
        return self._shapes[name][-1]

    def read_blocks(self, name: str) -> StoredBlocks:
        """Return a weight in quantisation blocks as it is stored; may share the mapped file."""
        shard = self._shards[name]
        entry = _rows_of(self._entries[name], shard.rows)
        check_blocks(entry)
        rows, columns = entry.shape
        data = self._files.bytes_of(entry)
        stored = StoredBlocks(entry.type, rows, columns, data, self._row_order(name))
        return stored.with_columns(shard.columns)

    def splits_block(self, name: str, block_size: int) -> bool:
        """Return whether the shard's columns begin or end within a block of so many columns."""
        num_columns = self._entries[name].shape[-1]
        first, end, _ = self._shards[name].columns.indices(num_columns)
        return bool(first % block_size or (end % block_size and end != num_columns))

    def scaled_rope(self, rope: Rope) -> Rope:
        """Return the rotary embedding with the frequency divisors of the file, if it has any."""
        return rope if self._rope_factors is None else FactorsRope(rope.theta, self._rope_factors)

    def _row_order(self, name: str) -> npt.NDArray[np.int64]:
        """Int64 [rows]: row i of a weight is this row in the file; see _read_into."""
        order = np.arange(self._shapes[name][0], dtype=np.int64)
        heads = self._interleaved_heads(name)
        return order.reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1) if heads else order

    def _interleaved_heads(self, name: str) -> int:
        """Heads whose rows the file interleaves; 0 if it keeps our order."""
        head_dim = self._weights[name].gguf_interleaved_head_dim
        return self._shapes[name][0] // head_dim if self._is_gguf and head_dim else 0

    def _read_into(self, name: str, destination: torch.Tensor) -> None:
        shard = self._shards[name]
        stored = self._files.read(_rows_of(self._entries[name], shard.rows))
        if stored.dim() > 1:
            stored = stored[:, shard.columns]
        heads = self._interleaved_heads(name)
        if heads:
            # file rows of a head        0 h 1 h+1 2 h+2 …     (h = head_dim / 2)
            # as the decoder rotates it  0 1 2 … h-1 h h+1 …
            half = self._weights[name].gguf_interleaved_head_dim // 2
            stored = stored.view(heads, half, 2, -1).transpose(1, 2)
            destination = destination.view(heads, 2, half, -1)
        destination.copy_(stored)

    def _read_rope_factors(self, entry: TensorEntry) -> tuple[float, ...]:
        """Read divisors of the rotary frequencies; raises ModelError if they cannot apply."""
        rope, *others = dict.fromkeys(self._spec.ropes)
        if others:
            raise ModelError(f"tensor {entry.name} does not say which of the layers it is for")
        if not isinstance(rope, DefaultRope | Llama3Rope):
            raise ModelError(
                f"tensor {entry.name} and the configuration's {type(rope).__name__} "
                "both scale the rotary frequencies"
            )
        _check_shape(entry, (self._spec.attention_shape.head_dim // 2,))
        factors = self._files.read(entry)
        wrong = factors[~(factors.isfinite() & (factors > 0))].tolist()
        if wrong:
            raise ModelError(
                f"tensor {entry.name} divides rotary frequencies by {wrong[0]:g}, which "
                "is no positive number"
            )
        return tuple(factors.tolist())

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


def _pop_entry(in_file: dict[str, TensorEntry], name: str, shape: tuple[int, ...]) -> TensorEntry:
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


def _rows_of(entry: TensorEntry, rows: slice) -> TensorEntry:
    """Return the entry of these rows with all columns: a range of the tensor's bytes."""
    first, end, _ = rows.indices(entry.shape[0])
    if end - first == entry.shape[0]:
        return entry
    row_bytes = entry.num_bytes // entry.shape[0]
    return TensorEntry(
        entry.name,
        entry.type,
        (end - first, *entry.shape[1:]),
        entry.file,
        entry.offset + first * row_bytes,
        (end - first) * row_bytes,
    )


def _repeats_config(name: str) -> bool:
    """Return whether a safetensors tensor only repeats what the configuration says.

    Old Llama checkpoints store the rotary frequencies of every layer.
    """
    return name.endswith(".rotary_emb.inv_freq")
