"""Weights in memory that kernels of ours laid out, and the calls that multiply with them.

    PackedWeight    quantisation blocks: of a GGUF file, made of GPTQ, AWQ, NF4, … tensors, or
                    8 bits with a scale per 32 numbers
    RotatedWeight   8 bits with one scale per output, rotated
    Bf16Weight      bfloat16
    Fp8Weight       8 bits of floating point with scales of groups of columns

A row's result depends neither on the other rows nor on their number nor on the number of threads,
bit by bit. A row with a NaN or an infinity gives NaN and affects no other. Kernels take addresses,
so what they assume about tensors is checked here. Weights may be made and used by several threads
at once.
"""

import copy
import ctypes
import functools
import hashlib
from enum import IntEnum
from typing import Final, Self

import numpy as np
import numpy.typing as npt
import torch

from proto.messages.prepared_model import FP8
from worker.cpu.kernel_structures import (
    Bf16Shape,
    Fp8Shape,
    LinearPart,
    PackedShape,
    Product,
    RotatedShape,
)
from worker.cpu.kernels import DTYPE_CODES, Kernels
from worker.layers.embedding import EmbeddingTable
from worker.loader.block_types import BLOCK_COLUMNS, BLOCK_TYPES

PRODUCT_DTYPES: Final = (torch.float32, torch.bfloat16)
_TYPE_CODES: Final = {name: code for code, name in enumerate(BLOCK_TYPES)}
_ROTATED_UNIT: Final = 32
_PANEL: Final = 32
"""Outputs of a panel of a packed weight, whose factors of outputs lie in front."""


class KernelFormat(IntEnum):
    """TokendWeightFormat of csrc/layers/stack.h."""

    PACKED = 0
    ROTATED = 1
    BF16 = 2
    FP8 = 3


