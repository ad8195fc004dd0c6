"""The weights of one model in its files, by this program's names, as one rank reads them.

WeightSource matches the files against a ModelSpec (names, shapes, completeness) and undoes what
GGUF files do to query and key rows and to norms. It knows nothing of layers and fused products.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from proto.errors import ModelError
from proto.messages.prepared_model import FP8, TensorEntry, TensorIndex
from worker.layers.norm import NormWeight
from worker.loader import quantised
from worker.loader.block_types import BLOCK_COLUMNS
from worker.loader.files import StoredBlocks, TensorFiles, check_blocks, entries_by_name
from worker.models.layer_device import LayerDevice
from worker.models.parts import Shard, StackPart, WeightSpec
from worker.models.rope import DefaultRope, FactorsRope, Llama3Rope, NoRope, Rope
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
        stack = weight.stack_in(index.format, types)
        stored_as = types.get(weight.name_in(index.format))
        if stack is not None:
            stored_as = types.get(stack.tensor, stored_as)
        if name.startswith("layers.") and stored_as in BLOCK_COLUMNS:
            local = name.split(".", 2)[2]
            columns[local] = max(columns.get(local, 1), BLOCK_COLUMNS[stored_as])
    return columns


@dataclass(frozen=True)
class StoredWeight:
    """Where a weight lies in the files.

    entry: whole rows of a tensor. indices: of its rows that are rows of the weight, or of its
        columns if it is stored transposed.
    """

    entry: TensorEntry
    indices: range
    is_transposed: bool = False

    def with_rows(self, rows: slice) -> "StoredWeight":
        """Return where these rows of the weight lie."""
        indices = self.indices[rows]
        if self.is_transposed:
            return replace(self, indices=indices)
        entry = _rows_of(self.entry, slice(indices.start, indices.stop))
        return StoredWeight(entry, range(0, len(indices) * indices.step, indices.step))

    def read(self, files: TensorFiles) -> torch.Tensor:
        """Return the weight's rows; a view of the mapped file for plain types."""
        stored = files.read(self.entry)
        matrix = stored.t() if self.is_transposed else stored
        return matrix[self.indices.start : self.indices.stop : self.indices.step]


