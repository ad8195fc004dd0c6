"""Weights in memory that kernels of ours laid out, and the calls that multiply with them.

    PackedWeight    the blocks of a GGUF file, or 8 bits with a scale per 32 numbers
    RotatedWeight   8 bits with one scale per output, rotated
    Bf16Weight      bfloat16

A row's result depends neither on the other rows nor on their number nor on the number of threads,
bit by bit. A row with a NaN or an infinity gives NaN and affects no other. Kernels take addresses,
so what they assume about tensors is checked here. Weights may be made and used by several threads
at once.
"""

import ctypes
from enum import IntEnum
from typing import Final, Self

import numpy as np
import numpy.typing as npt
import torch

from worker.kernels import (
    DTYPE_CODES,
    Bf16Shape,
    Kernels,
    LinearPart,
    PackedShape,
    Product,
    RotatedShape,
)

PRODUCT_DTYPES: Final = (torch.float32, torch.bfloat16)
GGUF_BLOCKS: Final = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}
"""Numbers and bytes of a block of each GGUF type that can stay packed.

The order is that of TokendWeightType in csrc/products/packed/packed.h.
"""
_TYPE_CODES: Final = {name: code for code, name in enumerate(GGUF_BLOCKS)}
_ROTATED_UNIT: Final = 32

Structure = ctypes.Structure


class KernelFormat(IntEnum):
    """TokendWeightFormat of csrc/layers/stack.h."""

    PACKED = 0
    ROTATED = 1
    BF16 = 2