class KernelWeight:
    """A weight [out_features, in_features], whose numbers a subclass fills in.

    kernels: lay out the weight, and multiply with it until `use_kernels`.
    type_name: the type of the numbers, for people.
    structure: describes the weight to the kernels of its format; has the fields out_features,
    in_features and packed, the last of which is set here.
    source: names files and tensors whose numbers the weight gets; "" if no other worker reads them.
    is_filled: whether another worker has filled in the numbers already.
    """

    def __init__(
        self,
        kernels: Kernels,
        weight_format: KernelFormat,
        type_name: str,
        structure: ctypes.Structure,
        source: str = "",
    ) -> None:
        self.out_features: int = structure.out_features
        self.in_features: int = structure.in_features
        self.weight_format = weight_format
        self.type_name = type_name
        self._structure = structure
        self._kernels = kernels
        self.column_order: torch.Tensor | None = None
        shape = f"{self.out_features}x{self.in_features}"
        key = f"{type_name} {shape} {source}" if source else ""
        self._packed, self.is_filled = kernels.memory.place(key, self._packed_bytes())
        structure.packed = self._packed.data_ptr()
        self.use_kernels(kernels)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the weight takes."""
        return self._packed.nbytes

    def zeros_like(self, out_features: int) -> Self:
        """Return a weight [out_features, in_features] of zeros in the same format."""
        zeros = copy.copy(self)
        zeros.out_features = out_features
        zeros._structure = type(self._structure).from_buffer_copy(self._structure)
        zeros._structure.out_features = out_features
        zeros._packed = torch.zeros(zeros._packed_bytes(), dtype=torch.uint8)
        zeros._structure.packed = zeros._packed.data_ptr()
        return zeros

    def _packed_bytes(self) -> int:
        kernels = self._kernels
        match self.weight_format:
            case KernelFormat.PACKED:
                num_bytes = kernels.packed_bytes(self._structure)
            case KernelFormat.ROTATED:
                num_bytes = kernels.rotated_bytes(self._structure)
            case KernelFormat.BF16:
                num_bytes = kernels.bf16_bytes(self._structure)
            case KernelFormat.FP8:
                num_bytes = kernels.fp8_bytes(self._structure)
        return int(num_bytes)

    @property
    def arithmetic(self) -> str:
        """Tells products apart whose bits differ: format, length of rows, digest of a sample.

        Kernels of several libraries may give the same bits. "" for packed weights: all of
        `worker.cpu.kernels.candidate_kernels` do.
        """
        if self.weight_format is KernelFormat.PACKED:
            return ""
        digest = self._sample_digest(self.multiplied_by, self.in_features)
        return f"{self.type_name} {self.in_features} {digest}"

    @classmethod
    def from_dense(cls, kernels: Kernels, dense: torch.Tensor) -> Self:
        """Return a weight with the numbers of `dense` [out, in], rounded as the format does."""
        raise NotImplementedError

    @classmethod
    @functools.cache
    def _sample_digest(cls, kernels: Kernels, in_features: int) -> str:
        """Return a digest of the float32 products of fixed numbers with a small weight."""
        num_rows, out_features = 16, 32
        count = (num_rows + out_features) * in_features
        scrambled = torch.arange(count) * 2654435761 % (1 << 32)  # Fibonacci hashing
        numbers = (scrambled.double() / (1 << 31) - 1).float().view(-1, in_features)
        weight = cls.from_dense(kernels, numbers[num_rows:].bfloat16())
        products = weight.multiply(numbers[:num_rows], out=torch.empty(num_rows, out_features))
        return hashlib.sha256(products.numpy().tobytes()).hexdigest()[:16]

    def use_kernels(self, kernels: Kernels) -> None:
        """Multiply by the kernels of a library from now on; a `part` made before does not."""
        self.multiplied_by = kernels
        match self.weight_format:
            case KernelFormat.PACKED:
                self._product = kernels.packed_product
            case KernelFormat.ROTATED:
                self._product = kernels.rotated_product
            case KernelFormat.BF16:
                self._product = kernels.bf16_product
            case KernelFormat.FP8:
                self._product = kernels.fp8_product

    def part(self, bias: torch.Tensor | None) -> LinearPart:
        """Return weight and bias [out] as a `LinearPart`; valid while both live."""
        part = LinearPart(
            self.weight_format,
            ctypes.addressof(self._structure),
            self.multiplied_by.products,
            self.out_features,
        )
        _describe_bias(part, self.out_features, bias)
        return part

    def multiply(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return x @ weight.T + bias, [N, out], for x [N, in] of float32 or bfloat16.

        bias: [out], float32 or bfloat16. out: memory for the result, of float32 or
        bfloat16, x of either; its rows may be a stride apart. Without it a new contiguous one of
        x's dtype.
        """
        result = x.new_empty(x.shape[0], self.out_features) if out is None else out
        self._multiply(x, bias, result, adds=False)
        return result

    def multiply_add(
        self, residual: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Add x @ weight.T + bias to residual [N, out] in place, rounded once; returns residual."""
        self._multiply(x, bias, residual, adds=True)
        return residual

    def rows(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return rows of the weight by int64 [N] row numbers, a new [N, in] of `dtype`.

        Exact in float32, then rounded. Raises IndexError for a number outside the weight.
        """
        assert ids.dtype == torch.int64
        assert ids.dim() == 1
        ids = ids.contiguous()
        count = len(ids)
        numbers = torch.empty(count, self.in_features, dtype=dtype)
        first_wrong = self._unpack_rows(ids, numbers)
        if first_wrong < count:
            raise IndexError(f"row {int(ids[first_wrong])} of {self.out_features}")
        return numbers

    def embedding_table(self, dtype: torch.dtype) -> EmbeddingTable:
        """Return an embedding, perhaps a tied head, whose rows are unpacked on use."""
        return EmbeddingTable(dtype, lambda token_ids: self.rows(token_ids, dtype))

    def _unpack_rows(self, ids: torch.Tensor, numbers: torch.Tensor) -> int:
        """Write these rows to `numbers`; return the index of the first id that is invalid."""
        raise NotImplementedError("rotated weights have no rows to look up")

    def _multiply(
        self, x: torch.Tensor, bias: torch.Tensor | None, output: torch.Tensor, adds: bool
    ) -> None:
        # x [N, in] and output [N, out]: rows may be a stride apart
        if self.column_order is not None:
            x = x[:, self.column_order]
        assert x.dtype in PRODUCT_DTYPES
        assert output.dtype in PRODUCT_DTYPES
        assert x.shape[1] == self.in_features
        assert x.stride(1) == 1
        assert output.shape == (x.shape[0], self.out_features)
        assert output.stride(1) == 1
        product = Product(
            x.shape[0],
            DTYPE_CODES[x.dtype],
            x.stride(0),
            x.data_ptr(),
            0,
            None,
            DTYPE_CODES[output.dtype],
            output.stride(0),
            output.data_ptr(),
            adds,
        )
        _describe_bias(product, self.out_features, bias)
        self._product(self._structure, product)


def _describe_bias(
    call: LinearPart | Product, out_features: int, bias: torch.Tensor | None
) -> None:
    if bias is not None:
        assert bias.dtype in PRODUCT_DTYPES
        assert bias.is_contiguous()
        assert bias.shape == (out_features,)
        call.bias_dtype, call.bias = DTYPE_CODES[bias.dtype], bias.data_ptr()


def is_packable(block_type: str, in_features: int) -> bool:
    """Return whether weights of this type with rows of this length can stay as they are stored."""
    columns = BLOCK_COLUMNS.get(block_type, in_features + 1)
    return in_features > 0 and in_features % columns == 0


def packed_shape(block_type: str, shape: tuple[int, int]) -> PackedShape:
    """Describe a weight [out, in] in blocks of this type to the kernels, without its memory."""
    return PackedShape(_TYPE_CODES[block_type], *shape)


class PackedWeight(KernelWeight):
    """A weight in blocks of few bits; filled by put_blocks, or made by from_dense.

    The weight is exact: each number is that of the file's block. Activations are rounded to
    8 bits and a float32 scale for each 32 numbers of a row (defined in
    tests/worker/reference/packed.py), sums are float32. Making one opens no OpenMP region.
    """

    def __init__(
        self,
        kernels: Kernels,
        block_type: str,
        shape: tuple[int, int],
        column_order: torch.Tensor | None = None,
        source: str = "",
    ) -> None:
        """Allocate a weight of zeros, or find it in memory.

        column_order: int64 [in], column i of the blocks is column column_order[i] of the weight;
            None for the same.
        """
        assert is_packable(block_type, shape[1]), (block_type, shape)
        structure = packed_shape(block_type, shape)
        super().__init__(kernels, KernelFormat.PACKED, block_type, structure, source)
        self.column_order = column_order

    def put_blocks(
        self,
        first: int,
        raw: npt.NDArray[np.uint8],
        row_order: npt.NDArray[np.int64] | None = None,
    ) -> int:
        """Pack whole rows of a file's blocks, one after the other in `raw`; return the next row.

        first: row of the weight that the first of them becomes.
        row_order: int64 [rows], row first + i of the weight is row row_order[i] of `raw`. No
        reference to `raw` is kept.
        """
        block_numbers, block_bytes = BLOCK_TYPES[self.type_name]
        num_rows, left_over = divmod(raw.nbytes, self.in_features // block_numbers * block_bytes)
        assert raw.dtype == np.uint8
        assert not left_over
        assert 0 <= first <= first + num_rows <= self.out_features
        blocks, order = np.ascontiguousarray(raw), _order_address(row_order, num_rows)
        self._kernels.pack_blocks(self._structure, first, num_rows, blocks.ctypes.data, order)
        return first + num_rows

    def put_factors(self, first: int, factors: npt.NDArray[np.float32]) -> None:
        """Multiply the numbers of rows that were packed by float32 [rows] factors; only of NVFP4.

        first: the first of these rows.
        """
        assert self.type_name == "NVFP4"
        assert 0 <= first <= first + len(factors) <= self.out_features
        panels = -(-self.out_features // _PANEL)
        heads = self._packed.view(torch.float32).view(panels, -1)[:, :_PANEL]
        rows = torch.arange(first, first + len(factors))
        heads[rows // _PANEL, rows % _PANEL] = torch.from_numpy(factors)

    @classmethod
    def from_dense(cls, kernels: Kernels, dense: torch.Tensor) -> Self:
        """Round a float32, bfloat16 or float16 weight [out, in] to 8 bits and a float16
        scale per 32 numbers of a row.

        `in` is a multiple of 32. The scale overflows for magnitudes above 8.3 million:
        such weights, and infinities and NaN, make their outputs NaN.
        """
        weight = cls(kernels, "Q8_0", (dense.shape[0], dense.shape[1]))
        weight.put_dense(dense)
        return weight

    def put_dense(self, dense: torch.Tensor) -> None:
        """Round the whole weight as from_dense does; of type Q8_0."""
        assert self.type_name == "Q8_0"
        assert dense.shape == (self.out_features, self.in_features)
        assert dense.stride(1) == 1
        self._kernels.pack_dense(
            self._structure, DTYPE_CODES[dense.dtype], dense.stride(0), dense.data_ptr()
        )

    def _unpack_rows(self, ids: torch.Tensor, numbers: torch.Tensor) -> int:
        code = DTYPE_CODES[numbers.dtype]
        first_wrong: int = self._kernels.unpack_rows(
            self._structure, len(ids), ids.data_ptr(), code, numbers.data_ptr()
        )
        if self.column_order is not None:
            numbers[:, self.column_order] = numbers.clone()
        return first_wrong


def block_table(
    kernels: Kernels,
    block_type: str,
    stored: npt.NDArray[np.uint8],
    columns: int,
    dtype: torch.dtype,
) -> EmbeddingTable:
    """Return the quantisation blocks [vocab, columns] of a mapped GGUF file as an embedding.

    stored: uint8 [vocab, bytes of a row], contiguous. Rows are exact in float32, then rounded.
    """
    assert stored.flags.c_contiguous

    def rows(ids: torch.Tensor) -> torch.Tensor:
        assert ids.dtype == torch.int64
        ids, count = ids.contiguous(), len(ids)
        numbers = torch.empty(count, columns, dtype=dtype)
        if not count:
            return numbers
        first, last = int(ids.min()), int(ids.max())
        if first < 0 or last >= len(stored):
            raise IndexError(f"row {first if first < 0 else last} of {len(stored)}")
        shape = packed_shape(block_type, (count, columns))
        packed = torch.empty(kernels.packed_bytes(shape), dtype=torch.uint8)
        shape.packed = packed.data_ptr()
        kernels.pack_blocks(shape, 0, count, stored.ctypes.data, ids.data_ptr())
        in_order = torch.arange(count)
        code = DTYPE_CODES[dtype]
        kernels.unpack_rows(shape, count, in_order.data_ptr(), code, numbers.data_ptr())
        return numbers

    return EmbeddingTable(dtype, rows)


def _order_address(row_order: npt.NDArray[np.int64] | None, num_rows: int) -> int | None:
    """Return the address of a permutation of rows, as kernels take it; None for None."""
    if row_order is None:
        return None
    assert row_order.dtype == np.int64
    assert row_order.shape == (num_rows,)
    assert row_order.flags.c_contiguous
    assert row_order.min() >= 0
    assert row_order.max() < num_rows
    address: int = row_order.ctypes.data
    return address


def can_rotate(in_features: int) -> bool:
    """Return whether weights with rows of this length can be a RotatedWeight."""
    return in_features > 0 and in_features % _ROTATED_UNIT == 0


class RotatedWeight(KernelWeight):
    """A weight of 8 bits with a scale per output, made by from_dense.

    The weight and each row of activations are rounded after a rotation that spreads outliers
    (defined in tests/worker/reference/rotated.py); sums are of integers. Making one opens no
    OpenMP region.
    """

    def __init__(self, kernels: Kernels, shape: tuple[int, int], source: str = "") -> None:
        """Allocate a weight [out, in] of zeros, or find it in memory."""
        assert can_rotate(shape[1])
        super().__init__(kernels, KernelFormat.ROTATED, "int8", RotatedShape(*shape), source)

    @classmethod
    def from_dense(cls, kernels: Kernels, dense: torch.Tensor) -> Self:
        """Rotate and round a float32, bfloat16 or float16 weight [out, in].

        A weight with a NaN, an infinity or a number above 1e36 makes its output NaN.
        """
        weight = cls(kernels, (dense.shape[0], dense.shape[1]))
        weight.put_dense(dense)
        return weight

    def put_dense(self, dense: torch.Tensor) -> None:
        """Rotate and round the whole weight, as from_dense does."""
        assert dense.shape == (self.out_features, self.in_features)
        assert dense.stride(1) == 1
        self._kernels.rotate_dense(
            self._structure, DTYPE_CODES[dense.dtype], dense.stride(0), dense.data_ptr()
        )


class Bf16Weight(KernelWeight):
    """A bfloat16 weight in the kernels' layout (csrc/products/bf16/bf16.h), filled by put_rows.

    Only results, and float32 activations, are rounded to bfloat16.
    """

    def __init__(self, kernels: Kernels, shape: tuple[int, int], source: str = "") -> None:
        """Allocate a weight [out, in] of zeros, or find it in memory."""
        super().__init__(kernels, KernelFormat.BF16, "bf16", Bf16Shape(*shape), source)

    @classmethod
    def from_dense(cls, kernels: Kernels, dense: torch.Tensor) -> Self:
        """Copy a bfloat16 weight [out, in]."""
        weight = cls(kernels, (dense.shape[0], dense.shape[1]))
        weight.put_rows(0, dense)
        return weight

    def put_rows(
        self, first: int, dense: torch.Tensor, row_order: npt.NDArray[np.int64] | None = None
    ) -> int:
        """Copy rows [rows, in] of bfloat16; return the row after the last. See put_blocks.

        Uses torch's threads of the calling thread.
        """
        num_rows, columns = dense.shape
        assert dense.dtype == torch.bfloat16
        assert dense.stride(1) == 1
        assert columns == self.in_features
        assert 0 <= first <= first + num_rows <= self.out_features
        order = _order_address(row_order, num_rows)
        self._kernels.bf16_pack(
            self._structure, first, num_rows, dense.stride(0), dense.data_ptr(), order
        )
        return first + num_rows

    def _unpack_rows(self, ids: torch.Tensor, numbers: torch.Tensor) -> int:
        assert numbers.dtype == torch.bfloat16
        first_wrong: int = self._kernels.bf16_rows(
            self._structure, len(ids), ids.data_ptr(), numbers.data_ptr()
        )
        return first_wrong


class Fp8Weight(KernelWeight):
    """A weight of E4M3 codes, filled by put_rows: a number is code * scale.

    Products take codes as bfloat16, which holds them exactly, and rows rounded to it. Sums over up
    to 128 columns get their scale in float32 (csrc/products/fp8/fp8.h).
    """

    def __init__(
        self,
        kernels: Kernels,
        shape: tuple[int, int],
        scale_columns: int,
        *,
        wide: bool = False,
        source: str = "",
    ) -> None:
        """Allocate a weight [out, in] of zeros, or find it in memory.

        scale_columns: columns of a row that share a scale, a multiple of 32.
        wide: aligned groups of 32 rows share their scales.
        """
        assert is_packable(FP8, shape[1])
        assert is_packable(FP8, scale_columns)
        structure = fp8_shape(shape, scale_columns, wide=wide)
        self._num_groups = -(-shape[1] // scale_columns)
        super().__init__(kernels, KernelFormat.FP8, "fp8", structure, source)

    @classmethod
    def from_dense(cls, kernels: Kernels, dense: torch.Tensor) -> Self:
        """Round a weight [out, in], with a scale of each row."""
        weight = cls(kernels, (dense.shape[0], dense.shape[1]), dense.shape[1])
        largest = torch.finfo(torch.float8_e4m3fn).max
        scales = (dense.float().abs().amax(1, keepdim=True) / largest).clamp_min(1e-30)
        weight.put_rows(0, (dense.float() / scales).to(torch.float8_e4m3fn), scales)
        return weight

    def put_rows(
        self,
        first: int,
        codes: torch.Tensor,
        scales: torch.Tensor,
        row_order: npt.NDArray[np.int64] | None = None,
    ) -> int:
        """Copy rows; return the row after the last. See put_blocks.

        codes: float8_e4m3fn [rows, in]. scales: float32 [rows, groups of columns]. Raises
        ValueError for a code that is NaN. Uses torch's threads of the calling thread.
        """
        num_rows, columns = codes.shape
        assert codes.dtype == torch.float8_e4m3fn
        assert codes.stride(1) == 1
        assert columns == self.in_features
        assert scales.dtype == torch.float32
        assert scales.shape == (num_rows, self._num_groups)
        assert 0 <= first <= first + num_rows <= self.out_features
        scales, order = scales.contiguous(), _order_address(row_order, num_rows)
        has_nan = self._kernels.fp8_pack(
            self._structure,
            first,
            num_rows,
            codes.stride(0),
            codes.data_ptr(),
            scales.data_ptr(),
            order,
        )
        if has_nan:
            raise ValueError("a number is NaN")
        return first + num_rows

    def _unpack_rows(self, ids: torch.Tensor, numbers: torch.Tensor) -> int:
        exact = numbers if numbers.dtype == torch.float32 else numbers.float()
        first_wrong: int = self._kernels.fp8_rows(
            self._structure, len(ids), ids.data_ptr(), exact.data_ptr()
        )
        if exact is not numbers:
            numbers.copy_(exact)
        return first_wrong


def fp8_shape(shape: tuple[int, int], scale_columns: int, *, wide: bool) -> Fp8Shape:
    """Describe an Fp8Weight [out, in] to the kernels, without its memory."""
    return Fp8Shape(*shape, scale_columns, 32 if wide else 1)