class WeightSource:
    """Reads weights into tensors of one dtype and device; safe to use from several threads.

    spec: the whole model. shards: the part of each divided weight that is read. torch_device: where
    tensors are; None for that of `device`.

    Raises ModelError at once for a tensor that is missing, unknown or of a shape
    other than the spec's, naming it as the file does.
    """

    def __init__(
        self,
        index: TensorIndex,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: LayerDevice,
        shards: Mapping[str, Shard] = _WHOLE,
        torch_device: torch.device | None = None,
    ) -> None:
        self._spec = spec
        self._origin = index.files[0] if index.files else ""
        self.dtype = dtype
        self.device = device
        self.torch_device = torch_device or device.torch_device
        self._files = TensorFiles(index)
        self._weights = spec.weights()
        self._shards = {name: shards.get(name, Shard()) for name in self._weights}
        self._shapes = {
            name: self._shards[name].shape_of(weight.shape)
            for name, weight in self._weights.items()
        }
        self._column_orders: dict[str, torch.Tensor | None] = {}
        self._format = index.format
        self._is_gguf = index.format == "gguf"
        prefix = "blk" if self._is_gguf else "model.layers"
        unused = tuple(
            f"{prefix}.{spec.num_layers + number}." for number in range(spec.num_unused_layers)
        )
        in_file = {
            name: entry
            for name, entry in entries_by_name(index).items()
            if (self._is_gguf or not _repeats_config(name))
            and (self._is_gguf or not name.startswith(spec.unused_prefixes))
            and not name.startswith(unused)
            and name not in spec.unused_tensors
        }
        self._rope_factors: tuple[float, ...] | None = None
        if self._is_gguf and (factors := in_file.pop(ROPE_FACTORS, None)):
            self._rope_factors = self._read_rope_factors(factors)
        names, stacks = frozenset(in_file), dict[str, TensorEntry]()
        self._entries = {
            name: _pop_entry(
                in_file,
                stacks,
                weight,
                weight.name_in(index.format),
                weight.stack_in(index.format, names),
            )
            for name, weight in self._weights.items()
        }
        self._stored_tied_head: TensorEntry | None = None
        head = "output.weight" if self._is_gguf else "lm_head.weight"
        if not spec.has_head:
            in_file.pop(head, None)
        elif spec.tied_embeddings:
            self._stored_tied_head = in_file.pop(head, None)
            if self._stored_tied_head is not None:
                _check_shape(self._stored_tied_head, self._weights["embedding.weight"].shape)
        if in_file:
            raise ModelError(
                f"tensor {next(iter(in_file))} is no part of {spec.architecture} with this "
                f"configuration ({len(in_file)} such tensors)"
            )

    def read(self, *names: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return these weights, one below the other, as one new tensor (of `dtype` if given)."""
        rows = [self._shapes[name][0] for name in names]
        shape = (sum(rows), *self._shapes[names[0]][1:])
        result = torch.empty(shape, dtype=dtype or self.dtype, device=self.torch_device)
        for name, part in zip(names, torch.split(result, rows), strict=True):
            self._read_into(name, part)
        return result

    def read_norm(self, name: str) -> NormWeight:
        """Read the norm whose weight is `name`.weight.

        Float32 if the model's norms add 1 to the weight: 16 bits would round the rest away.
        """
        spec, bias = self._spec, f"{name}.bias"
        adds_one = spec.norms_add_one
        weight = self.read(f"{name}.weight", dtype=torch.float32 if adds_one else None)
        if adds_one and not self._is_gguf:
            weight += 1.0
        return NormWeight(
            weight,
            spec.norm_eps,
            spec.norm_type == "layer",
            self.read(bias) if bias in self._weights else None,
        )

    def type_of(self, name: str) -> str:
        """Return how a weight is stored: one of GGUF's types, or the safetensors dtype.

        Where blocks are those of its transpose, the weight is read as numbers: "F32".
        """
        weight = self._entries[name]
        is_read_as_numbers = weight.is_transposed and weight.entry.type in BLOCK_COLUMNS
        return "F32" if is_read_as_numbers else weight.entry.type

    def name_in_file(self, name: str) -> str:
        """Return what the file calls the tensor that a weight lies in."""
        return self._entries[name].entry.name

    def describe(self, *names: str) -> str:
        """Return the same text for the same weights of the same model only, of any rank."""
        return " ".join((self._origin, *names))

    def is_joined(self, name: str) -> bool:
        """Return whether a weight lies in several tensors, of which its blocks are made."""
        entry = self._entries[name].entry
        return bool(entry.parts) and entry.packing != "gguf_nvfp4"

    def has_factors(self, name: str) -> bool:
        """Return whether the numbers of a weight's blocks are multiplied by others beside them."""
        entry = self._entries[name].entry
        return entry.type == "NVFP4" and bool(entry.parts)

    def columns_of(self, name: str) -> int:
        """Return the columns of a weight: the numbers that a product sums over."""
        return self._shapes[name][-1]

    def column_order(self, name: str) -> torch.Tensor | None:
        """Return the order of the columns in the weight's blocks, None for that of the weight.

        See PackedWeight. Of a shard of columns there are no blocks in such an order.
        """
        entry = self._entries[name].entry
        if name not in self._column_orders:
            order = quantised.column_order(entry, self._files.parts_of(entry))
            self._column_orders[name] = order
        return self._column_orders[name]

    def form_of(self, name: str) -> tuple[str, bytes]:
        """Return the type of a weight and what else must be equal to pack it with its neighbour.

        That is, scales of FP8, and the order of reordered columns, as bytes.
        """
        stored_as, order = self.type_of(name), self.column_order(name)
        if stored_as == FP8:
            return stored_as, repr(self.fp8_scales(name)).encode()
        return stored_as, b"" if order is None else order.numpy().tobytes()

    def joined_shape(self, *names: str) -> tuple[int, int]:
        """Return rows and columns of these weights, one below the other, as this rank has them."""
        return sum(self._shapes[name][0] for name in names), self.columns_of(names[0])

    def read_blocks(self, name: str) -> StoredBlocks:
        """Return a weight in quantisation blocks as it is stored; may share the mapped file."""
        own = [(weight.entry, weight.indices.step) for weight in self._own_parts(name)]
        for entry, _ in own:
            if not entry.parts:
                check_blocks(entry)
        data = [self._files.blocks_of(*rows) for rows in own]
        factors = [each for rows in own if (each := self._files.factors_of(*rows)) is not None]
        stored = StoredBlocks(
            entry.type,
            self._shapes[name][0],
            entry.shape[1],
            data[0] if len(data) == 1 else np.concatenate(data),
            self._row_order(name),
            self.column_order(name),
            np.concatenate(factors) if factors else None,
        )
        return stored.with_columns(self._shards[name].column_slices(stored.columns))

    def fp8_scales(self, name: str) -> tuple[int, bool]:
        """Return which numbers of a weight in FP8 share a scale, as this rank has it.

        The columns of a row that do, and whether aligned groups of 32 rows do.
        """
        columns, rows = self.fp8_block(name)
        return columns, rows % 32 == 0

    def fp8_block(self, name: str) -> tuple[int, int]:
        """Return the columns and the aligned rows of a weight in FP8 that share a scale."""
        shard = self._shards[name]
        weight = self._own_rows(name)
        entry = weight.entry
        in_order = weight.indices.step == 1 and self._row_order(name) is None
        rows = math.gcd(entry.first_row, len(weight.indices), int(entry.options["rows"]))
        return quantised.fp8_scale_columns(entry, shard.columns), rows if in_order else 1

    def rounds_inputs(self, name: str) -> bool:
        """Return whether the checkpoint wants the input of a weight in FP8 rounded to FP8."""
        return "none_inputs" not in self._entries[name].entry.options

    def input_scale(self, name: str) -> float | None:
        """Return the checkpoint's scale of all inputs of a weight in FP8; None for that of a row.

        Raises ModelError unless it is positive and finite.
        """
        entry = self._entries[name].entry
        if "static_inputs" not in entry.options or "inputs" not in entry.parts:
            return None
        scale = float(self._files.parts_of(entry)["inputs"].view(-1)[0])
        if not 0 < scale < math.inf:
            raise ModelError(f"the scale of the input of {entry.name} is {scale:g}")
        return scale

    def read_codes(self, name: str) -> quantised.Codes:
        """Return a weight as codes, with this rank's rows in order; see quantised.read_codes."""
        shard = self._shards[name]
        weight = self._own_rows(name)
        parts = self._files.parts_of(weight.entry)
        found = quantised.read_codes(weight.entry, parts, shard.columns, weight.indices.step)
        order = self._row_order(name)
        return found if order is None else found.with_rows(torch.from_numpy(order))

    def code_form(self, name: str) -> tuple[object, ...]:
        """Return a key: neighbouring weights of equal keys are read_codes of one kind."""
        entry, columns = self._entries[name].entry, self._shards[name].columns
        scales = entry.parts["scales"].type, "zeros" in entry.parts
        return *self.form_of(name), *scales, quantised.code_columns(entry, columns)

    def code_bytes(self, name: str) -> int:
        """Return the bytes of the codes, scales and zeros of read_codes."""
        rows, columns = self._shapes[name]
        entry, shard = self._entries[name].entry, self._shards[name]
        bits = 8 if entry.type.startswith("INT8") or entry.type == FP8 else 4
        groups = columns // quantised.code_columns(entry, shard.columns)
        return rows * (columns * bits // 8 + groups * quantised.scale_bytes(entry))

    def read_fp8(
        self, name: str
    ) -> tuple[torch.Tensor, torch.Tensor, npt.NDArray[np.int64] | None]:
        """Return the codes and scales of a weight in FP8, and the order of its rows.

        See quantised.read_fp8 and read_rows.
        """
        shard = self._shards[name]
        weight = self._own_rows(name)
        parts = self._files.parts_of(weight.entry)
        stored = quantised.read_fp8(weight.entry, parts, shard.columns, weight.indices.step)
        return *stored, self._row_order(name)

    def prefetch(self, name: str) -> None:
        """Let the system read a weight, or this rank's rows of it, into the page cache."""
        for weight in self._own_parts(name):
            self._files.prefetch(weight.entry)

    def release(self) -> None:
        """Give back the pages of the files; see TensorFiles."""
        self._files.release()

    def read_rows(
        self, name: str, dtype: torch.dtype | None = None, rows: slice | None = None
    ) -> tuple[torch.Tensor, npt.NDArray[np.int64] | None]:
        """Return the rows [rows, columns] of a weight in the file's order, and that order.

        A view of the mapped file if neither conversion nor transposition is needed, nor rows or
        columns of several parts. rows: which of them, in the file's order; None for all.
        The order is int64 [rows], row i of the weight is row order[i] of these; None for the same.
        """
        stored = self._read(name, rows)
        found = stored.contiguous() if self._entries[name].is_transposed else stored
        return found.to(dtype or stored.dtype), self._row_order(name)

    def splits_block(self, name: str, block_size: int) -> bool:
        """Return whether the shard's columns begin or end within a quantisation block.

        A part of the columns also does if blocks have the columns in another order.
        """
        num_columns = self._weights[name].shape[-1]
        slices = self._shards[name].column_slices(num_columns)
        if slices != [slice(0, num_columns)] and self.column_order(name) is not None:
            return True
        cuts = {cut for each in slices for cut in (each.start, each.stop)} - {num_columns}
        return any(cut % block_size for cut in cuts)

    def scaled_rope(self, rope: Rope) -> Rope:
        """Return the rotary embedding with the frequency divisors of the file, if it has any."""
        if self._rope_factors is None or isinstance(rope, NoRope):
            return rope
        return FactorsRope(rope.theta, factors=self._rope_factors, axes=rope.axes)

    def _row_order(self, name: str) -> npt.NDArray[np.int64] | None:
        """Return HeadRows.order for this rank's rows of a weight."""
        heads = self._weights[name].head_rows
        return None if heads is None else heads.order(self._shapes[name][0], self._format)

    def _own_rows(self, name: str) -> StoredWeight:
        """Return where this rank's rows of a weight lie, which are one range."""
        (weight,) = self._own_parts(name)
        return weight

    def _own_parts(self, name: str) -> list[StoredWeight]:
        """Return where this rank's rows of a weight lie, a range of the file after the other."""
        weight = self._entries[name]
        return [
            weight.with_rows(rows) for rows in self._shards[name].row_slices(len(weight.indices))
        ]

    def _read(self, name: str, rows: slice | None = None) -> torch.Tensor:
        """Return this rank's rows and columns of a weight in the file's order; see read_rows."""
        own = self._own_parts(name)
        if rows is not None:
            own = [self._own_rows(name).with_rows(rows)]
        parts = [weight.read(self._files) for weight in own]
        stored = parts[0] if len(parts) == 1 else torch.cat(parts)
        return stored if stored.dim() == 1 else self._shards[name].columns_of(stored)

    def _read_into(self, name: str, destination: torch.Tensor) -> None:
        stored = self._read(name)
        order = self._row_order(name)
        destination.copy_(stored if order is None else stored[torch.from_numpy(order)])

    def _read_rope_factors(self, entry: TensorEntry) -> tuple[float, ...]:
        """Read divisors of the rotary frequencies; raises ModelError if they cannot apply."""
        rope, *others = (rope for rope in dict.fromkeys(self._spec.ropes) if rope != NoRope())
        if others:
            raise ModelError(f"tensor {entry.name} does not say which of the layers it is for")
        if not isinstance(rope, DefaultRope | Llama3Rope):
            raise ModelError(
                f"tensor {entry.name} and the configuration's {type(rope).__name__} "
                "both scale the rotary frequencies"
            )
        attention = self._spec.attention_layers[0]
        _check_shape(entry, ((attention.rotary_dim or attention.head_dim) // 2,))
        factors = self._files.read(entry)
        wrong = factors[~(factors.isfinite() & (factors > 0))].tolist()
        if wrong:
            raise ModelError(
                f"tensor {entry.name} divides rotary frequencies by {wrong[0]:g}, which "
                "is no positive number"
            )
        return tuple(factors.tolist())

    def check_tied_head(self) -> None:
        """Raise ModelError if a tied head is stored too and differs from the embedding."""
        copy, embedding = self._stored_tied_head, self._entries["embedding.weight"].entry
        if copy is not None and not torch.equal(
            self._files.read(copy), self._files.read(embedding)
        ):
            raise ModelError(
                f"tensor {copy.name} differs from {embedding.name}, "
                "but the configuration has tie_word_embeddings = true"
            )


def _pop_entry(
    in_file: dict[str, TensorEntry],
    stacks: dict[str, TensorEntry],
    weight: WeightSpec,
    name: str,
    stack: StackPart | None,
) -> StoredWeight:
    """Return where a weight is, and remove its tensor from `in_file`.

    name: of a tensor of its own. stack: where it may be instead.
    stacks: the tensors of several weights that were removed already.
    """
    if stack is not None and stack.tensor in in_file:
        whole = stacks[stack.tensor] = in_file.pop(stack.tensor)
        _check_shape(whole, stack.shape_in_file(_is_transposed(whole, stack)))
    if stack is not None and stack.tensor in stacks:
        return _part_of(stacks[stack.tensor], stack, weight.shape)
    entry = in_file.pop(name, None)
    if entry is None:
        shape = weight.shape
        if stack is not None and stack.tensor == name:
            shape = stack.shape_in_file(stack.transposed)
        also = f", and so is {stack.tensor}" if stack is not None and stack.tensor != name else ""
        raise ModelError(f"tensor {name} of shape {list(shape)} is missing{also}")
    _check_shape(entry, weight.shape)
    return StoredWeight(entry, range(weight.shape[0]))


def _is_transposed(entry: TensorEntry, stack: StackPart) -> bool:
    if entry.packing == "mxfp4":
        return False
    only_shape = stack.shape != entry.shape == stack.shape_in_file(transposed=True)
    return stack.transposed or (stack.may_be_transposed and only_shape)


def _part_of(entry: TensorEntry, stack: StackPart, shape: tuple[int, ...]) -> StoredWeight:
    """Return where a weight of this shape is in a tensor of several."""
    tail = entry.shape[len(entry.shape) - len(shape) + 1 :]
    *experts, rows_each = entry.shape[: len(entry.shape) - len(tail)]
    all_rows = entry.with_shape((math.prod(experts) * rows_each, *tail))
    first, step = stack.index * rows_each, stack.row_step
    one = _rows_of(all_rows, slice(first, first + rows_each))
    indices = range(stack.first_row, stack.first_row + shape[0] * step, step)
    if _is_transposed(entry, stack):
        columns = slice(stack.first_column, stack.first_column + shape[1])
        return StoredWeight(_rows_of(one, columns), indices, is_transposed=True)
    return StoredWeight(one, range(rows_each)).with_rows(slice(indices.start, indices.stop, step))


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
    return entry.with_rows(first, end)


def _repeats_config(name: str) -> bool:
    """Return whether a safetensors tensor only repeats what the configuration says.

    Old Llama checkpoints store the rotary frequencies of every layer.
    """
    return name.endswith(".rotary_emb.inv_freq")