class KernelWeight:
    """A weight [out_features, in_features], whose numbers a subclass fills in.

    structure: describes the weight to the kernels of its format; has the fields out_features,
    in_features and packed, the last of which is set here.
    """

    def __init__(self, kernels: Kernels, weight_format: KernelFormat, structure: Structure) -> None:
        match weight_format:
            case KernelFormat.PACKED:
                num_bytes, self._product = kernels.packed_bytes, kernels.packed_product
            case KernelFormat.ROTATED:
                num_bytes, self._product = kernels.rotated_bytes, kernels.rotated_product
            case KernelFormat.BF16:
                num_bytes, self._product = kernels.bf16_bytes, kernels.bf16_product
        self.out_features: int = structure.out_features
        self.in_features: int = structure.in_features
        self._format = weight_format
        self._structure = structure
        self._kernels = kernels
        self._packed = kernels.memory.allocate(num_bytes(structure))
        structure.packed = self._packed.data_ptr()

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the weight takes."""
        return self._packed.nbytes

    def part(self, bias: torch.Tensor | None) -> Structure:
        """Return weight and bias [out] as a `worker.kernels.LinearPart`; valid while both live."""
        part = LinearPart(self._format, ctypes.addressof(self._structure), self.out_features)
        _describe_bias(part, self.out_features, bias)
        return part

    def multiply(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return x @ weight.T + bias, [N, out], for x [N, in] of float32 or bfloat16.

        bias: [out], float32 or bfloat16. out: memory for the result, float32 or bfloat16
        whatever x is; its rows may be a stride apart. Without it a new contiguous one of
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

    def _unpack_rows(self, ids: torch.Tensor, numbers: torch.Tensor) -> int:
        """Write these rows to `numbers`; return the index of the first id that is invalid."""
        raise NotImplementedError("rotated weights have no rows to look up")

    def _multiply(
        self, x: torch.Tensor, bias: torch.Tensor | None, output: torch.Tensor, adds: bool
    ) -> None:
        # x [N, in] and output [N, out]: rows may be a stride apart
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


def _describe_bias(call: Structure, out_features: int, bias: torch.Tensor | None) -> None:
    if bias is not None:
        assert bias.dtype in PRODUCT_DTYPES
        assert bias.is_contiguous()
        assert bias.shape == (out_features,)
        call.bias_dtype, call.bias = DTYPE_CODES[bias.dtype], bias.data_ptr()


def is_packable(gguf_type: str, in_features: int) -> bool:
    """Return whether weights of this type with rows of this length can stay packed."""
    block_numbers, _ = GGUF_BLOCKS.get(gguf_type, (in_features + 1, 0))
    return in_features > 0 and in_features % block_numbers == 0


class PackedWeight(KernelWeight):
    """A weight in blocks of few bits; made by from_blocks or from_dense.

    The weight is exact: each number is that of the file's block. Activations are rounded to
    8 bits and a float32 scale for each 32 numbers of a row (defined in
    tests/worker/reference/packed.py), sums are float32. Making one opens no OpenMP region.
    """

    def __init__(self, kernels: Kernels, gguf_type: str, shape: tuple[int, int]) -> None:
        """Allocate a weight without numbers."""
        assert is_packable(gguf_type, shape[1]), (gguf_type, shape)
        self.gguf_type = gguf_type
        super().__init__(kernels, KernelFormat.PACKED, PackedShape(_TYPE_CODES[gguf_type], *shape))

    @classmethod
    def from_blocks(
        cls,
        kernels: Kernels,
        gguf_type: str,
        shape: tuple[int, int],
        raw: npt.NDArray[np.uint8],
        row_order: npt.NDArray[np.int64] | None = None,
    ) -> Self:
        """Pack the blocks of a file: `raw` holds the rows of `shape` one after the other.

        row_order: int64 [out], row i of the weight is row row_order[i] of the file. No
        reference to `raw` is kept. Type and length must be packable.
        """
        weight = cls(kernels, gguf_type, shape)
        block_numbers, block_bytes = GGUF_BLOCKS[gguf_type]
        assert raw.dtype == np.uint8
        assert raw.nbytes == shape[0] * (shape[1] // block_numbers) * block_bytes
        blocks = np.ascontiguousarray(raw)
        order = np.arange(shape[0]) if row_order is None else np.ascontiguousarray(row_order)
        assert order.dtype == np.int64
        assert order.shape == shape[:1]
        assert order.min() >= 0
        assert order.max() < shape[0]
        kernels.pack_blocks(weight._structure, blocks.ctypes.data, order.ctypes.data)
        return weight

    @classmethod
    def from_dense(cls, kernels: Kernels, dense: torch.Tensor) -> Self:
        """Round a float32, bfloat16 or float16 weight [out, in] to 8 bits and a float16
        scale per 32 numbers of a row.

        `in` is a multiple of 32. The scale overflows for magnitudes above 8.3 million:
        such weights, and infinities and NaN, make their outputs NaN.
        """
        weight = cls(kernels, "Q8_0", (dense.shape[0], dense.shape[1]))
        assert dense.stride(1) == 1
        kernels.pack_dense(
            weight._structure, DTYPE_CODES[dense.dtype], dense.stride(0), dense.data_ptr()
        )
        return weight

    def _unpack_rows(self, ids: torch.Tensor, numbers: torch.Tensor) -> int:
        code = DTYPE_CODES[numbers.dtype]
        first_wrong: int = self._kernels.unpack_rows(
            self._structure, len(ids), ids.data_ptr(), code, numbers.data_ptr()
        )
        return first_wrong


def can_rotate(in_features: int) -> bool:
    """Return whether weights with rows of this length can be a RotatedWeight."""
    return in_features > 0 and in_features % _ROTATED_UNIT == 0


class RotatedWeight(KernelWeight):
    """A float32, bfloat16 or float16 weight [out, in], rounded to 8 bits with a scale per output.

    The weight and each row of activations are rounded after a rotation that spreads outliers
    (defined in tests/worker/reference/rotated.py); sums are of integers. No reference to the dense
    weight is kept. A weight with a NaN, an infinity or a number above 1e36 makes its output NaN.
    Making one opens no OpenMP region.
    """

    def __init__(self, kernels: Kernels, dense: torch.Tensor) -> None:
        assert can_rotate(dense.shape[1])
        assert dense.stride(1) == 1
        super().__init__(kernels, KernelFormat.ROTATED, RotatedShape(*dense.shape))
        code = DTYPE_CODES[dense.dtype]
        kernels.rotate_dense(self._structure, code, dense.stride(0), dense.data_ptr())


class Bf16Weight(KernelWeight):
    """A copy of a bfloat16 weight [out, in] in the kernels' layout (csrc/products/bf16/bf16.h).

    Only results, and float32 activations, are rounded to bfloat16. Making one uses torch's
    threads of the calling thread.
    """

    def __init__(self, kernels: Kernels, dense: torch.Tensor) -> None:
        assert dense.dtype == torch.bfloat16
        assert dense.stride(1) == 1
        super().__init__(kernels, KernelFormat.BF16, Bf16Shape(*dense.shape))
        kernels.bf16_pack(self._structure, dense.stride(0), dense.data_ptr())

    def _unpack_rows(self, ids: torch.Tensor, numbers: torch.Tensor) -> int:
        assert numbers.dtype == torch.bfloat16
        first_wrong: int = self._kernels.bf16_rows(
            self._structure, len(ids), ids.data_ptr(), numbers.data_ptr()
        )
        return first_wrong
